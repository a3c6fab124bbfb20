"""Drafting from one hidden state of the target, captured: each request's state stays on the device."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from proposers.captured.drafter import GoingOn
from proposers.captured.token_by_token import CapturedChains
from runner.engine.device_batch import DeviceBatch
from runner.engine.hidden_states import NORMED
from runner.engine.request import Request


class CapturedLastState(CapturedChains):
    tap_layers = (NORMED,)

    def __init__(
        self,
        *,
        states: dict[str, Tensor],  # the proposer's own: request_id -> [hidden]
        capacity: int,
        max_depth: int,  # drafts of a step that can be accepted, whoever made them
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.states, self.capacity = states, capacity
        self._states: Tensor | None = None  # [capacity, hidden], of the position before each request's last token
        # By the rows of each request in a verification, [max_depth + 2, capacity]: its first one.
        num_rows = torch.arange(max_depth + 2, device=self.steps.device).unsqueeze(1)
        self._first_rows = num_rows * torch.arange(capacity, device=self.steps.device)

    def can_start(self, request: Request) -> bool:
        return request.request_id in self.states

    def start(self, requests: Sequence[Request]) -> None:
        drafting = [request for request in requests if request.sampling_params.speculates]
        nothing = torch.zeros_like(self.states[drafting[0].request_id])
        states = torch.stack([self.states.get(request.request_id, nothing) for request in requests])
        if self._states is None:
            self._states = states.new_zeros(self.capacity, states.shape[1])
        self._states[: len(requests)].copy_(states)

    @abstractmethod
    def logits_after(self, batch: DeviceBatch, states: Tensor, step: int, token_ids: Tensor) -> Tensor:
        """Logits [count, vocab] for place `step` of the drafts.

        states: [count, hidden]. token_ids: [count] int64, in front of that place: the last committed ones, then drafts.
        """

    def next_logits(self, batch: DeviceBatch, step: int, token_ids: Tensor) -> Tensor:
        assert self._states is not None, "start comes first"
        return self.logits_after(batch, self._states[: batch.count], step, token_ids)

    def learn(self, batch: DeviceBatch, hidden_states: list[Tensor], token_ids: Tensor) -> None:
        assert self._states is not None
        (normed,) = hidden_states
        num_accepted = (token_ids[:, 1:] >= 0).sum(dim=1)
        last = self._first_rows[token_ids.shape[1], : batch.count] + num_accepted
        torch.index_select(normed, 0, last, out=self._states[: batch.count])

    def stop(self, going_on: Sequence[GoingOn]) -> None:
        assert self._states is not None
        for row, request, _ in going_on:
            self.states[request.request_id] = self._states[row].clone()
