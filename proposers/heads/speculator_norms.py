"""The norms of MLP and LSTM speculators: they divide by the root mean square and take off no mean."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from runner.engine.linear import WeightTarget
from runner.engine.norms import RMSNorm

EPS = 1e-6


class NormedGelu:
    """GELU of a norm with scale and shift."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.norm, self.bias = RMSNorm(size, EPS, dtype), torch.empty(size, dtype=dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.norm(x) + self.bias)

    def weight_targets(self, name: str) -> dict[str, WeightTarget]:
        return {f"{name}.weight": self.norm.target, f"{name}.bias": WeightTarget(view=self.bias)}
