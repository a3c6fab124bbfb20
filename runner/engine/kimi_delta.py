"""Kimi's delta attention in place of a layer's attention (Kimi Linear, arXiv 2510.26692).

A gated delta net that is told for each channel of a key how much of it to forget. What says so, and what gates results,
comes of two matrices each with a narrow place between them.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.reference.gated_delta import DeltaRows
from runner.engine.architecture import Architecture
from runner.engine.delta_net import GatedDeltaNet
from runner.engine.linear import ColumnParallelLinear, WeightTarget
from runner.engine.shard import Shard


class KimiDeltaAttention(GatedDeltaNet):
    gates_are_whole = True  # the narrow places are

    def __init__(self, arch: Architecture, layer: int, shard: Shard, dtype: torch.dtype, **options: Any) -> None:
        super().__init__(arch, layer, shard, dtype, **options)
        whole, name = self.shapes.heads, self.shapes.projection
        self._narrow = (whole.key_dim, whole.value_dim, whole.num_value_heads)
        self._own_heads = slice(shard.rank * self.heads.num_value_heads, (shard.rank + 1) * self.heads.num_value_heads)
        # As narrow as what they read, and never quantized.
        self.forgotten_proj = ColumnParallelLinear(
            whole.key_dim, {name("f_b"): whole.keys}, bias=False, shard=shard, dtype=dtype
        )
        self.gate_proj = ColumnParallelLinear(
            whole.value_dim, {name("g_b"): whole.values}, bias=False, shard=shard, dtype=dtype
        )

    def projected(self, hidden: torch.Tensor, tile: int | None) -> DeltaRows:
        mixed = self.in_proj(hidden, tile)
        forgotten, gate, written = self.gates_proj(hidden, tile).split_with_sizes(self._narrow, dim=1)
        return DeltaRows(
            mixed=mixed,
            gate=self.gate_proj(gate, tile),
            forgotten=self.forgotten_proj(forgotten, tile),
            written=written[:, self._own_heads],
        )

    @property
    def projections(self) -> list[ColumnParallelLinear]:
        return [*super().projections, self.forgotten_proj, self.gate_proj]

    def target_of_a_log(self) -> WeightTarget:
        return WeightTarget(view=self.weights.a_log.view(1, 1, -1, 1), shard_dim=2)
