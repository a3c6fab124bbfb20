"""Drafting with the target's first layers, captured: their cache is the target's, so it lacks the last token alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from proposers.captured.token_by_token import CapturedChains
from runner.engine.device_requests import DeviceBatch
from runner.engine.model_runner import ModelRunner


class CapturedEarlyExit(CapturedChains):
    def __init__(self, *, runner: ModelRunner, **common: Any) -> None:
        """runner: of the first layers, over the target's cache."""
        super().__init__(**common)
        self.runner = runner

    def next_logits(self, batch: DeviceBatch, step: int, token_ids: Tensor) -> Tensor:
        launch, _ = self.runner.decode_launch(batch, token_ids, offset=step - 1, num_rows=1)
        hidden, _ = self.runner.compute(launch)
        return self.runner.model.logits(hidden, launch.linear_tile)
