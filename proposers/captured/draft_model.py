"""A small model's drafting, captured: its cache may lack the last committed token or the last two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from proposers.captured.drafter import GoingOn
from proposers.captured.token_by_token import CapturedChains
from proposers.vocabularies.translation import Translation
from runner.engine.device_batch import DeviceBatch
from runner.engine.model_runner import ModelRunner
from runner.engine.request import Request

# Of a request's last committed tokens: those that a whole step begins with, computed by steps in parts or not.
NUM_COMPUTED_AGAIN = 2


class CapturedDraftModel(CapturedChains):
    def __init__(
        self,
        *,
        runner: ModelRunner,
        translation: Translation | None,
        num_computed: dict[str, int],  # the proposer's own: request_id -> tokens whose KV is in the draft's cache
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.runner, self.translation, self.num_computed = runner, translation, num_computed
        self.known_tokens = None if translation is None else translation.shared

    def can_start(self, request: Request) -> bool:
        return self.num_computed.get(request.request_id, 0) >= request.num_tokens - NUM_COMPUTED_AGAIN

    def first_logits(self, batch: DeviceBatch) -> Tensor:
        """Compute the last two tokens: after full acceptance the cache lacks both, otherwise the first is recomputed.

        A generated token gets the same bits again. A prompt's last token was computed by the kernels for prompts, so
        its stored KV is left alone.
        """
        return self._logits(
            batch, batch.last_token_ids.flatten(), offset=-NUM_COMPUTED_AGAIN, num_rows=NUM_COMPUTED_AGAIN
        )

    def next_logits(self, batch: DeviceBatch, step: int, token_ids: Tensor) -> Tensor:
        return self._logits(batch, token_ids, offset=step - 1, num_rows=1)

    def follow(self, batch: DeviceBatch, drafts: Tensor | None) -> None:
        """Compute the last two tokens and the drafts: of those that are accepted, all that would be wanted is there."""
        assert drafts is not None, "where the load allows no drafts, another drafter takes its place"
        token_ids = torch.cat((batch.last_token_ids, drafts.clamp(min=0)), dim=1)
        self._compute(batch, token_ids.flatten(), offset=-NUM_COMPUTED_AGAIN, num_rows=token_ids.shape[1])

    def stop(self, going_on: Sequence[GoingOn]) -> None:
        for _, request, _ in going_on:
            self.num_computed[request.request_id] = request.num_tokens - NUM_COMPUTED_AGAIN

    def _logits(self, batch: DeviceBatch, token_ids: Tensor, *, offset: int, num_rows: int) -> Tensor:
        hidden = self._compute(batch, token_ids, offset=offset, num_rows=num_rows)
        last = hidden.view(batch.count, num_rows, -1)[:, -1].contiguous()
        logits = self.runner.model.logits(last, self.runner.shapes["decode"].linear)
        return logits if self.translation is None else self.translation.of_shared(logits)

    def _compute(self, batch: DeviceBatch, token_ids: Tensor, *, offset: int, num_rows: int) -> Tensor:
        """Hidden states [count * num_rows, width]; KV of the rows is stored."""
        launch, _ = self.runner.decode_launch(
            batch, token_ids, offset=offset, num_rows=num_rows, num_computed_again=NUM_COMPUTED_AGAIN
        )
        if offset < -1:
            is_generated = launch.positions.view(-1, num_rows) >= batch.num_prompt_tokens.unsqueeze(1)
            launch = replace(launch, slot_mapping=launch.slot_mapping * is_generated.flatten())  # 0: the null block
        hidden, _ = self.runner.compute(launch)
        return hidden
