"""What MLP and LSTM speculators begin with: the target's last state, normed where their config asks for it."""

from __future__ import annotations

import math

import torch

from proposers.heads.speculator_norms import EPS
from proposers.heads.speculator_shape import SpeculatorShape
from runner.engine.norms import RMSNorm


class Recurrence:
    def __init__(self, shape: SpeculatorShape) -> None:
        self.shape, self.token_weight = shape, shape.token_weight
        self._input_norm = RMSNorm.by_no_weights(shape.hidden_size, EPS) if shape.scales_input else None

    @property
    def max_depth(self) -> int:
        return self.shape.max_depth

    def first_state(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states [num_rows, hidden] as the first step takes them."""
        return states if self._input_norm is None else self._input_norm(states) / math.sqrt(2)
