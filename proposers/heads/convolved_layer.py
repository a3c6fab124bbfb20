"""DFlash 2's layer: short convolutions along a block around its attention and around its MLP.

What comes in goes through one and what comes out through another. Their taps are learned, and each row adds a part of
its own, which is projected from what comes in. They are causal within a block's rows; the context goes through none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kernels.cpu.panels import Change
from kernels.recurrent_segments import RecurrentSegments
from runner.engine.architecture import Architecture
from runner.engine.draft_operations import block_conv
from runner.engine.forward_batch import ForwardBatch
from runner.engine.kv_cache import PagedKVCache
from runner.engine.layers import DecoderLayer, add_output
from runner.engine.linear import ColumnParallelLinear, WeightTarget
from runner.engine.mlp import NoMLP
from runner.engine.operations import Rows
from runner.engine.quantization import Quantization
from runner.engine.rope import RopeRows
from runner.engine.shard import Shard


class BlockConvolutions:
    """The two around one part of a layer."""

    def __init__(self, hidden_size: int, *, num_taps: int, group_size: int, dtype: torch.dtype) -> None:
        """num_taps: rows that a row sees, itself included. group_size: columns that share a row's own part."""
        self.base = torch.empty(2, num_taps, hidden_size, dtype=dtype)
        rows = {"kernel_projection": 2 * num_taps * (hidden_size // group_size)}
        self.projection = ColumnParallelLinear(hidden_size, rows, bias=False, shard=Shard(), dtype=dtype)

    def around(
        self,
        compute: Callable[[torch.Tensor], Rows],
        x: torch.Tensor,  # [num_rows, hidden]
        segments: RecurrentSegments,
        tile: int | None,
    ) -> torch.Tensor:
        before, after = self.projection(x, tile).chunk(2, dim=1)
        return block_conv(compute(block_conv(x, before, self.base[0], segments)), after, self.base[1], segments)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        return {f"{prefix}base_kernel": WeightTarget(view=self.base)} | self.projection.weight_targets(prefix)


class ConvolvedLayer(DecoderLayer):
    def __init__(
        self, arch: Architecture, layer: int, dtype: torch.dtype, *, quantization: Quantization, **sizes: int
    ) -> None:
        """quantization: as DecoderLayer's, whose products it is of; sizes: of BlockConvolutions."""
        super().__init__(arch, layer, Shard(), dtype, quantization=quantization)
        self.attention_conv, self.mlp_conv = (
            BlockConvolutions(arch.hidden_size, dtype=dtype, **sizes) for _ in range(2)
        )

    def after_input_norm(
        self,
        normed: torch.Tensor,
        residual: torch.Tensor,
        rope: RopeRows | None,
        batch: ForwardBatch,
        cache: PagedKVCache,
        inputs: torch.Tensor | None = None,
    ) -> tuple[Rows, torch.Tensor]:
        segments, tile = batch.recurrent, batch.linear_tile
        assert segments is not None, "the head reads segments"
        assert not isinstance(self.mlp, NoMLP), "of plain layers"
        attend = partial(self.mixer, rope=rope, batch=batch, cache=cache)
        attended = self.attention_conv.around(attend, normed, segments, tile)
        normed, residual = add_output(attended, residual, self.after_attention, self.before_mlp)
        return self.mlp_conv.around(partial(self.mlp, tile=tile), normed, segments, tile), residual

    def convert(self, change: Change) -> None:
        super().convert(change)
        for own in (self.attention_conv, self.mlp_conv):
            own.projection.convert(change)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        own: dict[str, Any] = {"attention_conv.": self.attention_conv, "mlp_conv.": self.mlp_conv}
        targets = super().weight_targets(prefix)
        for name, convolutions in own.items():
            targets |= convolutions.weight_targets(f"{prefix}{name}")
        return targets
