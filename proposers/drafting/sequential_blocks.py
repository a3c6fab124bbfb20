"""Drafters whose block is gone through token by token by a head that costs little beside its pass: DSpark, DFlash 2.

Each guess changes the logits of the place behind it. So trees grow level by level: every node sees its own path's last
guess, or its whole path.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from proposers.base import ProposerContext
from proposers.captured.drafter import CapturedDrafter
from proposers.captured.sequential_blocks import (
    CapturedDynamicSequentialBlock,
    CapturedSequentialBlock,
    CapturedStaticSequentialBlock,
)
from proposers.drafting.blocks import BlockProposer
from proposers.drafting.level_by_level import TREE_DEPTH, TREE_TOP_K, LevelByLevelProposer, TreeNode
from proposers.drafting.token_by_token import Draw
from proposers.heads.sequential import SequentialBlockHead
from proposers.trees.growth import Growth
from proposers.trees.static import Choices, check_depth
from proposers.vocabularies.partial import over_target_vocabulary
from runner.engine.checkpoint import ModelSource
from runner.engine.request import Request
from runner.engine.upload import to_device

logger = logging.getLogger(__name__)


class SequentialBlockProposer(BlockProposer, LevelByLevelProposer):
    head: SequentialBlockHead

    def __init__(
        self,
        head: SequentialBlockHead,
        *,
        num_speculative_tokens: int,
        context: ProposerContext,
        source: ModelSource,
        draft_sample_method: str,
        speculative_token_tree: str | Choices | None = None,
        tree_depth: int = TREE_DEPTH,
        tree_top_k: int = TREE_TOP_K,
    ) -> None:
        """
        Raises:
            UserError: choices that are deeper than the head's block.
        """
        most = head.config.max_draft_tokens
        if isinstance(speculative_token_tree, tuple):
            check_depth(speculative_token_tree, max_depth=most)
        if speculative_token_tree == "dynamic" and tree_depth > most:
            logger.warning(
                "method.tree_depth=%d is asked of %s, whose block holds %d drafts: its trees are so deep at most",
                tree_depth,
                source.model,
                most,
            )
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
        self._first_rows = torch.empty(0)  # [requests] int64: the first of each that guesses
        self._places: tuple[torch.Tensor, ...] = ()  # of all rows that guess, [num_rows, ...] each
        self._owners = torch.empty(0)  # [rows of the last call] int64: the place of the request of each
        self._state: torch.Tensor | None = None  # [rows of the last call, width], of heads that keep one

    def max_draft_tokens(self, request: Request, limit: int) -> int:
        return self.room(request, limit) if self.drafts_trees else super().max_draft_tokens(request, limit)

    def captured_drafter(self, num_tokens: int) -> CapturedDrafter | None:
        if self.num_speculative_tokens == 0 or not self.runner.is_paged:
            return super().captured_drafter(num_tokens)
        common: dict[str, Any] = {**self.captured_arguments(num_tokens), "head": self.head, "runner": self.runner}
        if num_tokens == 0 or not self.drafts_trees:
            return CapturedSequentialBlock(depths=None, **common)
        if self.is_dynamic:
            depth = min(num_tokens, self.tree_depth)
            depths = [min(count, depth) for count in range(1, num_tokens + 1)]
            return CapturedDynamicSequentialBlock(tree_depth=depth, top_k=self.tree_top_k, depths=depths, **common)
        choices = self.choices[:num_tokens]
        depths = list(accumulate(map(len, choices), max))
        common |= {"num_tokens": len(choices), "most_requests": self.context.max_num_seqs}
        return CapturedStaticSequentialBlock(choices=choices, depths=depths, **common)

    def walk(self, requests: Sequence[Request], counts: Sequence[int], draw: Draw) -> torch.Tensor:
        self._depths = {request.request_id: count for request, count in zip(requests, counts, strict=True)}
        return super().walk(requests, counts, draw)

    def _growth(self, requests: Sequence[Request], counts: Sequence[int], *, need_probs: bool) -> Growth:
        growth = super()._growth(requests, counts, need_probs=need_probs)
        self._depths = {request.request_id: depth for request, depth in zip(requests, growth.depths, strict=True)}
        return growth

    def first_logits(self, requests: Sequence[Request]) -> torch.Tensor:
        counts = [self._depths[request.request_id] for request in requests]
        first_rows = list(accumulate(counts, initial=0))[:-1]
        device, sequel = self.context.device, self.head.sequel
        self._first_rows = to_device(first_rows, torch.int64, device)
        blocks = self.blocks(requests, counts)
        hidden = self.guessing_rows(blocks, counts)
        rows, tile = self.runner.in_tiles(hidden)
        places = sequel.places(rows, self.head.logits(rows, tile), tile)
        self._places = tuple(own[: len(hidden)] for own in places)
        self._owners = torch.arange(len(requests), device=device)
        last = [request.last_token_id for request in requests]
        pending = to_device(last, torch.int64, device)
        self._state = self._first_state(blocks, first_rows, pending) if sequel.has_state else None
        return self._after(pending, 0)

    def next_logits(
        self, requests: Sequence[Request], step: int, token_ids: torch.Tensor, row_idx: torch.Tensor | None
    ) -> torch.Tensor:
        if row_idx is not None:
            self._go_on_from(row_idx)
        return self._after(token_ids, step)

    def level_logits(
        self, requests: Sequence[Request], owners: Sequence[int], nodes: Sequence[TreeNode], token_ids: torch.Tensor
    ) -> torch.Tensor:
        self._go_on_from(to_device([node.row for node in nodes], torch.int64, self.context.device))
        return self._after(token_ids, len(nodes[0].path))

    def _first_state(
        self, blocks: torch.Tensor, first_rows: Sequence[int], pending: torch.Tensor
    ) -> torch.Tensor | None:
        """first_rows: among the rows that guess."""
        silent, num_silent = None, self.head.config.num_silent
        if num_silent:
            starts = [first + num_silent * index for index, first in enumerate(first_rows)]
            silent, _ = self.runner.in_tiles(blocks.index_select(0, to_device(starts, torch.int64, pending.device)))
        padded, tile = self.runner.in_tiles(pending)
        state = self.head.sequel.first_state(silent, padded, tile)
        return None if state is None else state[: len(pending)]

    def _go_on_from(self, rows: torch.Tensor) -> None:
        self._owners = self._owners.index_select(0, rows)
        if self._state is not None:
            self._state = self._state.index_select(0, rows)

    def _after(self, token_ids: torch.Tensor, place: int) -> torch.Tensor:
        """Logits [num_rows, vocab] of a place of the block behind these tokens [num_rows], the state moved on."""
        num_rows, rows = len(token_ids), (self._first_rows + place).index_select(0, self._owners)
        padded, tile = self.runner.in_tiles(token_ids)
        places = tuple(self.runner.in_tiles(own.index_select(0, rows))[0] for own in self._places)
        state = None if self._state is None else self.runner.in_tiles(self._state)[0]
        logits, state = self.head.sequel.guess(place, places, state, padded, tile)
        self._state = state if state is None else state[:num_rows]
        return over_target_vocabulary(logits[:num_rows], self.head.known_tokens)
