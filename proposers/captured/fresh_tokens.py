"""Committed tokens that a drafter with a cache of its own has not computed yet, kept on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runner.engine.device_requests import DeviceBatch
from runner.engine.request import Request
from runner.engine.upload import to_device


class FreshTokens:
    """Holds at least one token of each request, and at most as many as a verification commits."""

    def __init__(self, *, capacity: int, most: int, device: torch.device) -> None:
        self.most = most
        self._first_positions = torch.zeros(capacity, dtype=torch.int64, device=device)  # 0: the request is absent
        self._token_ids = torch.zeros(capacity, most, dtype=torch.int64, device=device)

    def fit(self, request: Request, first_position: int) -> bool:
        """Whether there is room for the request's tokens from there on, which must be at least one."""
        return 0 < request.num_tokens - first_position <= self.most

    def load(self, requests: Sequence[Request], first_positions: Sequence[int]) -> Tensor:
        """Store the requests' tokens from first_positions on; returns their indices in [capacity * most]."""
        device = self._token_ids.device
        places, token_ids = list[int](), list[int]()
        for row, (request, first) in enumerate(zip(requests, first_positions, strict=True)):
            fresh = request.tokens_between(first, request.num_tokens)
            places += range(row * self.most, row * self.most + len(fresh))
            token_ids += fresh
        index = to_device([places, token_ids], torch.int64, device)
        self._token_ids.view(-1).index_copy_(0, index[0], index[1])
        self._first_positions.zero_()
        self._first_positions[: len(requests)].copy_(to_device(first_positions, torch.int64, device))
        return index[0]

    def learn(self, batch: DeviceBatch, token_ids: Tensor) -> None:
        """All earlier tokens are computed; a verification commits token_ids [count, at most `most`], -1 behind them."""
        self._token_ids[: batch.count, : token_ids.shape[1]].copy_(token_ids.clamp(min=0))
        self._first_positions[: batch.count].copy_(batch.lengths)

    def first_positions(self, batch: DeviceBatch) -> Tensor:
        """[count] int64: of each request's first fresh token; 0 for absent requests."""
        return self._first_positions[: batch.count]

    def counts(self, batch: DeviceBatch) -> Tensor:
        """[count] int64: fresh tokens of each request; 1 for absent requests."""
        return (batch.lengths - self.first_positions(batch)).clamp(min=1)

    def rows(self, batch: DeviceBatch, mask_token_id: int | None = None, num_masks: int = 0) -> Tensor:
        """[count, most + num_masks] int64: the fresh tokens, then masks; without masks the rest is undefined."""
        token_ids = self._token_ids[: batch.count]
        if mask_token_id is None:
            return token_ids
        padded = torch.nn.functional.pad(token_ids, (0, num_masks))
        places = torch.arange(padded.shape[1], device=padded.device)
        return torch.where(places < self.counts(batch).unsqueeze(1), padded, mask_token_id)

    def last_rows(self, batch: DeviceBatch, num_masks: int = 0) -> Tensor:
        """[count, 1 + num_masks] int64: indices in flattened `rows` of the last fresh token and the masks behind it."""
        width = self.most + num_masks
        firsts = torch.arange(0, batch.count * width, width, device=self._token_ids.device)
        last = firsts + self.counts(batch) - 1
        return last.unsqueeze(1) + torch.arange(1 + num_masks, device=last.device)
