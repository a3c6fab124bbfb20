"""Drafters whose head goes over a block of mask tokens behind the target's hidden states: DFlash, DSpark.

The target's states of committed tokens enter the head's cache in `update`; a draft starts with one pass over the block
behind them, whose KV is scratch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from proposers.base import ProposerContext
from proposers.drafting.cached_rows import cached_rows
from proposers.drafting.own_cache import OwnCacheProposer
from proposers.heads.dflash import DFlashHead
from proposers.heads.quantized import quantize_head_of_target
from runner.engine.checkpoint import ModelSource
from runner.engine.head_runner import HeadRunner
from runner.engine.request import Request, VerifyOutput
from runner.engine.schedule import Schedule
from runner.engine.segment import Family, Segment
from runner.engine.upload import to_device

logger = logging.getLogger(__name__)


class BlockProposer(OwnCacheProposer):
    """The block of a head, for a class beside it that makes drafts of its rows."""

    head: DFlashHead
    runner: HeadRunner

    def __init__(
        self,
        head: DFlashHead,
        *,
        num_speculative_tokens: int,
        context: ProposerContext,
        source: ModelSource,
        is_tree: bool,  # num_speculative_tokens are nodes, of which there may be more than rows in a block
        **keys: Any,
    ) -> None:
        most = head.config.max_draft_tokens
        if num_speculative_tokens > most and not is_tree:
            logger.warning(
                "%d tokens are asked of %s, whose block holds %d drafts: so many are drafted at most",
                num_speculative_tokens,
                source.model,
                most,
            )
            num_speculative_tokens = most
        super().__init__(num_speculative_tokens=num_speculative_tokens, context=context, **keys)
        self.head, self.most_rows = head, most  # most_rows: that guess
        self.max_model_len = head.max_model_len
        quantize_head_of_target(head, source, context.device)
        self.runner = HeadRunner(
            head,
            block_size=context.block_size,
            device=context.device,
            dtype=context.dtype,
            batch_invariant=context.batch_invariant,
            kv_dtype=context.kv_dtype,
            graph_memory=context.graph_memory,
            reads_segments=head.reads_segments,
        )

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self.head.config.tap_layers if self.num_speculative_tokens > 0 else ()

    def max_draft_tokens(self, request: Request, limit: int) -> int:
        return self.room(request, min(limit, self.most_rows))

    @torch.inference_mode()
    def update(self, schedule: Schedule, output: VerifyOutput) -> None:
        """Write the context of every token that entered the target's cache for good."""
        states = output.hidden_states
        assert states is not None or not self.tap_layers, "the verifier was asked for hidden states"
        if states is None:
            return
        for rows in cached_rows(schedule, states, self.may_draft, self.max_model_len):
            self._write_context(rows.family, rows.segments, rows.states)

    def blocks(self, requests: Sequence[Request], counts: Sequence[int]) -> torch.Tensor:
        """The head's output for blocks that guess the next counts[b] >= 1 places of requests[b], request by request.

        [sum(num_silent + counts[b]), hidden]: the silent rows of a block come first.
        """
        config = self.head.config
        segments, token_ids = list[Segment](), list[int]()
        for request, count in zip(requests, counts, strict=True):
            start, num_rows = request.num_tokens - 1, config.num_silent + count
            segments.append(Segment(start=start, num_tokens=num_rows, block_table=request.block_table))
            token_ids += [request.last_token_id, *[config.mask_token_id] * (num_rows - 1)]
        ids = to_device(token_ids, torch.int64, self.context.device)
        return self.runner.run("decode", segments, ids, self.head.embed(ids), is_causal=False)

    def guessing_rows(self, blocks: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Of blocks of these counts the rows that guess, [sum(counts), hidden]."""
        num_silent = self.head.config.num_silent
        if num_silent == 0:
            return blocks
        rows, end = list[int](), 0
        for count in counts:
            start, end = end + num_silent, end + num_silent + count
            rows += range(start, end)
        return blocks.index_select(0, to_device(rows, torch.int64, self.context.device))

    def _write_context(self, family: Family, segments: list[Segment], states: torch.Tensor) -> None:
        """states: [num_rows, num_taps * hidden], of the segments' tokens one after another."""
        assert self.runner.cache is not None, "allocate_cache comes first"
        batch = self.runner.launch(family, segments, len(states))
        padding = len(batch.token_ids) - len(states)
        self.head.write_context(batch, F.pad(states, (0, 0, 0, padding)), self.runner.cache)
