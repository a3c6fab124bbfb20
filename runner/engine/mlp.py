"""A layer's MLP: two products side by side, gated, and one back to the hidden size."""

from __future__ import annotations

import torch

from kernels.cpu.panels import Change, Weight
from runner.engine.architecture import Architecture
from runner.engine.linear import ColumnParallelLinear, RowParallelLinear, WeightTarget
from runner.engine.operations import gated_linear
from runner.engine.quantization import Quantization
from runner.engine.shard import Shard


class MLP:
    def __init__(
        self, arch: Architecture, shard: Shard, dtype: torch.dtype, *, quantization: Quantization | None = None
    ) -> None:
        self._activation = arch.activation
        self.gate_up_proj = ColumnParallelLinear(
            arch.hidden_size, arch.gate_up_rows, bias=arch.mlp_bias, shard=shard, dtype=dtype, quantization=quantization
        )
        self.down_proj = RowParallelLinear(
            arch.intermediate_size,
            arch.hidden_size,
            "mlp.down_proj",
            bias=arch.mlp_bias,
            shard=shard,
            dtype=dtype,
            quantization=quantization,
        )

    def __call__(self, hidden: torch.Tensor, tile: int | None) -> torch.Tensor:
        fused = self.gate_up_proj
        return self.down_proj(gated_linear(hidden, fused.weight, fused.bias, tile, self._activation), tile)

    rows_for_one = 1  # as Experts.rows_for_one

    @property
    def products_per_row(self) -> int:
        return sum(weight.shape.numel() for weight in self.product_weights)

    @property
    def product_weights(self) -> list[Weight]:
        """[out_features, in_features] each, the first one gated."""
        return [self.gate_up_proj.weight, self.down_proj.weight]

    @property
    def product_names(self) -> list[str]:
        names = (*self.gate_up_proj.part_rows, self.down_proj.name)
        return [f"{name}.weight" for name in names]

    def convert(self, change: Change) -> None:
        """As Decoder.convert."""
        self.gate_up_proj.convert(change)
        self.down_proj.convert(change)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        return self.gate_up_proj.weight_targets(prefix) | self.down_proj.weight_targets(prefix)
