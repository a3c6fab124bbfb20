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
from runner.engine.device_batch import DeviceBatch
from runner.engine.request import DraftTokens
from runner.engine.schedule import Schedule
from runner.engine.upload import to_device

MAX_ROWS = 64  # of a launch: up to about there a GPU reads weights for longer than it multiplies
MAX_REQUESTS_ON_CPU = 2  # measured: from four on, empty places cost what steps in parts do


def max_requests(num_tokens: int, device: torch.device) -> int:
    """Of a batch that may have as many places for host drafts as the longest of them needs."""
    return max(1, MAX_ROWS // (num_tokens + 1)) if runs_kernels(device) else MAX_REQUESTS_ON_CPU


class PlacedDrafts:
    """Drafts of the host on the device: a row a place of the batch, as wide as the step has places for drafts."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._capacity, self._device = capacity, device
        # width -> [2, capacity, width] int64: tokens and, of trees, parents; -1 where there is none
        self._nodes: dict[int, Tensor] = {}

    def put(self, drafts: DraftTokens, places: Sequence[int], width: int) -> None:
        """places: of the drafts' requests; width: at least that of the longest draft."""
        if width not in self._nodes:
            size = (2, self._capacity, width)
            self._nodes[width] = torch.empty(size, dtype=torch.int64, device=self._device)
        counts = drafts.num_draft_tokens
        index = [row * width + step for row, count in zip(places, counts, strict=True) for step in range(count)]
        token_ids, parents = self._nodes[width].fill_(-1).view(2, -1)
        if drafts.parent_indices is None:
            token_ids.index_copy_(0, to_device(index, torch.int64, self._device), drafts.token_ids)
            return
        where, of_nodes = to_device([index, drafts.parent_indices], torch.int64, self._device)
        token_ids.index_copy_(0, where, drafts.token_ids)
        parents.index_copy_(0, where, of_nodes)

    def of(self, batch: DeviceBatch) -> Tensor:
        """[count, num_rows - 1] int64."""
        return self._nodes[batch.num_rows - 1][0, : batch.count]

    def parents_of(self, batch: DeviceBatch) -> Tensor:
        """The same of the parents."""
        return self._nodes[batch.num_rows - 1][1, : batch.count]


def few_widths(longest: int, most: int) -> int:
    """Places for drafts of which the longest has so many tokens, at most `most`: few different numbers."""
    return min(1 << (longest - 1).bit_length(), most)


class HostDrafts(CapturedDrafter):
    reads_text = drafts_on_host = True

    def __init__(
        self,
        num_tokens: int,
        *,
        propose: Callable[[Schedule], DraftTokens],  # without probs
        are_trees: bool,
        capacity: int,
        device: torch.device,
    ) -> None:
        super().__init__(num_tokens, tree_depth=num_tokens if are_trees else None)
        self.max_requests = max_requests(num_tokens, device)
        self._propose, self._placed = propose, PlacedDrafts(capacity, device)

    def find(self, schedule: Schedule) -> DraftTokens:
        return self._propose(schedule)

    def place(self, drafts: DraftTokens, places: Sequence[int]) -> int:
        longest = max(drafts.num_draft_tokens)
        if longest == 0:
            return 0
        width = few_widths(longest, self.num_tokens)
        self._placed.put(drafts, places, width)
        return width

    def draft(self, batch: DeviceBatch) -> CapturedDrafts:
        if batch.num_rows == 1:
            none = no_drafts(batch)
            return none._replace(parents=none.token_ids) if self.drafts_trees else none
        parents = self._placed.parents_of(batch) if self.drafts_trees else None
        return CapturedDrafts(self._placed.of(batch), parents=parents)
