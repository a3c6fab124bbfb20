"""Checkpoints that hold what is multiplied together in one tensor, the rows of several matrices one behind another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Parts = Mapping[str, int]  # name of a matrix -> its rows


@dataclass(frozen=True, kw_only=True)
class RowsOfTensor:
    """Some rows of a safetensors slice, or of a QuantizedTensor, as one of their own: read where it is indexed."""

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


def split_fused(tensors: Iterable[tuple[str, Any]], fused: Mapping[str, Parts]) -> Iterator[tuple[str, Any]]:
    """Named tensors, each fused one as its parts; fused: names within a layer.

    One whose rows are not those of its parts comes as it is, under a name that nobody waits for.
    """
    for name, tensor in tensors:
        module, _, kind = name.rpartition(".")
        found = next((own for own in fused if module.endswith(f".{own}")), None)
        if found is None or sum(fused[found].values()) != tensor.get_shape()[0]:
            yield name, tensor
            continue
        first = 0
        for part, num_rows in fused[found].items():
            of_part = RowsOfTensor(tensor=tensor, first=first, num_rows=num_rows)
            yield f"{module.removesuffix(found)}{part}.{kind}", of_part
            first += num_rows
