"""Linear layers that hold one tensor-parallel shard of their weight and say how a checkpoint fills it.

Column-parallel layers split the output dimension and may stack several checkpoint matrices (q, k, v);
row-parallel layers split the input dimension and sum over ranks (Shoeybi et al., arXiv 1909.08053).
Plain objects, as all of the decoder: the attribute and call machinery of nn.Module took a tenth of a decode step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kernels.cpu.panels import Change, Weight, unpacked
from kernels.quantized_weight import QuantizedWeight, block_columns, empty_numbers, num_groups
from runner.engine.backend import runs_kernels
from runner.engine.errors import UserError
from runner.engine.operations import Rows, linear, linear_in_parts
from runner.engine.quantization import SMALLEST_GROUP, Quantization, Storage
from runner.engine.shard import Shard


@dataclass(frozen=True, kw_only=True)
class WeightTarget:
    """Where one checkpoint tensor goes: a view of a parameter, and the dimension a shard is cut from."""

    view: torch.Tensor  # of a quantized weight its numbers
    shard_dim: int | None = None  # None = replicated
    quantized: QuantizedWeight | None = None  # what view is the numbers of
    factor: float = 1.0  # what the checkpoint's numbers are multiplied by
    offset: float = 0.0  # and what is added to them

    @property
    def shape(self) -> torch.Size:
        return self.view.shape if self.quantized is None else self.quantized.shape

    @property
    def nbytes(self) -> int:
        """In memory, of a quantized weight with its scales."""
        parts = [self.view] if self.quantized is None else self.quantized.tensors.values()
        return sum(part.nbytes for part in parts)

    def fill(self, tensor: torch.Tensor) -> None:
        """With a dense tensor of the checkpoint, of the view's shape."""
        self.view.copy_(tensor)
        if self.factor != 1.0:
            self.view.mul_(self.factor)
        if self.offset:
            self.view.add_(self.offset)


def empty_weight(out_features: int, in_features: int, dtype: torch.dtype, storage: Storage | None) -> Weight:
    """To be filled; storage None: dense."""
    if storage is None:
        return torch.empty(out_features, in_features, dtype=dtype)
    held, group_size = storage.of_inputs(in_features), storage.group_size or in_features
    is_fp4, in_words = held.kind == "fp4", runs_kernels(torch.get_default_device())
    groups = (out_features, 1 if is_fp4 else num_groups(in_features, group_size))
    # Whatever lies behind an output's last one is read, and multiplied by nothing.
    block_scales = torch.zeros(out_features, block_columns(in_features), dtype=torch.uint8) if is_fp4 else None
    return QuantizedWeight(
        kind=held.kind,
        in_features=in_features,
        numbers=empty_numbers(held.kind, out_features, in_features, in_words=in_words),
        scales=torch.empty(groups),
        group_size=group_size,
        dtype=dtype,
        zeros=torch.empty(groups, dtype=torch.int8) if held.has_zeros else None,
        block_scales=block_scales,
        is_in_words=in_words,
    )


def weight_target(weight: Weight, rows: slice = slice(None), shard_dim: int | None = None) -> WeightTarget:
    """For the checkpoint's matrix that fills these rows."""
    if isinstance(weight, QuantizedWeight):
        own = weight.rows(rows)
        return WeightTarget(view=own.numbers, shard_dim=shard_dim, quantized=own)
    return WeightTarget(view=unpacked(weight)[rows], shard_dim=shard_dim)


def shared_storage(names: Sequence[str], quantization: Quantization | None) -> Storage | None:
    """How matrices that are multiplied together are held: with zero points if any of them has some.

    Dense, where not all of them are quantized alike.
    """
    storages = [(quantization or {}).get(name) for name in names]
    has_zeros = any(storage is not None and storage.has_zeros for storage in storages)
    together = [None if storage is None else replace(storage, has_zeros=has_zeros) for storage in storages]
    return together[0] if all(storage == together[0] for storage in together) else None


