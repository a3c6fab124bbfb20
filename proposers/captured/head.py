"""Drafting with a head over the target's hidden states, captured: a step's states stay on the device.

The first pass computes a row for every place of the last verification. Rows behind the committed tokens are scratch:
what they store is overwritten before anything sees it. A head that drafts in one pass has mask rows there.
One that stores nothing starts with the last token's row alone (proposers/contexts/head_keys.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from proposers.captured.drafter import GoingOn
from proposers.captured.token_by_token import CapturedChains
from proposers.contexts.fresh_states import FreshStates
from proposers.contexts.head_keys import HeadKeys
from proposers.contexts.known_states import KnownStates
from proposers.heads.autoregressive import AutoregressiveHead
from runner.engine.device_batch import DeviceBatch
from runner.engine.request import Request


class CapturedHead(CapturedChains):
    def __init__(
        self,
        *,
        head: AutoregressiveHead,
        keys: HeadKeys,
        known: dict[str, KnownStates],  # the proposer's own
        capacity: int,
        mask: tuple[int, Tensor] | None,  # token and state [1, width] of places yet to be guessed
        num_tokens: int,
        max_depth: int,  # drafts of a step that can be accepted where the load allows the most
        **common: Any,
    ) -> None:
        num_masks = 0 if mask is None else num_tokens - 1
        # A request with few fresh tokens has its masks early, and rows of scratch behind them. A step with fewer drafts
        # may follow one with more, and then begins with that one's fresh tokens.
        num_scratch_rows = num_masks + max(0, max_depth - num_tokens)
        super().__init__(num_tokens=num_tokens, num_scratch_rows=num_scratch_rows, **common)
        self.head, self.keys, self.runner, self.known = head, keys, keys.runner, known
        self.tap_layers, self.known_tokens = head.tap_layers, head.known_tokens
        self.drafts_in_one_pass = mask is not None
        self._fresh = FreshStates(
            head,
            capacity=capacity,
            most=max_depth + 1,
            mask=mask,
            num_masks=num_masks,
            device=self.runner.device,
        )
        self._output: Tensor | None = None  # of the last pass: the rows that the next drafts follow

    def can_start(self, request: Request) -> bool:
        known = self.known.get(request.request_id)
        return known is not None and self._fresh.tokens.fit(request, known.next_position)

    def start(self, requests: Sequence[Request]) -> None:
        drafting = [request for request in requests if request.sampling_params.speculates]
        nothing = torch.zeros_like(self.known[drafting[0].request_id].states[0][:1])
        known = [
            self.known[request.request_id]
            if request.sampling_params.speculates
            else KnownStates(next_position=request.num_tokens - 1, states=[nothing])
            for request in requests
        ]
        self._fresh.load(requests, known)

    def first_logits(self, batch: DeviceBatch) -> Tensor:
        self._output = self.keys.first_output(batch, self._fresh)
        return self.next_logits(batch, 0, batch.lengths)

    def follow(self, batch: DeviceBatch, drafts: Tensor | None) -> None:
        self.keys.follow_fresh(batch, self._fresh)

    def next_logits(self, batch: DeviceBatch, step: int, token_ids: Tensor) -> Tensor:
        tile, output = self.runner.shapes["decode"].linear, self._output
        assert output is not None
        if self.drafts_in_one_pass:
            output = output.view(batch.count, self.num_tokens, -1)[:, step]
        elif step > 0:
            offset = self.keys.offset(step)
            output = self._output = self.keys.output(batch, token_ids.unsqueeze(1), output, offset=offset)
        if step + 1 == self.depth:  # no reference to a graph's memory is kept
            self._output = None
        return self.head.logits(output, tile)

    def learn(self, batch: DeviceBatch, hidden_states: list[Tensor], token_ids: Tensor) -> None:
        self._fresh.learn(batch, hidden_states, token_ids)

    def stop(self, going_on: Sequence[GoingOn]) -> None:
        for row, request, num_new_tokens in going_on:
            self.known[request.request_id] = self._fresh.known(row, request, num_new_tokens)
