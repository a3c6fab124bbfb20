"""A small embedding of each token for every layer, which gates what the layer adds last (Gemma 3n and 4).

A token's input of a layer is what a table has for the two, and what a product of its embedding has:
(norm(P e) + t) / sqrt(2). The layer adds norm(W (activation(G h) * input)) to its residual stream h.
"""

from __future__ import annotations

import torch

from kernels.cpu.panels import Change
from runner.engine.linear import ColumnParallelLinear, WeightTarget
from runner.engine.norms import RMSNorm
from runner.engine.operations import Rows, gate, scale_rows, take_rows
from runner.engine.per_layer_shapes import PerLayerShapes
from runner.engine.quantization import Quantization
from runner.engine.shard import Shard


class PerLayerInputs:
    """Of all layers; whole in every rank."""

    def __init__(
        self, shapes: PerLayerShapes, num_layers: int, hidden_size: int, eps: float, dtype: torch.dtype
    ) -> None:
        self.size, width = shapes.size, num_layers * shapes.size
        self.table = torch.empty(shapes.vocab_size, width, dtype=dtype)
        self.projection = ColumnParallelLinear(
            hidden_size, {"per_layer_model_projection": width}, bias=False, shard=Shard(), dtype=dtype
        )
        # What it norms would come scaled by the root of the hidden size, as which it is divided here.
        self.norm = RMSNorm(shapes.size, eps * hidden_size, dtype, rounds_last=True)
        self._table_scale = torch.tensor(float(shapes.size) ** 0.5, dtype=dtype, device="cpu").float()
        self._scale = torch.tensor(2.0**-0.5)

    def __call__(self, token_ids: torch.Tensor, embeddings: torch.Tensor, tile: int | None) -> torch.Tensor:
        """[num_rows] int64 and their embeddings [num_rows, hidden] -> [num_rows, num_layers, size]."""
        of_table = scale_rows(take_rows(self.table, token_ids), self._table_scale).view(-1, self.size)
        projected = self.projection(embeddings, tile).view(-1, self.size)
        return self.norm.add_to(of_table, projected, self._scale).view(len(token_ids), -1, self.size)

    def convert(self, change: Change) -> None:
        """As Decoder.convert."""
        self.projection.convert(change)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        own = {"embed_tokens_per_layer": WeightTarget(view=self.table), "per_layer_projection_norm": self.norm.target}
        named = {f"{prefix}{name}.weight": target for name, target in own.items()}
        return named | self.projection.weight_targets(prefix)


class PerLayerInput:
    """Of one layer; whole in every rank."""

    def __init__(
        self,
        shapes: PerLayerShapes,
        hidden_size: int,
        eps: float,
        dtype: torch.dtype,
        *,
        quantization: Quantization | None = None,  # by names within the layer
    ) -> None:
        self.gate_proj = ColumnParallelLinear(
            hidden_size,
            {"per_layer_input_gate": shapes.size},
            bias=False,
            shard=Shard(),
            dtype=dtype,
            quantization=quantization,
        )
        self.projection = ColumnParallelLinear(
            shapes.size,
            {"per_layer_projection": hidden_size},
            bias=False,
            shard=Shard(),
            dtype=dtype,
            quantization=quantization,
        )
        self.norm = RMSNorm(hidden_size, eps, dtype, rounds_last=True)  # behind it

    def __call__(self, residual: torch.Tensor, inputs: torch.Tensor, tile: int | None) -> Rows:
        """[num_rows, hidden] and [num_rows, size] -> what the layer adds before its norm [num_rows, hidden]."""
        gated = gate(inputs, self.gate_proj(residual, tile), "gelu_tanh")
        return self.projection.in_parts(gated, tile)

    @property
    def products(self) -> list[ColumnParallelLinear]:
        return [self.gate_proj, self.projection]

    def convert(self, change: Change) -> None:
        """As Decoder.convert."""
        for product in self.products:
            product.convert(change)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        norm = {f"{prefix}post_per_layer_input_norm.weight": self.norm.target}
        return norm | self.gate_proj.weight_targets(prefix) | self.projection.weight_targets(prefix)
