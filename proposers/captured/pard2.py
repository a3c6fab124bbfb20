"""PARD-2's pass, captured: that of PARD, and projections of the target's states beside its rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from proposers.captured.drafter import NoDrafts
from proposers.captured.pard import CapturedPard
from proposers.contexts.feature_runner import FeatureRunner
from runner.engine.device_batch import DeviceBatch


class CapturedPard2(CapturedPard):
    runner: FeatureRunner

    def __init__(self, *, runner: FeatureRunner, **common: Any) -> None:
        super().__init__(runner=runner, **common)
        self.tap_layers = runner.features.tap_layers

    def inputs_beside(self, batch: DeviceBatch) -> tuple[Tensor, ...]:
        token_ids = self.fresh.rows(batch)
        before, _ = self.runner.decode_launch(
            batch,
            token_ids.flatten(),
            offset=-1,
            num_rows=token_ids.shape[1],
            lengths=self.fresh.first_positions(batch),
        )
        slots = before.slot_mapping.view(batch.count, -1)
        of_last = slots.gather(1, self.fresh.counts(batch).unsqueeze(1) - 1)
        return (self.runner.kept(torch.where(self.fresh.are_fresh(batch), slots, of_last).flatten()),)

    def learn(self, batch: DeviceBatch, hidden_states: list[Tensor], token_ids: Tensor) -> None:
        self.runner.store_verified(batch, hidden_states, token_ids)
        super().learn(batch, hidden_states, token_ids)


class CapturedStates(NoDrafts):
    """Where the load allows no drafts: what later ones are to find is kept all the same."""

    def __init__(self, runner: FeatureRunner) -> None:
        super().__init__()
        self.runner, self.tap_layers = runner, runner.features.tap_layers

    def learn(self, batch: DeviceBatch, hidden_states: list[Tensor], token_ids: Tensor) -> None:
        self.runner.store_verified(batch, hidden_states, token_ids)
