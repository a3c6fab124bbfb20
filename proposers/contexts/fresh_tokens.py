"""Committed tokens that a drafter with a cache of its own has not computed yet, kept on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runner.engine.device_batch import DeviceBatch
from runner.engine.request import Request
from runner.engine.upload import to_device


class FreshTokens:
    """Holds at least one token of each request, and at most as many as a verification commits."""

    def __init__(self, *, capacity: int, most: int, num_masks: int, device: torch.device) -> None:
        """num_masks: rows of a request behind its fresh tokens that the drafter fills with masks."""
        self.most, width = most, most + num_masks
        self._first_positions = torch.zeros(capacity, dtype=torch.int64, device=device)  # 0: the request is absent
        self._token_ids = torch.zeros(capacity, width, dtype=torch.int64, device=device)
        self._columns = torch.arange(width, device=device)
        # Rows of a launch: the one before each request's first, and as many behind that as it has masks.
        self._before = torch.arange(-1, capacity * width - 1, width, device=device).unsqueeze(1)
        self._before = self._before + self._columns[: 1 + num_masks]

    def fit(self, request: Request, first_position: int) -> bool:
        """Whether there is room for the request's tokens from there on, which must be at least one."""
        return 0 < request.num_tokens - first_position <= self.most

    def load(self, requests: Sequence[Request], first_positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Store the requests' tokens from first_positions on; returns their places in [capacity, most], as an index."""
        device = self._token_ids.device
        rows, columns, token_ids = list[int](), list[int](), list[int]()
        for row, (request, first) in enumerate(zip(requests, first_positions, strict=True)):
            fresh = request.tokens_between(first, request.num_tokens)
            rows += [row] * len(fresh)
            columns += range(len(fresh))
            token_ids += fresh
        index = to_device([rows, columns, token_ids], torch.int64, device)
        places = (index[0], index[1])
        self._token_ids.index_put_(places, index[2])
        self._first_positions.zero_()
        self._first_positions[: len(requests)].copy_(to_device(first_positions, torch.int64, device))
        return places

    def learn(self, batch: DeviceBatch, token_ids: Tensor) -> None:
        """All earlier tokens are computed; a verification commits token_ids [count, at most `most`], -1 behind them."""
        torch.clamp(token_ids, min=0, out=self._token_ids[: batch.count, : token_ids.shape[1]])
        self._first_positions[: batch.count].copy_(batch.lengths)

    def first_positions(self, batch: DeviceBatch) -> Tensor:
        """[count] int64: of each request's first fresh token; 0 for absent requests, also for who was there just now:
        a launch has room for the contexts of those that stay.
        """
        return torch.minimum(self._first_positions[: batch.count], batch.lengths)

    def counts(self, batch: DeviceBatch) -> Tensor:
        """[count] int64: fresh tokens of each request; 1 for absent requests."""
        return (batch.lengths - self._first_positions[: batch.count]).clamp(min=1)

    def rows(self, batch: DeviceBatch) -> Tensor:
        """[count, most + num_masks] int64: the fresh tokens; what stands behind them is undefined."""
        return self._token_ids[: batch.count]

    def are_fresh(self, batch: DeviceBatch) -> Tensor:
        """[count, most + num_masks] bool: which of `rows` are fresh tokens."""
        return self._columns < self.counts(batch).unsqueeze(1)

    def last_rows(self, batch: DeviceBatch) -> Tensor:
        """[count, 1 + num_masks] int64: indices in flattened `rows` of the last fresh token and the masks behind it."""
        return self._before[: batch.count] + self.counts(batch).unsqueeze(1)
