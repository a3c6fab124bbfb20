"""A layer's MLP: two products side by side, gated, and one back to the hidden size; or one, squared where positive."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.cpu.panels import Change, Weight
from kernels.reference.act_and_mul import Activation
from runner.engine.architecture import gate_up_rows
from runner.engine.linear import ColumnParallelLinear, RowParallelLinear, WeightTarget
from runner.engine.operations import Rows, gate, gated_linear
from runner.engine.quantization import Quantization
from runner.engine.shard import Shard


class MLP:
    shared: MLP | None = None  # as Experts.shared
    rows_for_one = 1  # as Experts.rows_for_one

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        shard: Shard,
        dtype: torch.dtype,
        *,
        name: str = "mlp",  # within the layer
        bias: bool,
        activation: Activation,
        is_gated: bool = True,
        quantization: Quantization | None = None,  # of its products, by names within the layer
    ) -> None:
        self._activation, self.is_gated = activation, is_gated  # is_gated: the first product is two side by side
        self.activations = (activation,)  # of all that is gated
        rows = gate_up_rows(name, intermediate_size) if is_gated else {f"{name}.up_proj": intermediate_size}
        self.gate_up_proj = ColumnParallelLinear(
            hidden_size, rows, bias=bias, shard=shard, dtype=dtype, quantization=quantization
        )
        self.down_proj = RowParallelLinear(
            intermediate_size,
            hidden_size,
            f"{name}.down_proj",
            bias=bias,
            shard=shard,
            dtype=dtype,
            quantization=quantization,
        )

    def __call__(self, hidden: torch.Tensor, tile: int | None) -> Rows:
        return self.down_proj.in_parts(self._inner(hidden, tile), tile)

    def own_part(self, hidden: torch.Tensor, tile: int | None) -> torch.Tensor:
        """This rank's part of the result [num_rows, hidden]."""
        return self.down_proj.own_part(self._inner(hidden, tile), tile)

    def _inner(self, hidden: torch.Tensor, tile: int | None) -> torch.Tensor:
        fused = self.gate_up_proj
        if not self.is_gated:
            up = fused(hidden, tile)
            return gate(up, up, "relu")
        return gated_linear(hidden, fused.weight, fused.bias, tile, self._activation)

    @property
    def products_per_row(self) -> int:
        return sum(weight.shape.numel() for weight in self.product_weights)

    @property
    def product_weights(self) -> list[Weight]:
        """[out_features, in_features] each, in the order in which rows meet them."""
        return [self.gate_up_proj.weight, self.down_proj.weight]

    @property
    def product_names(self) -> list[str]:
        return [*self.gate_up_proj.part_rows, self.down_proj.name]

    def convert(self, change: Change) -> None:
        """As Decoder.convert."""
        self.gate_up_proj.convert(change)
        self.down_proj.convert(change)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        return self.gate_up_proj.weight_targets(prefix) | self.down_proj.weight_targets(prefix)


class NoMLP:
    """Of a layer that attends alone."""

    shared: MLP | None = None
    rows_for_one = 1
    activations: tuple[Activation, ...] = ()
    products_per_row = 0
    product_weights: Sequence[Weight] = ()
    product_names: Sequence[str] = ()

    def convert(self, change: Change) -> None:
        pass

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        return {}
