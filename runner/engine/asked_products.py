"""What the start asks of products: each as launches compute it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kernels.cpu.panels import Weight
from runner.engine.experts import Experts
from runner.engine.layers import DecoderLayer
from runner.engine.mlp import MLP
from runner.engine.operations import Rows, linear, whole


@dataclass(frozen=True, kw_only=True)
class AskedProduct:
    multiply: Callable[[torch.Tensor], Rows]  # [num_rows, in_features of the first weight] -> [num_rows, ...]
    weights: Sequence[Weight]  # in the order in which rows meet them; of two the first is gated
    rows_for_one: int = 1  # a weight meets one of so many rows

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return whole(self.multiply(x))


def asked_products(layers: Sequence[DecoderLayer], tile: int | None) -> list[AskedProduct]:
    """Of layers of each kind that a decoder or a draft head has."""
    return [asked for layer in layers for asked in (*_of_mlp(layer.mlp, tile), *_of_mixer(layer, tile))]


def _of_mlp(mlp: MLP | Experts, tile: int | None) -> list[AskedProduct]:
    own = AskedProduct(multiply=partial(mlp, tile=tile), weights=mlp.product_weights, rows_for_one=mlp.rows_for_one)
    if isinstance(mlp, MLP):
        return [own]
    shared, gate = mlp.shared, mlp.shared_gate
    asked = [own, AskedProduct(multiply=partial(mlp.router_logits, tile=tile), weights=[mlp.router])]
    if shared is not None:
        asked.append(AskedProduct(multiply=partial(shared.own_part, tile=tile), weights=shared.product_weights))
    if gate is not None:
        asked.append(AskedProduct(multiply=partial(linear, weight=gate, bias=None, tile=tile), weights=[gate]))
    return asked


def _of_mixer(layer: DecoderLayer, tile: int | None) -> list[AskedProduct]:
    in_parts = layer.mixer.products_in_parts
    return [
        AskedProduct(
            multiply=partial(product.in_parts if product in in_parts else product, tile=tile), weights=[product.weight]
        )
        for product in layer.mixer.products
    ]
