"""Queries and keys of checkpoints whose heads pair other elements in a rotation than ours do (rope.HeadLayout)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class ReorderedHeads:
    """A safetensors slice, or a QuantizedTensor, with the rows of every head in another order: read where indexed."""

    tensor: Any
    order: list[int]

    def get_shape(self) -> list[int]:
        return list(self.tensor.get_shape())

    def __getitem__(self, index: Any) -> Any:
        return reordered(self.tensor[...], self.order)[index]


def reordered(rows: torch.Tensor, order: list[int]) -> torch.Tensor:
    """[num_heads * head_dim, ...], those of each head in another order."""
    return rows.view(-1, len(order), *rows.shape[1:])[:, order].reshape(rows.shape)


def order_of(name: str, num_rows: int, orders: Mapping[str, list[int]]) -> list[int] | None:
    """As in_our_order reorders a tensor; None: it stays as it is, or is of another shape and refused later, by name."""
    order = next((own for ending, own in orders.items() if name.endswith(f".{ending}")), None)
    return None if order is None or num_rows == 0 or num_rows % len(order) else order


def in_our_order(tensors: Iterable[tuple[str, Any]], orders: Mapping[str, list[int]]) -> Iterator[tuple[str, Any]]:
    """Named tensors, those of queries and keys with their heads' elements as our rotations pair them.

    orders: of a head, by names within a layer (Architecture.head_orders).
    """
    for name, tensor in tensors:
        order = order_of(name, next(iter(tensor.get_shape()), 0), orders)
        yield name, tensor if order is None else ReorderedHeads(tensor=tensor, order=order)
