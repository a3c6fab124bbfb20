"""Drafting with the target's own layers, captured: their cache is the target's, so it lacks the last token alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from proposers.captured.token_by_token import CapturedChains
from proposers.contexts.kept_context import KeptContext
from runner.engine.device_batch import DeviceBatch
from runner.engine.model_runner import ModelRunner


class CapturedSelfSpeculation(CapturedChains):
    def __init__(self, *, runner: ModelRunner, kept: KeptContext | None, **common: Any) -> None:
        """runner: of the layers that draft, over the target's cache; kept: what they attend to, None: all."""
        super().__init__(**common)
        self.runner, self.kept = runner, kept
        self._seen: DeviceBatch | None = None  # the batch as attention sees it; None: as it is

    def first_logits(self, batch: DeviceBatch) -> Tensor:
        self._seen = None if self.kept is None else self.kept.of_batch(batch, self.num_tokens)
        return super().first_logits(batch)

    def next_logits(self, batch: DeviceBatch, step: int, token_ids: Tensor) -> Tensor:
        launch, _ = self.runner.decode_launch(batch, token_ids, offset=step - 1, num_rows=1)
        if self._seen is not None:
            seen, _ = self.runner.decode_launch(self._seen, token_ids, offset=step - 1, num_rows=1)
            launch = replace(launch, attention=seen.attention)
        if step + 1 == self.num_tokens:  # no reference to a graph's memory is kept
            self._seen = None
        hidden, _ = self.runner.compute(launch)
        return self.runner.model.logits(hidden, launch.linear_tile)
