"""Drafting with a head over the target's hidden states, captured: the states of a step's rows stay where they are.

The first pass computes a row for every place of the last verification. Rows behind the committed tokens are scratch:
what they store is overwritten before anything sees it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from proposers.captured.drafter import GoingOn
from proposers.captured.token_by_token import CapturedChains
from proposers.drafting.known_states import KnownStates
from proposers.heads.autoregressive import AutoregressiveHead
from runner.engine.device_requests import DeviceBatch
from runner.engine.head_runner import HeadRunner
from runner.engine.paged_shape import PagedShape
from runner.engine.request import Request
from runner.engine.upload import to_device


class CapturedHead(CapturedChains):
    def __init__(
        self,
        num_tokens: int,
        *,
        draft_sample_method: str,
        needs_draft_probs: bool,
        head: AutoregressiveHead,
        runner: HeadRunner,
        known: dict[str, KnownStates],  # the proposer's own
        capacity: int,
        max_model_len: int,
    ) -> None:
        super().__init__(
            num_tokens,
            draft_sample_method=draft_sample_method,
            needs_draft_probs=needs_draft_probs,
            max_model_len=max_model_len,
        )
        self.head, self.runner, self.known = head, runner, known
        self.tap_layers = head.tap_layers
        self.num_rows = num_tokens + 1
        device = runner.device
        # Of tokens whose rows are not computed: where the first of them lies, what they are, the state before each.
        self._first_positions = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._token_ids = torch.zeros(capacity, self.num_rows, dtype=torch.int64, device=device)
        self._states: Tensor | None = None  # [capacity, num_rows, num_taps * hidden]
        self._output = torch.empty(0)  # of the last pass, a row a request

    def can_start(self, request: Request) -> bool:
        known = self.known.get(request.request_id)
        return known is not None and 0 < request.num_tokens - known.next_position <= self.num_rows

    def start(self, requests: Sequence[Request]) -> None:
        capacity, device = len(self._first_positions), self.runner.device
        known = [self.known[request.request_id] for request in requests]
        if self._states is None:
            like = known[0].states[0]
            self._states = torch.zeros(capacity, self.num_rows, like.shape[1], dtype=like.dtype, device=device)
        places = list[int]()
        token_ids = list[int]()
        for row, (request, own) in enumerate(zip(requests, known, strict=True)):
            fresh = request.tokens_between(own.next_position, request.num_tokens)
            places += range(row * self.num_rows, row * self.num_rows + len(fresh))
            token_ids += fresh
        index = to_device([places, token_ids], torch.int64, device)
        self._token_ids.view(-1).index_copy_(0, index[0], index[1])
        self._states.flatten(0, 1).index_copy_(0, index[0], torch.cat([rows for own in known for rows in own.states]))
        self._first_positions.zero_()
        firsts = to_device([own.next_position for own in known], torch.int64, device)
        self._first_positions[: len(known)].copy_(firsts)

    def first_logits(self, batch: DeviceBatch) -> Tensor:
        assert self._states is not None, "start comes first"
        count, num_rows = batch.count, self.num_rows
        firsts = self._first_positions[:count]
        hidden = self.head.project(self._states[:count].flatten(0, 1))
        output = self._pass(
            batch, self._token_ids[:count].flatten(), hidden, lengths=firsts, offset=-1, num_rows=num_rows
        )
        last = torch.arange(0, count * num_rows, num_rows, device=output.device)
        last += (batch.lengths - firsts - 1).clamp(min=0)
        return self._logits(output.index_select(0, last))

    def next_logits(self, batch: DeviceBatch, step: int, token_ids: Tensor) -> Tensor:
        return self._logits(self._pass(batch, token_ids, self._output, offset=step - 2, num_rows=1))

    def learn(self, batch: DeviceBatch, hidden_states: list[Tensor], token_ids: Tensor) -> None:
        assert self._states is not None
        count = batch.count
        self._states[:count].copy_(torch.cat(hidden_states, dim=1).view(count, self.num_rows, -1))
        self._token_ids[:count].copy_(token_ids.clamp(min=0))
        self._first_positions[:count].copy_(batch.lengths)

    def stop(self, going_on: Sequence[GoingOn]) -> None:
        assert self._states is not None
        for row, request, num_new_tokens in going_on:
            self.known[request.request_id] = KnownStates(
                next_position=request.num_tokens - num_new_tokens,
                states=[self._states[row, :num_new_tokens].clone()],
            )

    def _pass(
        self,
        batch: DeviceBatch,
        token_ids: Tensor,
        hidden: Tensor,
        *,
        offset: int,
        num_rows: int,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """The head's rows of tokens, each stored at the place of the token before it."""
        shape, cache = self.runner.shapes["decode"], self.runner.cache
        assert isinstance(shape, PagedShape) and cache is not None
        launch, _ = batch.launch(
            token_ids,
            offset=offset,
            num_rows=num_rows,
            shape=shape,
            block_size=self.runner.block_size,
            lengths=lengths,
        )
        return self.head(launch, hidden, cache)

    def _logits(self, output: Tensor) -> Tensor:
        self._output = output
        return self.head.logits(output, self.runner.shapes["decode"].linear)
