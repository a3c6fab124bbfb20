"""MLP and LSTM speculators (IBM's, arXiv 2404.19124, and Arctic Inference's): recurrences over the target's last state.

They start from the state that yielded the last committed token, and from that token, and take in the drafts since.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from proposers.base import ProposerContext
from proposers.captured.drafter import CapturedDrafter
from proposers.captured.last_state import CapturedLastState
from proposers.drafting.from_last_state import LastStateProposer
from proposers.heads.speculator import Speculator, load_speculator
from runner.engine.checkpoint import ModelSource
from runner.engine.device_batch import DeviceBatch
from runner.engine.request import Request
from runner.engine.upload import to_device


class MlpSpeculatorProposer(LastStateProposer):
    def __init__(
        self,
        *,
        num_speculative_tokens: int,
        context: ProposerContext,
        source: ModelSource,
        draft_sample_method: str,
        max_model_len: int | None = None,
    ) -> None:
        assert context.target is not None, "the speculator reads the target's states"
        self.speculator = load_speculator(source, context.target, device=context.device, dtype=context.dtype)
        super().__init__(
            num_speculative_tokens=num_speculative_tokens,
            context=context,
            draft_sample_method=draft_sample_method,
            source=source,
            head=self.speculator,
            max_depth=self.speculator.max_depth,
            max_model_len=max_model_len,
        )
        self._state = torch.empty(0)  # [active requests, width]

    def captured_drafter(self, num_tokens: int) -> CapturedDrafter | None:
        if not self.can_capture:
            return super().captured_drafter(num_tokens)
        return _CapturedSpeculator(self.speculator, self.tile, **self.captured_arguments(num_tokens))

    def first_logits(self, requests: Sequence[Request]) -> torch.Tensor:
        self._state = self.speculator.first_state(self.last_states(requests))
        pending = [request.last_token_id for request in requests]
        return self._advance(0, to_device(pending, torch.int64, self.context.device))

    def next_logits(
        self, requests: Sequence[Request], step: int, token_ids: torch.Tensor, row_idx: torch.Tensor | None
    ) -> torch.Tensor:
        if row_idx is not None:
            self._state = self._state.index_select(0, row_idx)
        return self._advance(step, token_ids)

    def _advance(self, step: int, token_ids: torch.Tensor) -> torch.Tensor:
        """One token a request later: the state, and the logits [num_rows, vocab] that it gives."""
        num_rows = len(token_ids)
        rows = self.in_tiles(self._state)
        rows = self.speculator.next_state(step, rows, F.pad(token_ids, (0, len(rows) - num_rows)), self.tile)
        self._state = rows[:num_rows]
        return self.speculator.logits(step, rows, self.tile)[:num_rows]


class _CapturedSpeculator(CapturedLastState):
    def __init__(self, speculator: Speculator, tile: int | None, **common: Any) -> None:
        super().__init__(**common)
        self.speculator, self.tile = speculator, tile
        self._state: torch.Tensor | None = None  # [count, width], of a step under way

    def logits_after(
        self, batch: DeviceBatch, states: torch.Tensor, step: int, token_ids: torch.Tensor
    ) -> torch.Tensor:
        before = self.speculator.first_state(states) if step == 0 else self._state
        assert before is not None
        state = self.speculator.next_state(step, before, token_ids, self.tile)
        self._state = state if step + 1 < self.num_tokens else None  # no reference to a graph's memory is kept
        return self.speculator.logits(step, state, self.tile)
