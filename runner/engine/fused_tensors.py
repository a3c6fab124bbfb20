"""Checkpoints that hold what is multiplied together in one tensor, the rows of several matrices one behind another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from runner.engine.quantized_tensors import QuantizedTensor


@dataclass(frozen=True, kw_only=True)
class Fused:
    """What one tensor holds: in each of so many groups of rows, one behind another, a share of every matrix."""

    parts: Mapping[str, int]  # name of a matrix -> its rows
    num_groups: int = 1
    transposed: tuple[str, ...] = ()  # of these each group's rows become columns
    is_repeated: bool = False  # every matrix is all of it

    @property
    def num_rows(self) -> int:
        return max(self.parts.values()) if self.is_repeated else sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class RowsOfTensor:
    """Some rows of a safetensors slice, as one of their own: read where it is indexed."""

    tensor: Any
    first: int
    num_rows: int

    def get_shape(self) -> list[int]:
        return [self.num_rows, *self.tensor.get_shape()[1:]]

    def __getitem__(self, index: Any) -> Any:
        """index: ..., a slice of rows, or a pair of slices."""
        rows, *columns = index if isinstance(index, tuple) else (index,)
        begin, end, _ = (slice(None) if rows is ... else rows).indices(self.num_rows)
        return self.tensor[(slice(self.first + begin, self.first + end), *columns)]


@dataclass(frozen=True, kw_only=True)
class RowsOfGroups:
    """The same rows of every group of a tensor, as one of their own: read where it is indexed."""

    tensor: Any
    num_groups: int
    first: int  # of a group's rows, as the next
    num_rows: int

    def get_shape(self) -> list[int]:
        return [self.num_groups * self.num_rows, *self.tensor.get_shape()[1:]]

    def __getitem__(self, index: Any) -> Any:
        whole = self.tensor[...]
        groups = whole.view(self.num_groups, -1, *whole.shape[1:])
        return groups[:, self.first : self.first + self.num_rows].reshape(self.get_shape())[index]


@dataclass(frozen=True, kw_only=True)
class TransposedGroups:
    """A tensor with the rows of every group as columns: read where it is indexed."""

    tensor: Any
    num_groups: int

    def get_shape(self) -> list[int]:
        num_rows, num_columns = self.tensor.get_shape()
        return [self.num_groups * num_columns, num_rows // self.num_groups]

    def __getitem__(self, index: Any) -> Any:
        whole = self.tensor[...]
        groups = whole.view(self.num_groups, -1, whole.shape[1])
        return groups.transpose(1, 2).reshape(self.get_shape())[index]


def split_fused(tensors: Iterable[tuple[str, Any]], fused: Mapping[str, Fused]) -> Iterator[tuple[str, Any]]:
    """Named tensors, each fused one as its parts; fused: names within a layer.

    One whose rows are not those of its parts comes as it is, under a name that nobody waits for.
    """
    for name, tensor in tensors:
        module, _, kind = name.rpartition(".")
        found = next((own for own in fused if module.endswith(f".{own}")), None)
        if found is None or [fused[found].num_rows] != tensor.get_shape()[:1]:
            yield name, tensor
            continue
        if fused[found].is_repeated:
            yield from ((f"{module.removesuffix(found)}{part}.{kind}", tensor) for part in fused[found].parts)
            continue
        first, num_groups = 0, fused[found].num_groups
        for part, total in fused[found].parts.items():
            num_rows = total // num_groups
            own = _part(tensor, num_groups, first, num_rows)
            if part in fused[found].transposed:
                own = TransposedGroups(tensor=own, num_groups=num_groups)
            yield f"{module.removesuffix(found)}{part}.{kind}", own
            first += num_rows


def _part(tensor: Any, num_groups: int, first: int, num_rows: int) -> Any:
    """The same rows of every group; of a QuantizedTensor one that is held as it is."""
    if isinstance(tensor, QuantizedTensor):
        groups = torch.arange(tensor.shape[0]).view(num_groups, -1)
        return tensor.rows(groups[:, first : first + num_rows].flatten())
    if num_groups == 1:
        return RowsOfTensor(tensor=tensor, first=first, num_rows=num_rows)
    return RowsOfGroups(tensor=tensor, num_groups=num_groups, first=first, num_rows=num_rows)
