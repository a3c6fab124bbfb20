"""A short convolution between two gates in place of a layer's attention: LFM2 (Liquid AI, arXiv 2511.23404)."""

from __future__ import annotations

import torch

from kernels.reference.short_conv import ConvStates, ConvWeights
from runner.engine.architecture import Architecture
from runner.engine.conv_shapes import SHORT_CONV
from runner.engine.forward_batch import ForwardBatch
from runner.engine.kv_cache import PagedKVCache
from runner.engine.linear import ColumnParallelLinear, RowParallelLinear, WeightTarget
from runner.engine.mixer import RecurrentMixer
from runner.engine.operations import Rows
from runner.engine.quantization import Quantization
from runner.engine.recurrent_operations import short_conv
from runner.engine.rope import RopeRows
from runner.engine.shard import Shard


class ShortConv(RecurrentMixer):
    def __init__(
        self,
        arch: Architecture,
        layer: int,
        shard: Shard,
        dtype: torch.dtype,
        *,
        quantization: Quantization | None = None,  # by names within the layer
    ) -> None:
        assert arch.convs is not None
        self.layer, shapes = layer, arch.convs
        self._width = shard.split(shapes.width, "hidden_size")
        self.in_proj = ColumnParallelLinear(
            arch.hidden_size,
            shapes.projected_rows,
            bias=shapes.has_biases,
            shard=shard,
            dtype=dtype,
            quantization=quantization,
        )
        self.out_proj = RowParallelLinear(
            shapes.width,
            arch.hidden_size,
            f"{SHORT_CONV}.out_proj",
            bias=shapes.has_biases,
            shard=shard,
            dtype=dtype,
            quantization=quantization,
        )
        self.weights = ConvWeights(
            convolution=torch.empty(shapes.taps, self._width, dtype=dtype),
            bias=torch.empty(self._width, dtype=dtype) if shapes.has_biases else None,
        )

    def __call__(self, hidden: torch.Tensor, rope: RopeRows | None, batch: ForwardBatch, cache: PagedKVCache) -> Rows:
        states, segments = cache.states[self.layer], batch.recurrent
        assert isinstance(states, ConvStates) and segments is not None, "a launch of a tree has no states to go on from"
        found = short_conv(self.in_proj(hidden, batch.linear_tile), segments, states, self.weights)
        return self.out_proj.in_parts(found, batch.linear_tile)

    def empty_states(self, num_slots: int, num_uncertain: int, dtype: torch.dtype, device: torch.device) -> ConvStates:
        return ConvStates.empty(self._width, len(self.weights.convolution), num_slots, num_uncertain, dtype, device)

    @property
    def products(self) -> list[ColumnParallelLinear | RowParallelLinear]:
        return [self.in_proj, self.out_proj]

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        own = f"{prefix}{SHORT_CONV}.conv."
        channels = self.weights.convolution.t().unsqueeze(1)  # [width, 1, taps]
        targets = {f"{own}weight": WeightTarget(view=channels, shard_dim=0)}
        if self.weights.bias is not None:
            targets[f"{own}bias"] = WeightTarget(view=self.weights.bias, shard_dim=0)
        for product in self.products:
            targets |= product.weight_targets(prefix)
        return targets
