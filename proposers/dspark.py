"""A block in one pass, then token by token through its logits (DSpark, Cheng et al., arXiv 2607.05147).

DFlash's rows know of no guess; here each guess changes the logits of the place behind it, by a head that costs little
beside the pass. So trees grow level by level: every node sees its own path's last guess (`rnn` heads: its whole path).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from proposers.base import ProposerContext
from proposers.captured.drafter import CapturedDrafter
from proposers.captured.dspark import CapturedDSpark, CapturedDynamicDSpark, CapturedStaticDSpark
from proposers.drafting.blocks import BlockProposer
from proposers.drafting.level_by_level import LevelByLevelProposer, TreeNode
from proposers.drafting.token_by_token import Draw
from proposers.heads.dspark import DSparkHead, load_dspark_head
from proposers.trees.growth import Growth
from proposers.trees.static import Choices, check_depth
from proposers.vocabularies.partial import over_target_vocabulary
from runner.engine.checkpoint import ModelSource
from runner.engine.request import Request
from runner.engine.upload import to_device


class DSparkProposer(BlockProposer, LevelByLevelProposer):
    head: DSparkHead

    def __init__(
        self,
        *,
        num_speculative_tokens: int,
        context: ProposerContext,
        source: ModelSource,
        draft_sample_method: str,
        max_model_len: int | None = None,  # longest text that the head sees; None: the target's
        speculative_token_tree: str | Choices | None = None,
        tree_depth: int = 5,
        tree_top_k: int = 4,
        aux_hidden_state_layer_ids: tuple[int, ...] | None = None,
    ) -> None:
        """
        Raises:
            UserError: no such head, or choices that are deeper than its block.
        """
        head = load_dspark_head(source, context, max_model_len, aux_hidden_state_layer_ids)
        most = head.config.max_draft_tokens
        if isinstance(speculative_token_tree, tuple):
            check_depth(speculative_token_tree, max_depth=most)
        super().__init__(
            head,
            num_speculative_tokens=num_speculative_tokens,
            context=context,
            source=source,
            is_tree=speculative_token_tree is not None,
            draft_sample_method=draft_sample_method,
            speculative_token_tree=speculative_token_tree,
            tree_depth=min(tree_depth, most),
            tree_top_k=tree_top_k,
        )
        self._depths: dict[str, int] = {}  # request_id -> rows of its block in this step
        self._first_rows = torch.empty(0)  # [requests] int64: of the block of each that drafts
        self._last_rows = torch.empty(0)
        self._hidden = self._logits = torch.empty(0)  # of all their rows, [num_rows, hidden] and [num_rows, known]
        self._owners = torch.empty(0)  # [rows of the last call] int64: the place of the request of each
        self._state = torch.empty(0)  # [rows of the last call, rank]

    def max_draft_tokens(self, request: Request, limit: int) -> int:
        return self.room(request, limit) if self.drafts_trees else super().max_draft_tokens(request, limit)

    def captured_drafter(self, num_tokens: int) -> CapturedDrafter | None:
        if self.num_speculative_tokens == 0 or not self.runner.is_paged:
            return super().captured_drafter(num_tokens)
        common: dict[str, Any] = {**self.captured_arguments(num_tokens), "head": self.head, "runner": self.runner}
        if num_tokens == 0 or not self.drafts_trees:
            return CapturedDSpark(depths=None, **common)
        if self.is_dynamic:
            depth = min(num_tokens, self.tree_depth)
            depths = [min(count, depth) for count in range(1, num_tokens + 1)]
            return CapturedDynamicDSpark(tree_depth=depth, top_k=self.tree_top_k, depths=depths, **common)
        choices = self.choices[:num_tokens]
        depths = list(accumulate(map(len, choices), max))
        common |= {"num_tokens": len(choices), "most_requests": self.context.max_num_seqs}
        return CapturedStaticDSpark(choices=choices, depths=depths, **common)

    def walk(self, requests: Sequence[Request], counts: Sequence[int], draw: Draw) -> torch.Tensor:
        self._depths = {request.request_id: count for request, count in zip(requests, counts, strict=True)}
        return super().walk(requests, counts, draw)

    def _growth(self, requests: Sequence[Request], counts: Sequence[int], *, need_probs: bool) -> Growth:
        depths = [
            min(count, self.tree_depth) if self.is_dynamic else max(map(len, self.choices[:count])) for count in counts
        ]
        self._depths = {request.request_id: depth for request, depth in zip(requests, depths, strict=True)}
        return super()._growth(requests, counts, need_probs=need_probs)

    def first_logits(self, requests: Sequence[Request]) -> torch.Tensor:
        counts = [self._depths[request.request_id] for request in requests]
        ends = list(accumulate(counts))
        device = self.context.device
        self._last_rows = to_device([end - 1 for end in ends], torch.int64, device)
        self._first_rows = to_device([0, *ends][:-1], torch.int64, device)
        self._hidden = self.block_rows(requests, counts)
        rows, tile = self.runner.in_tiles(self._hidden)
        self._logits = self.head.logits(rows, tile)[: len(self._hidden)]
        self._owners = torch.arange(len(requests), device=device)
        self._state = self.head.markov.first_state(len(requests))
        pending = [request.tokens_between(request.num_tokens - 1, request.num_tokens)[0] for request in requests]
        return self._after(to_device(pending, torch.int64, device), 0)

    def next_logits(
        self, requests: Sequence[Request], step: int, token_ids: torch.Tensor, row_idx: torch.Tensor | None
    ) -> torch.Tensor:
        if row_idx is not None:
            self._owners, self._state = (own.index_select(0, row_idx) for own in (self._owners, self._state))
        return self._after(token_ids, step)

    def level_logits(
        self, requests: Sequence[Request], owners: Sequence[int], nodes: Sequence[TreeNode], token_ids: torch.Tensor
    ) -> torch.Tensor:
        before = to_device([node.row for node in nodes], torch.int64, self.context.device)
        self._owners, self._state = (own.index_select(0, before) for own in (self._owners, self._state))
        return self._after(token_ids, len(nodes[0].path))

    def _after(self, token_ids: torch.Tensor, place: int) -> torch.Tensor:
        """Logits [num_rows, vocab] of a place of the block behind these tokens [num_rows], the state moved on."""
        # A level behind the last row of a block has no node that is drafted, but for a chain that follows a grammar in
        # place of a static tree of few nodes, which may be deeper: such guesses come of the last row.
        rows = torch.minimum(self._first_rows + place, self._last_rows).index_select(0, self._owners)
        num_rows = len(token_ids)
        state, tile = self.runner.in_tiles(self._state)
        hidden = None
        if self.head.markov.reads_hidden:
            hidden, _ = self.runner.in_tiles(self._hidden.index_select(0, rows))
        padded = torch.nn.functional.pad(token_ids, (0, len(state) - num_rows))
        added, state = self.head.markov(state, hidden, padded, tile)
        self._state = state[:num_rows]
        logits = self._logits.index_select(0, rows) + added[:num_rows]
        return over_target_vocabulary(logits, self.head.known_tokens)
