"""Drafts that the host finds between two whole steps, in the committed tokens alone.

The step that verifies them has as many places for every request as the longest draft needs, rounded up, so that few
layouts serve all steps. Where many requests draft unlike numbers, most places are empty: steps in parts have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from proposers.captured.drafter import CapturedDrafter, CapturedDrafts, no_drafts
from runner.engine.backend import runs_kernels
from runner.engine.device_requests import DeviceBatch
from runner.engine.request import DraftTokens
from runner.engine.scheduler import Schedule
from runner.engine.upload import to_device

MAX_ROWS = 64  # of a launch: up to about there a GPU reads weights for longer than it multiplies
MAX_REQUESTS_ON_CPU = 2  # measured: from four on, empty places cost what steps in parts do


class HostDrafts(CapturedDrafter):
    drafts_on_host = True

    def __init__(
        self,
        num_tokens: int,
        *,
        propose: Callable[[Schedule], DraftTokens],  # chains without probs
        capacity: int,
        device: torch.device,
    ) -> None:
        super().__init__(num_tokens)
        self.max_requests = max(1, MAX_ROWS // (num_tokens + 1)) if runs_kernels(device) else MAX_REQUESTS_ON_CPU
        self._propose, self._capacity, self._device = propose, capacity, device
        self._token_ids: dict[int, Tensor] = {}  # places of a step -> [capacity, places] int64, -1 where there is none

    def find(self, schedule: Schedule) -> DraftTokens:
        return self._propose(schedule)

    def place(self, drafts: DraftTokens, places: Sequence[int]) -> int:
        counts = drafts.num_draft_tokens
        widest = max(counts)
        if widest == 0:
            return 0
        width = min(1 << (widest - 1).bit_length(), self.num_tokens)
        if width not in self._token_ids:
            size = (self._capacity, width)
            self._token_ids[width] = torch.empty(size, dtype=torch.int64, device=self._device)
        index = [row * width + step for row, count in zip(places, counts, strict=True) for step in range(count)]
        token_ids = self._token_ids[width].fill_(-1)
        token_ids.view(-1).index_copy_(0, to_device(index, torch.int64, self._device), drafts.token_ids)
        return width

    def draft(self, batch: DeviceBatch) -> CapturedDrafts:
        num_tokens = batch.num_rows - 1
        return CapturedDrafts(self._token_ids[num_tokens][: batch.count]) if num_tokens else no_drafts(batch)
