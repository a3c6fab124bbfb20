"""Drafting with a head over the target's hidden states, captured: a step's states stay on the device.

The first pass computes a row for every place of the last verification. Rows behind the committed tokens are scratch:
what they store is overwritten before anything sees it. A head that drafts in one pass has mask rows there.
One that stores nothing starts with the last token's row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from proposers.captured.drafter import GoingOn
from proposers.captured.fresh_tokens import FreshTokens
from proposers.captured.token_by_token import CapturedChains
from proposers.drafting.known_states import KnownStates
from proposers.heads.autoregressive import AutoregressiveHead
from runner.engine.device_requests import DeviceBatch
from runner.engine.head_runner import HeadRunner
from runner.engine.operations import take_rows
from runner.engine.request import Request


class CapturedHead(CapturedChains):
    def __init__(
        self,
        *,
        head: AutoregressiveHead,
        runner: HeadRunner,
        known: dict[str, KnownStates],  # the proposer's own
        capacity: int,
        mask: tuple[int, Tensor] | None,  # token and state [1, width] of places yet to be guessed
        num_tokens: int,
        max_depth: int,  # drafts of a step that can be accepted where the load allows the most
        **common: Any,
    ) -> None:
        self.mask, self._num_masks = mask, 0 if mask is None else num_tokens - 1
        # A request with few fresh tokens has its masks early, and rows of scratch behind them. A step with fewer drafts
        # may follow one with more, and then begins with that one's fresh tokens.
        num_scratch_rows = self._num_masks + max(0, max_depth - num_tokens)
        super().__init__(num_tokens=num_tokens, num_scratch_rows=num_scratch_rows, **common)
        self.head, self.runner, self.known = head, runner, known
        self.tap_layers, self.known_tokens = head.tap_layers, head.known_tokens
        self._fresh = FreshTokens(
            capacity=capacity, most=max_depth + 1, num_masks=self._num_masks, device=runner.device
        )
        self._capacity = capacity
        self._states: Tensor | None = None  # [capacity, max_depth + 1, taps * hidden], before each fresh token
        self._output = torch.empty(0)  # of the last pass: the rows that the next drafts follow

    def can_start(self, request: Request) -> bool:
        known = self.known.get(request.request_id)
        return known is not None and self._fresh.fit(request, known.next_position)

    def start(self, requests: Sequence[Request]) -> None:
        drafting = [request for request in requests if request.sampling_params.speculates]
        nothing = torch.zeros_like(self.known[drafting[0].request_id].states[0][:1])
        known = [
            self.known[request.request_id]
            if request.sampling_params.speculates
            else KnownStates(next_position=request.num_tokens - 1, states=[nothing])
            for request in requests
        ]
        states = torch.cat([rows for own in known for rows in own.states])
        if self._states is None:
            self._states = states.new_zeros(self._capacity, self._fresh.most, states.shape[1])
        self._states.index_put_(self._fresh.load(requests, [own.next_position for own in known]), states)

    def first_logits(self, batch: DeviceBatch) -> Tensor:
        last = self._fresh.last_rows(batch).flatten()
        if self.runner.has_own_keys:
            self._output = take_rows(self._first_pass(batch), last)
        else:
            assert self._states is not None, "start comes first"
            state = self.head.project(take_rows(self._states[: batch.count].flatten(0, 1), last))
            self._output = self._pass(batch, batch.last_token_ids[:, 1:].contiguous(), state, offset=-2)
        return self.next_logits(batch, 0, batch.lengths)

    def follow(self, batch: DeviceBatch, drafts: Tensor | None) -> None:
        if self.runner.has_own_keys:
            self._first_pass(batch)

    def _first_pass(self, batch: DeviceBatch) -> Tensor:
        """The head's output for the fresh tokens, then for the masks, then for scratch rows."""
        assert self._states is not None, "start comes first"
        hidden = self.head.project(self._states[: batch.count].flatten(0, 1))
        token_ids = self._fresh.rows(batch)
        if self.mask is not None:
            (mask_token_id, state), are_fresh = self.mask, self._fresh.are_fresh(batch)
            token_ids = torch.where(are_fresh, token_ids, mask_token_id)
            own = torch.nn.functional.pad(hidden.view(batch.count, self._fresh.most, -1), (0, 0, 0, self._num_masks))
            hidden = torch.where(are_fresh.unsqueeze(2), own, state).flatten(0, 1)
        lengths = self._fresh.first_positions(batch)
        return self._pass(batch, token_ids, hidden, lengths=lengths, offset=-1)

    def next_logits(self, batch: DeviceBatch, step: int, token_ids: Tensor) -> Tensor:
        tile, output = self.runner.shapes["decode"].linear, self._output
        if self.mask is not None:
            output = output.view(batch.count, self.num_tokens, -1)[:, step]
        elif step > 0:
            offset = step - 2 if self.runner.has_own_keys else -2
            output = self._output = self._pass(batch, token_ids.unsqueeze(1), output, offset=offset)
        return self.head.logits(output, tile)

    def learn(self, batch: DeviceBatch, hidden_states: list[Tensor], token_ids: Tensor) -> None:
        assert self._states is not None
        num_rows = token_ids.shape[1]
        taps = [tap.view(batch.count, num_rows, -1) for tap in hidden_states]
        torch.cat(taps, dim=2, out=self._states[: batch.count, :num_rows])
        self._fresh.learn(batch, token_ids)

    def stop(self, going_on: Sequence[GoingOn]) -> None:
        assert self._states is not None
        for row, request, num_new_tokens in going_on:
            self.known[request.request_id] = KnownStates(
                next_position=request.num_tokens - num_new_tokens,
                states=[self._states[row, :num_new_tokens].clone()],
            )

    def _pass(
        self, batch: DeviceBatch, token_ids: Tensor, hidden: Tensor, *, offset: int, lengths: Tensor | None = None
    ) -> Tensor:
        """The head's output for tokens [count, num_rows]; KV of each is stored at the position of the token before."""
        launch, _ = self.runner.decode_launch(
            batch, token_ids.flatten(), offset=offset, num_rows=token_ids.shape[1], lengths=lengths
        )
        return self.runner.compute(launch, hidden)
