"""What the start asks of products: each as launches compute it, with the halves of norms that ride in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kernels.cpu.panels import Weight
from runner.engine.experts import Experts
from runner.engine.layers import DecoderLayer, are_between_norms
from runner.engine.linear import ColumnParallelLinear, RowParallelLinear
from runner.engine.mlp import MLP
from runner.engine.norms import RMSNorm
from runner.engine.operations import can_leave_norms, linear


@dataclass(frozen=True, kw_only=True)
class AskedProduct:
    compute: Callable[[torch.Tensor], torch.Tensor]  # [num_rows, in_features of the first weight] -> [num_rows, ...]
    weights: Sequence[Weight]  # in the order in which rows meet them; of two the first is gated
    rows_for_one: int = 1  # a weight meets one of so many rows


def asked_products(
    layers: Sequence[DecoderLayer], like: torch.Tensor, tile: int | None, *, of_decoder: bool = True
) -> list[AskedProduct]:
    """Of layers of each kind that a decoder has, or of a draft head's; like: of the rows' dtype, where they are."""
    can_leave = can_leave_norms(like, tile)
    is_between_norms = of_decoder and can_leave and are_between_norms(layers)
    return [
        asked
        for layer in layers
        for asked in (
            *_of_mlp(layer, tile, can_leave and layer.leaves_norm, is_between_norms),
            *_of_mixer(layer, tile, can_leave and layer.leaves_norm, is_between_norms),
        )
    ]


def _of_mlp(layer: DecoderLayer, tile: int | None, leaves_norm: bool, is_between_norms: bool) -> list[AskedProduct]:
    mlp = layer.mlp
    if isinstance(mlp, Experts):
        shared = [] if mlp.shared is None else [_plain_mlp(mlp.shared, tile)]
        gates = [] if mlp.shared_gate is None else [mlp.shared_gate]
        return [
            AskedProduct(compute=partial(mlp, tile=tile), weights=mlp.product_weights, rows_for_one=mlp.rows_for_one),
            *shared,
            AskedProduct(compute=partial(mlp.router_logits, tile=tile), weights=[mlp.router]),
            *(AskedProduct(compute=partial(linear, weight=w, bias=None, tile=tile), weights=[w]) for w in gates),
        ]
    norm = layer.before_mlp
    if not leaves_norm or norm is None:
        return [_plain_mlp(mlp, tile)]

    def compute(x: torch.Tensor) -> torch.Tensor:
        inner = mlp.inner(norm.weigh(x), tile)
        return _added(norm, mlp.down_proj, inner, x) if is_between_norms else mlp.down_proj(inner, tile)

    return [AskedProduct(compute=compute, weights=mlp.product_weights)]


def _plain_mlp(mlp: MLP, tile: int | None) -> AskedProduct:
    return AskedProduct(compute=partial(mlp, tile=tile), weights=mlp.product_weights)


def _of_mixer(layer: DecoderLayer, tile: int | None, leaves_norm: bool, is_between_norms: bool) -> list[AskedProduct]:
    *before, last = layer.mixer.products
    first, behind = layer.input_norm if is_between_norms else None, layer.before_mlp if leaves_norm else None

    def compute_last(x: torch.Tensor) -> torch.Tensor:
        if behind is None:
            return last(x, tile)
        assert isinstance(last, RowParallelLinear)
        return _added(behind, last, x, x[:, :1].repeat(1, len(behind.weight)))

    def compute(product: ColumnParallelLinear | RowParallelLinear, x: torch.Tensor) -> torch.Tensor:
        if first is None:
            return product(x, tile)
        assert isinstance(product, ColumnParallelLinear)
        return product(first.weigh(x), tile)

    return [
        *(AskedProduct(compute=partial(compute, product), weights=[product.weight]) for product in before),
        AskedProduct(compute=compute_last, weights=[last.weight]),
    ]


def _added(norm: RMSNorm, product: RowParallelLinear, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """All that a product leaves to the next one, side by side."""
    weighed, total = norm.add_product(product, x, residual)
    return torch.cat([total.float(), weighed.rows.float(), weighed.squares], dim=1)
