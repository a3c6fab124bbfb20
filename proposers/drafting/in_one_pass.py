"""Drafters whose one pass yields the logits of every drafted place: PARD, DFlash.

The rows are independent given the text, so the loop of token_by_token runs over logits that are there: each draw goes
through the processors that see the tokens drafted before it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate

import torch

from proposers.drafting.token_by_token import Draw, TokenByTokenProposer
from runner.engine.request import Request
from runner.engine.upload import to_device


class OnePassProposer(TokenByTokenProposer):
    _counts: dict[str, int]  # request_id -> tokens to draft in this step
    _logits: torch.Tensor  # [sum of counts, vocab], request by request
    _first_rows: dict[str, int]

    @abstractmethod
    def all_logits(self, requests: Sequence[Request], counts: Sequence[int]) -> torch.Tensor:
        """Logits [sum(counts), vocab] float32: of the next counts[b] >= 1 places of requests[b], request by request."""

    def walk(self, requests: Sequence[Request], counts: Sequence[int], draw: Draw) -> torch.Tensor:
        self._counts = {request.request_id: count for request, count in zip(requests, counts, strict=True)}
        return super().walk(requests, counts, draw)

    def first_logits(self, requests: Sequence[Request]) -> torch.Tensor:
        counts = [self._counts[request.request_id] for request in requests]
        starts = [0, *accumulate(counts)][:-1]
        self._first_rows = {request.request_id: start for request, start in zip(requests, starts, strict=True)}
        self._logits = self.all_logits(requests, counts)
        return self._rows_of(requests, 0)

    def next_logits(
        self, requests: Sequence[Request], step: int, token_ids: torch.Tensor, row_idx: torch.Tensor | None
    ) -> torch.Tensor:
        return self._rows_of(requests, step)

    def _rows_of(self, requests: Sequence[Request], step: int) -> torch.Tensor:
        rows = [self._first_rows[request.request_id] + step for request in requests]
        return self._logits.index_select(0, to_device(rows, torch.int64, self._logits.device))
