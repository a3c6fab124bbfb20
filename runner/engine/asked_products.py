"""What the start asks of products: each as launches compute it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kernels.cpu.panels import Weight
from runner.engine.experts import Experts
from runner.engine.head_linear import HeadLinear
from runner.engine.layers import DecoderLayer, add_output
from runner.engine.mlp import MLP, NoMLP
from runner.engine.mlp_beside_experts import MLPBesideExperts
from runner.engine.norms import RMSNorm
from runner.engine.operations import Rows, linear, whole

# Of an output before it is added to the residual stream, and of the sum, and what scales it.
Norms = tuple[RMSNorm | None, RMSNorm | None, torch.Tensor | None]


@dataclass(frozen=True, kw_only=True)
class AskedProduct:
    multiply: Callable[[torch.Tensor], Rows]  # [num_rows, in_features] -> [num_rows, ...]
    weights: Sequence[Weight]  # in the order in which rows meet them
    is_gated: bool = True  # of two weights the first
    in_features: int | None = None  # of rows; None: of the first weight
    rows_for_one: int = 1  # a weight meets one of so many rows
    of_experts: bool = False  # in tiles as plan_linear has them for experts; heads have such, too
    norms: Norms | None = None  # behind it, which add up what it leaves in parts; None: nothing is added to it

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.multiply(x)
        if self.norms is None:
            return whole(rows)
        residual = x[:, :1].repeat(1, rows.shape[1])  # a row's own
        return torch.cat(add_output(rows, residual, *self.norms), dim=1)


def asked_products(
    layers: Sequence[DecoderLayer], tile: int | None, last_norm: RMSNorm | None = None
) -> list[AskedProduct]:
    """Of layers of each kind that a decoder or a draft head has; last_norm: behind all of a decoder's."""
    # What norms the sum behind a layer is like that of one of these.
    norms = [*([] if last_norm is None else [last_norm]), *(layer.input_norm for layer in layers)]
    next_norms = list({norm is None: norm for norm in norms}.values())
    return [
        asked
        for layer in layers
        for asked in (*_of_mlp(layer, next_norms, tile), *_of_mixer(layer, tile), *_of_input(layer, tile))
    ]


def _of_mlp(layer: DecoderLayer, next_norms: Sequence[RMSNorm | None], tile: int | None) -> list[AskedProduct]:
    mlp = layer.mlp
    if isinstance(mlp, NoMLP):
        return []
    if isinstance(mlp, Experts):
        return _of_experts(mlp, tile)
    if isinstance(mlp, MLPBesideExperts):
        return [_of_dense(mlp.mlp, (mlp.after_mlp, None, None), tile), *_of_experts(mlp.experts, tile)]
    if layer.per_layer_input is not None:
        return [_of_dense(mlp, (layer.after_mlp, None, None), tile)]
    return [_of_dense(mlp, (layer.after_mlp, norm, layer.scale), tile) for norm in next_norms]


def _of_dense(mlp: MLP, norms: Norms, tile: int | None) -> AskedProduct:
    return AskedProduct(
        multiply=partial(mlp, tile=tile), weights=mlp.product_weights, is_gated=mlp.is_gated, norms=norms
    )


def _of_experts(experts: Experts, tile: int | None) -> list[AskedProduct]:
    shared, gate = experts.shared, experts.shared_gate
    asked = [
        AskedProduct(
            multiply=partial(experts, tile=tile),
            weights=experts.product_weights,
            is_gated=experts.is_gated,
            in_features=experts.router.shape[1],
            rows_for_one=experts.rows_for_one,
            of_experts=True,
        ),
        AskedProduct(multiply=partial(experts.router_logits, tile=tile), weights=[experts.router]),
        *(AskedProduct(multiply=partial(own, tile=tile), weights=[own.weight]) for own in experts.latent_projections),
    ]
    if shared is not None:
        asked.append(
            AskedProduct(
                multiply=partial(shared.own_part, tile=tile), weights=shared.product_weights, is_gated=shared.is_gated
            )
        )
    if gate is not None:
        asked.append(AskedProduct(multiply=partial(linear, weight=gate, bias=None, tile=tile), weights=[gate]))
    return asked


def _of_mixer(layer: DecoderLayer, tile: int | None) -> list[AskedProduct]:
    in_parts, last = layer.mixer.products_in_parts, layer.mixer.products[-1:]
    norms = (layer.after_attention, layer.before_mlp, None)
    if isinstance(layer.mlp, NoMLP):
        norms = (layer.after_attention, layer.input_norm, None)
    return [
        *(
            AskedProduct(multiply=partial(_by_heads, own, tile=tile), weights=[own.weight], of_experts=True)
            for own in layer.mixer.head_products
        ),
        *(
            AskedProduct(
                multiply=partial(product.in_parts if product in in_parts else product, tile=tile),
                weights=[product.weight],
                norms=norms if product in last else None,
            )
            for product in layer.mixer.products
        ),
    ]


def _of_input(layer: DecoderLayer, tile: int | None) -> list[AskedProduct]:
    own = layer.per_layer_input
    if own is None:
        return []
    first, last = own.products
    norms = (own.norm, layer.input_norm, layer.scale)
    return [
        AskedProduct(multiply=partial(first, tile=tile), weights=[first.weight]),
        AskedProduct(multiply=partial(last.in_parts, tile=tile), weights=[last.weight], norms=norms),
    ]


def _by_heads(product: HeadLinear, x: torch.Tensor, tile: int | None) -> torch.Tensor:
    """What all heads make of the same row."""
    out = x.new_empty(len(x), product.num_heads, product.weight.shape[0])
    product(x.unsqueeze(1).expand(-1, product.num_heads, -1), out, tile)
    return out.flatten(1)
