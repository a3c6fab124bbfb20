"""A state space in place of a layer's attention: Mamba-2's (Dao and Gu, arXiv 2405.21060).

Granite 4 H and Nemotron-H have it. A gated delta net that writes values as they are; norms span all heads that share
their keys.
"""

from __future__ import annotations

from typing import Any

import torch

from runner.engine.architecture import Architecture
from runner.engine.delta_net import GatedDeltaNet
from runner.engine.linear import WeightTarget
from runner.engine.norm_operations import norm_in_place
from runner.engine.shard import Shard


class StateSpace(GatedDeltaNet):
    def __init__(self, arch: Architecture, layer: int, shard: Shard, dtype: torch.dtype, **options: Any) -> None:
        super().__init__(arch, layer, shard, dtype, **options)
        self._norm = torch.empty(self.heads.values, dtype=dtype)
        self._eps = torch.tensor(self.shapes.norm_eps, dtype=torch.float32)

    def weights_of_results(self) -> dict[str, torch.Tensor]:
        return {"skip": torch.empty(self.heads.num_value_heads)}

    def normed(self, found: torch.Tensor) -> torch.Tensor:
        groups = (rows.chunk(self.heads.num_key_heads, dim=-1) for rows in (found, self._norm))
        for own, weight in zip(*groups, strict=True):
            norm_in_place(own, weight, self._eps)
        return found

    def targets_of_results(self, prefix: str) -> dict[str, WeightTarget]:
        assert self.weights.skip is not None
        return {
            f"{prefix}{self.shapes.block}.D": WeightTarget(view=self.weights.skip, shard_dim=0),
            f"{prefix}{self.shapes.norm}.weight": WeightTarget(view=self._norm, shard_dim=0),
        }
