"""A product of each head by a weight of its own, split over the ranks by heads."""

from __future__ import annotations

import torch

from kernels.cpu.panels import Change, Weight
from kernels.quantized_weight import QuantizedWeight
from runner.engine.expert_operations import ExpertWeights
from runner.engine.latent_operations import linear_of_heads
from runner.engine.linear import WeightTarget
from runner.engine.shard import Shard


class HeadLinear:
    """y_h = x_h W_h^T."""

    def __init__(
        self,
        name: str,  # of the checkpoint's matrices, one below another
        num_heads: int,
        out_features: int,
        in_features: int,
        shard: Shard,
        dtype: torch.dtype,
    ) -> None:
        self.name, self.num_heads = name, shard.split(num_heads, "num_attention_heads")
        whole = torch.empty(self.num_heads * out_features, in_features, dtype=dtype)
        self.weights = ExpertWeights(whole.chunk(self.num_heads))

    def __call__(self, x: torch.Tensor, out: torch.Tensor, tile: int | None) -> None:
        """[num_rows, num_heads, in_features] into [num_rows, num_heads, out_features], both strided but in columns."""
        linear_of_heads(x, self.weights, out, tile)

    @property
    def weight(self) -> Weight:
        """Of one head [out_features, in_features]."""
        return self.weights[0]

    @property
    def products_per_row(self) -> int:
        return self.num_heads * self.weight.shape.numel()

    def convert(self, change: Change) -> None:
        """As Decoder.convert; but it stays dense: no kernel multiplies heads by quantized weights."""
        changed = [change(weight) for weight in self.weights]
        if not any(isinstance(weight, QuantizedWeight) or weight is self.weight for weight in changed):
            self.weights = ExpertWeights(changed)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        return {f"{prefix}{self.name}.weight": WeightTarget(view=self.weights.whole, shard_dim=0)}
