"""Drafts token by token with a head over the target's hidden states: EAGLE, EAGLE-3, MTP.

The head predicts the token behind x_p from x_p and the hidden state of position p - 1: the target's for committed
tokens, its own output for drafted ones. Its row for x_p is stored at place p - 1 of the request's blocks (rotations are
relative, so the shift is no loss). KV of drafts is scratch: what is accepted is computed again, from the target's
states. What differs for a head over the target's own keys and values is told in proposers/contexts/head_keys.py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from proposers.base import ProposerContext
from proposers.captured.drafter import CapturedDrafter
from proposers.captured.fed_trees import CapturedDynamicTrees, CapturedStaticTrees
from proposers.captured.head import CapturedHead
from proposers.contexts.head_keys import HeadKeys, TargetKeys, segment_of_tokens
from proposers.contexts.known_states import KnownStates
from proposers.drafting.level_by_level import LevelByLevelProposer, TreeNode
from proposers.heads.autoregressive import AutoregressiveHead
from proposers.heads.quantized import quantize_head_of_target
from proposers.trees.static import Choices
from proposers.vocabularies.partial import over_target_vocabulary
from runner.engine.checkpoint import ModelSource
from runner.engine.head_runner import HeadRunner
from runner.engine.request import Request, VerifyOutput
from runner.engine.schedule import Schedule
from runner.engine.segment import Segment
from runner.engine.upload import to_device


@dataclass(frozen=True, kw_only=True)
class MaskRows:
    """Rows for places whose tokens are yet to be guessed, of heads that were trained to guess them in one pass."""

    token_id: int
    state: torch.Tensor  # [1, width], in place of the state before
    counts: Sequence[int]  # of each request


class HeadProposer(LevelByLevelProposer):
    """The loop over a head; a method is this and the way its head is loaded."""

    def __init__(
        self,
        *,
        num_speculative_tokens: int,
        context: ProposerContext,
        source: ModelSource,
        draft_sample_method: str,
        max_model_len: int | None,  # longest text that the head sees; None: the target's
        speculative_token_tree: str | Choices | None,
        tree_depth: int,
        tree_top_k: int,
    ) -> None:
        super().__init__(
            num_speculative_tokens=num_speculative_tokens,
            context=context,
            draft_sample_method=draft_sample_method,
            speculative_token_tree=speculative_token_tree,
            tree_depth=tree_depth,
            tree_top_k=tree_top_k,
        )
        self.head = self.load_head(source, max_model_len)
        quantize_head_of_target(self.head, source, context.device)
        self.max_model_len = self.head.max_model_len
        self.runner = HeadRunner(
            self.head,
            block_size=context.block_size,
            device=context.device,
            dtype=context.dtype,
            batch_invariant=context.batch_invariant,
            kv_dtype=context.kv_dtype,
            graph_memory=context.graph_memory,
        )
        self.keys = (HeadKeys if self.runner.has_own_keys else TargetKeys)(self.runner)
        self.taps_every_token = self.keys.taps_every_token
        self._known: dict[str, KnownStates] = {}
        self._output = torch.empty(0)  # of the last call, a row for each request that drafts, or node of its tree
        self._first_scratch_block = 0

    @abstractmethod
    def load_head(self, source: ModelSource, max_model_len: int | None) -> AutoregressiveHead:
        """Read the head for the context's target; it follows texts of up to max_model_len tokens, None: the target's.

        Raises:
            UserError: no such head, or another target's.
        """

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self.head.tap_layers if self.num_speculative_tokens > 0 else ()

    @property
    def cache_bytes_per_block(self) -> int:
        return self.runner.cache_bytes_per_block

    @property
    def state_bytes(self) -> int:
        return self._num_scratch_blocks_of_all * self.runner.cache_bytes_per_block

    @property
    def has_passes(self) -> bool:
        return True

    def allocate_cache(self, num_blocks: int) -> None:
        self._first_scratch_block = num_blocks
        num_scratch_blocks = self._num_scratch_blocks_of_all
        self.keys.allocate_cache(self.context, num_blocks=num_blocks, num_scratch_blocks=num_scratch_blocks)

    @property
    def _num_scratch_blocks(self) -> int:
        """Behind the blocks of the engine, for each request that drafts a tree: more nodes are fed than are drafted."""
        return -(-self.max_fed_nodes // self.context.block_size)

    @property
    def _num_scratch_blocks_of_all(self) -> int:
        return self.context.max_num_seqs * self._num_scratch_blocks

    def captured_drafter(self, num_tokens: int) -> CapturedDrafter | None:
        if self.num_speculative_tokens == 0 or not self.runner.is_paged:
            return super().captured_drafter(num_tokens)
        common: dict[str, Any] = {
            **self.captured_arguments(num_tokens),
            "head": self.head,
            "keys": self.keys,
            "known": self._known,
            "capacity": self.context.max_num_seqs,
            "max_model_len": self.max_model_len,
            "max_depth": self.most_drafts(self._depth_of(self.num_speculative_tokens)),
        }
        if num_tokens == 0:
            return CapturedHead(mask=None, **common)
        if not self.drafts_trees:
            return CapturedHead(mask=self.captured_mask(), **common)
        common["scratch_slots"] = self._scratch_slots()
        if self.is_dynamic:
            return CapturedDynamicTrees(tree_depth=self._depth_of(num_tokens), top_k=self.tree_top_k, **common)
        choices = self.choices[:num_tokens]
        common |= {"num_tokens": len(choices), "most_requests": self.context.max_num_seqs}
        return CapturedStaticTrees(choices=choices, **common)

    def captured_mask(self) -> tuple[int, torch.Tensor] | None:
        """Token and state [1, width] of places yet to be guessed; None: the head drafts token by token."""
        return None

    @torch.inference_mode()
    def update(self, schedule: Schedule, output: VerifyOutput) -> None:
        assert output.hidden_states is not None or not self.tap_layers, "the verifier was asked for hidden states"
        behind: list[Request] = []
        for index, item in enumerate(schedule.scheduled):
            request = item.request
            if output.hidden_states is None or request.is_finished or not self.may_draft(request):
                continue
            if request.num_tokens > self.max_model_len:  # no draft any more
                self.release(request.request_id)
                continue
            states = output.hidden_states.of(index, request.num_computed_tokens - item.start)
            known = self._known.setdefault(request.request_id, KnownStates(next_position=item.start + 1, states=[]))
            known.states.append(states)
            # The head follows the target through prompts, chunk by chunk, and through a time without drafts.
            if not item.is_decoding or len(known.states) > self.keys.max_steps_behind:
                behind.append(request)
        self.keys.follow(self.head, behind, self._known)

    @torch.inference_mode()
    def keep_up(self, requests: Sequence[Request]) -> None:
        followed = [request for request in requests if request.request_id in self._known]
        self.keys.follow(self.head, followed, self._known)

    def fills_blocks(self, request: Request) -> bool:
        return self.follows(request) and request.num_tokens <= self.max_model_len

    def release(self, request_id: str) -> None:
        self._known.pop(request_id, None)

    def first_logits(self, requests: Sequence[Request]) -> torch.Tensor:
        self._output = self.last_rows(requests)
        return self._logits()

    def last_rows(self, requests: Sequence[Request], masks: MaskRows | None = None) -> torch.Tensor:
        """Compute what the head has not seen of these requests, and the mask rows behind it.

        Returns rows of the head's output [len(requests) + mask rows, ...]: of each request's last token, then of its
        masks.
        """
        segments, token_ids, states = list[Segment](), list[int](), list[torch.Tensor]()
        num_rows, wanted = list[int](), list[int]()
        counts = [0] * len(requests) if masks is None else masks.counts
        for request, count in zip(requests, counts, strict=True):
            known = self._known[request.request_id]
            segments.append(segment_of_tokens(request, known.next_position, request.num_tokens + count))
            fresh = request.tokens_between(known.next_position, request.num_tokens)
            token_ids += fresh if masks is None else [*fresh, *[masks.token_id] * count]
            num_rows.append(len(fresh))
            states += known.states
            wanted += range(len(token_ids) - 1 - count, len(token_ids))
            known.next_position, known.states = request.num_tokens, []
        hidden = self.head.project(torch.cat(states))
        if masks is not None:
            behind = [masks.state.expand(count, -1) for count in counts]
            pairs = zip(hidden.split_with_sizes(num_rows), behind, strict=True)
            hidden = torch.cat([rows for pair in pairs for rows in pair])
        ids = to_device(token_ids, torch.int64, self.context.device)
        output = self.runner.run("decode", segments, ids, hidden)
        return output.index_select(0, to_device(wanted, torch.int64, self.context.device))

    def next_logits(
        self, requests: Sequence[Request], step: int, token_ids: torch.Tensor, row_idx: torch.Tensor | None
    ) -> torch.Tensor:
        if row_idx is not None:
            self._output = self._output.index_select(0, row_idx)
        segments = [self.keys.segment_of_draft(request, step) for request in requests]
        self._output = self.runner.run("decode", segments, token_ids, self._output)
        return self._logits()

    def level_logits(
        self, requests: Sequence[Request], owners: Sequence[int], nodes: Sequence[TreeNode], token_ids: torch.Tensor
    ) -> torch.Tensor:
        before = to_device([node.row for node in nodes], torch.int64, self.context.device)
        tables = [self._table_with_scratch(place, request) for place, request in enumerate(requests)]
        segments = [
            self.keys.segment_of_node(requests[owner], node.path, *tables[owner])
            for owner, node in zip(owners, nodes, strict=True)
        ]
        self._output = self.runner.run("decode", segments, token_ids, self._output.index_select(0, before))
        return self._logits()

    def _table_with_scratch(self, place: int, request: Request) -> tuple[list[int], int]:
        """The blocks of a request and then those of its tree's nodes, and the place of the first of these."""
        first = self._first_scratch_block + place * self._num_scratch_blocks
        table = [*request.block_table, *range(first, first + self._num_scratch_blocks)]
        return table, len(request.block_table) * self.context.block_size

    def _depth_of(self, num_tokens: int) -> int:
        """Of the deepest of so many drafts, at most."""
        if self.choices:
            return max(map(len, self.choices[:num_tokens]), default=0)
        return min(num_tokens, self.tree_depth) if self.is_dynamic else num_tokens

    def _scratch_slots(self) -> torch.Tensor:
        """Of the nodes that may be fed for each place of a batch, [max_num_seqs, num_places] int64."""
        num_places = self._num_scratch_blocks * self.context.block_size
        first = self._first_scratch_block * self.context.block_size
        slots = torch.arange(first, first + self.context.max_num_seqs * num_places, device=self.context.device)
        return slots.view(self.context.max_num_seqs, num_places)

    def _logits(self) -> torch.Tensor:
        rows, tile = self.runner.in_tiles(self._output)
        return over_target_vocabulary(self.head.logits(rows, tile)[: len(self._output)], self.head.known_tokens)