def split_inputs(in_features: int, name: str, storage: Storage | None, shard: Shard) -> tuple[int, Storage | None]:
    """A rank's inputs of a row-parallel matrix, and how they are held: of groups that ranks would cut apart the halves.

    Raises:
        UserError: they cannot be shared, or not without cutting the smallest groups apart.
    """
    columns = shard.split(in_features, name)
    if shard.size == 1 or storage is None or storage.group_size is None:
        return columns, storage
    size = storage.group_size
    while columns % size and size >= 2 * SMALLEST_GROUP:
        size //= 2
    if columns % size:
        raise UserError(
            f"{name} has {columns} inputs in each of {shard.size} ranks, which must be divisible by {size}: "
            f"{storage.group_size} share a scale; choose another tensor_parallel_size"
        )
    return columns, replace(storage, group_size=size)


class ColumnParallelLinear:
    """y = x [W_1; W_2; ...]^T, rows of every W_i split over the ranks."""

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],  # checkpoint name of each stacked matrix -> its rows in the whole model
        *,
        bias: bool,
        shard: Shard,  # Shard(): every rank has all rows
        dtype: torch.dtype,
        quantization: Quantization | None = None,  # by the parts' names; None: all are dense
    ) -> None:
        self._shard_dim = 0 if shard.size > 1 else None
        self.part_rows = {name: shard.split(rows, name) for name, rows in parts.items()}
        total = sum(self.part_rows.values())
        self.weight: Weight = empty_weight(total, in_features, dtype, shared_storage(list(parts), quantization))
        self.bias = torch.empty(total, dtype=dtype) if bias else None

    def convert(self, change: Change) -> None:
        """Of the weight, once it is filled: what it becomes may be no place for a checkpoint's tensors."""
        self.weight = change(self.weight)

    def __call__(self, x: torch.Tensor, tile: int | None) -> torch.Tensor:
        return linear(x, self.weight, self.bias, tile)

    def in_parts(self, x: torch.Tensor, tile: int | None) -> Rows:
        """As linear_in_parts."""
        return linear_in_parts(x, self.weight, self.bias, tile)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        targets, start = {}, 0
        for name, rows in self.part_rows.items():
            own = slice(start, start + rows)
            targets[f"{prefix}{name}.weight"] = weight_target(self.weight, own, self._shard_dim)
            if self.bias is not None:
                targets[f"{prefix}{name}.bias"] = WeightTarget(view=self.bias[own], shard_dim=self._shard_dim)
            start += rows
        return targets


class RowParallelLinear:
    """y = sum over ranks of x_rank W_rank^T, columns of W split over the ranks; the bias is added once."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        name: str,
        *,
        bias: bool,
        shard: Shard,
        dtype: torch.dtype,
        quantization: Quantization | None = None,
    ) -> None:
        self.name, self.shard = name, shard
        storage = (quantization or {}).get(name)
        columns, held = split_inputs(in_features, name, storage, shard)
        self.weight: Weight = empty_weight(out_features, columns, dtype, held)
        self.bias = torch.empty(out_features, dtype=dtype) if bias else None

    def convert(self, change: Change) -> None:
        """As ColumnParallelLinear.convert."""
        self.weight = change(self.weight)

    def __call__(self, x: torch.Tensor, tile: int | None) -> torch.Tensor:
        return self.shard.sum(self.own_part(x, tile))

    def in_parts(self, x: torch.Tensor, tile: int | None) -> Rows:
        """As linear_in_parts where the whole of the product is this rank's."""
        return linear_in_parts(x, self.weight, self.bias, tile) if self.shard.size == 1 else self(x, tile)

    def own_part(self, x: torch.Tensor, tile: int | None) -> torch.Tensor:
        """This rank's part of the sum [num_rows, out_features]."""
        return linear(x, self.weight, self.bias if self.shard.rank == 0 else None, tile)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        targets = {f"{prefix}{self.name}.weight": weight_target(self.weight, slice(None), 1)}
        if self.bias is not None:
            targets[f"{prefix}{self.name}.bias"] = WeightTarget(view=self.bias)
        return targets
