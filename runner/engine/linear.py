"""Linear layers that hold one tensor-parallel shard of their weight and say how a checkpoint fills it.

Column-parallel layers split the output dimension and may stack several checkpoint matrices (q, k, v);
row-parallel layers split the input dimension and sum over ranks (Shoeybi et al., arXiv 1909.08053).
Plain objects, as all of the decoder: the attribute and call machinery of nn.Module took a tenth of a decode step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.cpu.panels import Weight, pack, unpacked
from runner.engine.operations import linear


@dataclass(frozen=True, kw_only=True)
class Shard:
    """This process's part of a tensor-parallel group."""

    rank: int = 0
    size: int = 1

    def split(self, length: int, what: str) -> int:
        if length % self.size:
            raise ValueError(f"{what} must be divisible by tensor_parallel_size ({self.size}), got {length}")
        return length // self.size


@dataclass(frozen=True, kw_only=True)
class WeightTarget:
    """Where one checkpoint tensor goes: a view of a parameter, and the dimension a shard is cut from."""

    view: torch.Tensor
    shard_dim: int | None = None  # None = replicated


class ColumnParallelLinear:
    """y = x [W_1; W_2; ...]^T, rows of every W_i split over the ranks."""

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],  # checkpoint name of each stacked matrix -> its rows in the whole model
        *,
        bias: bool,
        shard: Shard,
        dtype: torch.dtype,
    ) -> None:
        self.part_rows = {name: shard.split(rows, name) for name, rows in parts.items()}
        total = sum(self.part_rows.values())
        self.weight: Weight = torch.empty(total, in_features, dtype=dtype)
        self.bias = torch.empty(total, dtype=dtype) if bias else None

    def pack(self) -> None:
        """For good: a packed weight cannot be filled any more."""
        self.weight = pack(self.weight)

    def __call__(self, x: torch.Tensor, tile: int | None) -> torch.Tensor:
        return linear(x, self.weight, self.bias, tile)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        targets, start, weight = {}, 0, unpacked(self.weight)
        for name, rows in self.part_rows.items():
            targets[f"{prefix}{name}.weight"] = WeightTarget(view=weight[start : start + rows], shard_dim=0)
            if self.bias is not None:
                targets[f"{prefix}{name}.bias"] = WeightTarget(view=self.bias[start : start + rows], shard_dim=0)
            start += rows
        return targets


class RowParallelLinear:
    """y = sum over ranks of x_rank W_rank^T, columns of W split over the ranks; the bias is added once."""

    def __init__(
        self, in_features: int, out_features: int, name: str, *, bias: bool, shard: Shard, dtype: torch.dtype
    ) -> None:
        self.name, self.shard = name, shard
        columns = shard.split(in_features, name)
        self.weight: Weight = torch.empty(out_features, columns, dtype=dtype)
        self.bias = torch.empty(out_features, dtype=dtype) if bias else None

    def pack(self) -> None:
        """As ColumnParallelLinear.pack."""
        self.weight = pack(self.weight)

    def __call__(self, x: torch.Tensor, tile: int | None) -> torch.Tensor:
        if self.shard.size == 1:
            return linear(x, self.weight, self.bias, tile)
        out = linear(x, self.weight, self.bias if self.shard.rank == 0 else None, tile)
        torch.distributed.all_reduce(out)
        return out

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        targets = {f"{prefix}{self.name}.weight": WeightTarget(view=unpacked(self.weight), shard_dim=1)}
        if self.bias is not None:
            targets[f"{prefix}{self.name}.bias"] = WeightTarget(view=self.bias)
        return targets
