"""Queries and keys of checkpoints whose heads pair other elements in a rotation than ours do (rope.HeadLayout)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from runner.engine.rope import HeadLayout

REORDERED = tuple(
    f"self_attn.{name}"
    for name in ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias", "q_norm.weight", "k_norm.weight")
)


@dataclass(frozen=True, kw_only=True)
class ReorderedHeads:
    """A safetensors slice, or a QuantizedTensor, with the rows of every head in another order: read where indexed."""

    tensor: Any
    order: list[int]

    def get_shape(self) -> list[int]:
        return list(self.tensor.get_shape())

    def __getitem__(self, index: Any) -> Any:
        whole = self.tensor[...]
        heads = whole.view(-1, len(self.order), *whole.shape[1:])
        return heads[:, self.order].reshape(whole.shape)[index]


def in_our_order(tensors: Iterable[tuple[str, Any]], layout: HeadLayout) -> Iterator[tuple[str, Any]]:
    """Named tensors, those of queries and keys with their heads' elements as our rotations pair them."""
    order = layout.order
    for name, tensor in tensors:
        # One of another shape is refused later, by its name.
        is_ours = order is not None and name.endswith(REORDERED) and tensor.get_shape()[0] % layout.head_dim == 0
        yield name, ReorderedHeads(tensor=tensor, order=order) if is_ours and order is not None else tensor
