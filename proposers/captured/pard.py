"""PARD's pass over the fresh tokens and the masks behind them, captured; KV of masks is scratch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from proposers.captured.draft_model import NUM_COMPUTED_AGAIN
from proposers.captured.drafter import GoingOn
from proposers.captured.in_one_pass import CapturedOnePass
from proposers.contexts.fresh_tokens import FreshTokens
from runner.engine.device_batch import DeviceBatch
from runner.engine.model_runner import ModelRunner
from runner.engine.request import Request


class CapturedPard(CapturedOnePass):
    def __init__(
        self,
        *,
        runner: ModelRunner,
        num_computed: dict[str, int],  # the proposer's own: request_id -> tokens whose KV is in the draft's cache
        mask_token_id: int,
        capacity: int,
        num_tokens: int,
        max_depth: int,  # drafts of a step that can be accepted, at least num_tokens
        **common: Any,
    ) -> None:
        # A request with few fresh tokens has its masks early, and rows of scratch behind them.
        super().__init__(num_tokens=num_tokens, num_scratch_rows=max_depth - 1, **common)
        self.runner, self.num_computed, self.mask_token_id = runner, num_computed, mask_token_id
        self.fresh = FreshTokens(capacity=capacity, most=max_depth + 1, num_masks=num_tokens - 1, device=runner.device)

    def can_start(self, request: Request) -> bool:
        return self.fresh.fit(request, self.num_computed.get(request.request_id, 0))

    def start(self, requests: Sequence[Request]) -> None:
        self.fresh.load(
            requests,
            [
                self.num_computed[request.request_id] if request.sampling_params.speculates else request.num_tokens - 1
                for request in requests
            ],
        )

    def all_logits(self, batch: DeviceBatch) -> Tensor:
        drafting = self._pass(batch).index_select(0, self.fresh.last_rows(batch).flatten())
        tile = self.runner.shapes["decode"].linear
        return self.runner.model.logits(drafting, tile).view(batch.count, self.num_tokens, -1)

    def follow(self, batch: DeviceBatch, drafts: Tensor | None) -> None:
        self._pass(batch)

    def _pass(self, batch: DeviceBatch) -> Tensor:
        """Hidden states of the fresh tokens' rows and the masks' behind them."""
        token_ids = torch.where(self.fresh.are_fresh(batch), self.fresh.rows(batch), self.mask_token_id)
        lengths = self.fresh.first_positions(batch)
        launch, _ = self.runner.decode_launch(
            batch,
            token_ids.flatten(),
            offset=0,
            num_rows=token_ids.shape[1],
            lengths=lengths,
            num_computed_again=NUM_COMPUTED_AGAIN,
        )
        hidden, _ = self.runner.compute(launch, (), *self.inputs_beside(batch))
        return hidden

    def inputs_beside(self, batch: DeviceBatch) -> tuple[Tensor, ...]:
        """What the model takes beside the rows of `_pass`."""
        return ()

    def learn(self, batch: DeviceBatch, hidden_states: list[Tensor], token_ids: Tensor) -> None:
        self.fresh.learn(batch, token_ids)

    def stop(self, going_on: Sequence[GoingOn]) -> None:
        for _, request, num_new_tokens in going_on:
            self.num_computed[request.request_id] = request.num_tokens - num_new_tokens
