"""Committed tokens that a head has not computed yet, and the target's states before them, kept on the device.

Gives them as rows that the head takes. One that drafts in one pass has its mask rows behind them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from proposers.contexts.fresh_tokens import FreshTokens
from proposers.contexts.known_states import KnownStates
from proposers.heads.autoregressive import AutoregressiveHead
from runner.engine.device_batch import DeviceBatch
from runner.engine.operations import take_rows
from runner.engine.request import Request


class FreshStates:
    def __init__(
        self,
        head: AutoregressiveHead,
        *,
        capacity: int,
        most: int,
        mask: tuple[int, Tensor] | None,  # token and state [1, width] of places yet to be guessed
        num_masks: int,
        device: torch.device,
    ) -> None:
        self.tokens = FreshTokens(capacity=capacity, most=most, num_masks=num_masks, device=device)
        self._head, self._mask, self._num_masks, self._capacity = head, mask, num_masks, capacity
        self._states: Tensor | None = None  # [capacity, most, taps * hidden], before each fresh token

    def load(self, requests: Sequence[Request], known: Sequence[KnownStates]) -> None:
        states = torch.cat([rows for own in known for rows in own.states])
        if self._states is None:
            self._states = states.new_zeros(self._capacity, self.tokens.most, states.shape[1])
        self._states.index_put_(self.tokens.load(requests, [own.next_position for own in known]), states)

    def learn(self, batch: DeviceBatch, hidden_states: list[Tensor], token_ids: Tensor) -> None:
        """As CapturedDrafter.learn: all earlier tokens are computed."""
        assert self._states is not None
        num_rows = token_ids.shape[1]
        taps = [tap.view(batch.count, num_rows, -1) for tap in hidden_states]
        torch.cat(taps, dim=2, out=self._states[: batch.count, :num_rows])
        self.tokens.learn(batch, token_ids)

    def known(self, row: int, request: Request, num_new_tokens: int) -> KnownStates:
        """Of a request in this place, to which the last step brought so many tokens."""
        assert self._states is not None
        return KnownStates(
            next_position=request.num_tokens - num_new_tokens,
            states=[self._states[row, :num_new_tokens].clone()],
        )

    def rows(self, batch: DeviceBatch) -> tuple[Tensor, Tensor]:
        """Fresh tokens [count, num_rows], then masks, then scratch; states before them [count * num_rows, width]."""
        hidden = self._head.project(self._flat_states(batch))
        token_ids = self.tokens.rows(batch)
        if self._mask is not None:
            (mask_token_id, state), are_fresh = self._mask, self.tokens.are_fresh(batch)
            token_ids = torch.where(are_fresh, token_ids, mask_token_id)
            own = torch.nn.functional.pad(hidden.view(batch.count, self.tokens.most, -1), (0, 0, 0, self._num_masks))
            hidden = torch.where(are_fresh.unsqueeze(2), own, state).flatten(0, 1)
        return token_ids, hidden

    def last(self, batch: DeviceBatch) -> tuple[Tensor, Tensor]:
        """Of a head without masks each request's last token [count, 1], and the state before it [count, width]."""
        last = self.tokens.last_rows(batch).flatten()
        hidden = self._head.project(take_rows(self._flat_states(batch), last))
        return batch.last_token_ids[:, 1:].contiguous(), hidden

    def _flat_states(self, batch: DeviceBatch) -> Tensor:
        assert self._states is not None, "start comes first"
        return self._states[: batch.count].flatten(0, 1)
