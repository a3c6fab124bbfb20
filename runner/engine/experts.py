"""A mixture of experts in place of a layer's MLP: Mixtral, Qwen3-MoE, gpt-oss, GLM-4.5.

Every rank has a part of every expert, as of an MLP, and the whole router: all of them send a row to the same experts.
Some families have an MLP beside the experts, which all rows go to: shared experts (DeepSeekMoE, arXiv 2401.06066).
Nemotron 3 Super's experts read a latent of a row, and what they leave together is projected back (LatentMoE, arXiv
2604.12374); router and shared experts read the row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kernels.cpu.panels import Change, Weight, unpacked
from kernels.quantized_weight import QuantizedWeight
from kernels.reference.act_and_mul import Activation
from kernels.reference.experts import Routing, RoutingRule
from runner.engine.expert_operations import (
    ExpertWeights,
    gated_linear_of_experts,
    linear_of_experts,
    route,
    router_logits,
    sum_of_experts,
)
from runner.engine.expert_shapes import ExpertShapes
from runner.engine.linear import (
    ColumnParallelLinear,
    WeightTarget,
    empty_weight,
    shared_storage,
    split_inputs,
    weight_target,
)
from runner.engine.mlp import MLP
from runner.engine.operations import add, gate, linear
from runner.engine.quantization import Quantization
from runner.engine.shard import Shard

# The sigmoid of the highest logit. Which that is routing finds by another rule: far from 0 sigmoids are equal.
SCORE_OF_ONE = RoutingRule(choices=1, is_normalized=False, scores="sigmoid")


class Experts:
    def __init__(
        self,
        shapes: ExpertShapes,
        hidden_size: int,
        shard: Shard,
        dtype: torch.dtype,
        *,
        activation: Activation,
        shared_activation: Activation,
        quantization: Quantization | None = None,  # of their products, by names within the layer
    ) -> None:
        self.shapes, self.shard, self._activation = shapes, shard, activation
        self.activations = (activation, shared_activation)  # as MLP's
        router_dtype = torch.float32 if shapes.is_router_float32 else dtype
        self.router: Weight = torch.empty(shapes.num_experts, hidden_size, dtype=router_dtype)
        # Added to scores, which are float32, and what scores are multiplied by.
        self.corrections, self.factors = (
            None if name is None else torch.empty(shapes.num_experts)
            for name in (shapes.corrections_name, shapes.factors_name)
        )
        names = [shapes.names_of(expert) for expert in range(shapes.num_experts)]
        gated_names = [name for *inner, _ in names for name in inner]
        down_names = [down for *_, down in names]
        self._num_inner = len(names[0]) - 1  # products side by side: gate and up, or up alone
        gated_storage = shared_storage(gated_names, quantization)
        down_storage = shared_storage(down_names, quantization)
        self._num_parts = shard.split(shapes.intermediate_size, gated_names[0])
        columns, down_held = split_inputs(shapes.intermediate_size, down_names[0], down_storage, shard)
        inner, width = self._num_inner * self._num_parts, shapes.latent_size or hidden_size
        gated = empty_weight(shapes.num_experts * inner, width, dtype, gated_storage)
        down = empty_weight(shapes.num_experts * width, columns, dtype, down_held)
        # Of each expert. Kernels of a GPU find one behind another in one piece of memory.
        self.gate_up_projs, self.down_projs = (
            ExpertWeights(split_rows(weight, shapes.num_experts)) for weight in (gated, down)
        )
        self._router_bias, self._gate_up_biases, self._down_biases = (
            torch.empty(size, dtype=dtype) if shapes.mixture.has_biases else None
            for size in (
                (shapes.num_experts,),
                (shapes.num_experts, inner),
                (shapes.num_experts, width),
            )
        )
        # Whole in every rank, as the router is: to what experts read, and from what they leave.
        self.latent_projections = (
            []
            if shapes.latent_size is None
            else [
                ColumnParallelLinear(
                    inputs, {name: outputs}, bias=False, shard=Shard(), dtype=dtype, quantization=quantization
                )
                for name, inputs, outputs in zip(
                    shapes.latent_names, (hidden_size, width), (width, hidden_size), strict=True
                )
            ]
        )
        self.shared = (  # beside the experts
            MLP(
                hidden_size,
                shapes.shared_size,
                shard,
                dtype,
                name=shapes.shared_name,
                bias=False,
                is_gated=self.is_gated,
                activation=shared_activation,
                quantization=quantization,
            )
            if shapes.shared_size
            else None
        )

        # Whole in every rank, as the router is.
        has_gate = self.shared is not None and shapes.shared_gate_name is not None
        self.shared_gate: Weight | None = torch.empty(1, hidden_size, dtype=dtype) if has_gate else None

    def __call__(self, hidden: torch.Tensor, tile: int | None, routed: torch.Tensor | None = None) -> torch.Tensor:
        return self.shard.sum(self.own_part(hidden, tile, routed))

    def own_part(self, hidden: torch.Tensor, tile: int | None, routed: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's part of the result [num_rows, hidden], num_rows a multiple of tile.

        routed: what the router reads [num_rows, hidden]; None: what experts read.
        """
        logits = self.router_logits(hidden if routed is None else routed, tile)
        shared = self._shared_part(hidden, tile)
        if self.shapes.mixture.scales_inputs:
            hidden = gate(hidden, route(logits, SCORE_OF_ONE).weights, "identity")
        routing = route(logits, self.shapes.rule, self.corrections, self.factors)
        down_biases = self._down_biases if self.shard.rank == 0 else None  # which are added once
        if not self.latent_projections:
            results = linear_of_experts(self._inner(hidden, routing, tile), self.down_projs, routing, tile, down_biases)
            return sum_of_experts(results, routing, shared)
        to_latent, from_latent = self.latent_projections
        inner = self._inner(to_latent(hidden, tile), routing, tile)
        results = linear_of_experts(inner, self.down_projs, routing, tile, down_biases)
        part = from_latent(sum_of_experts(results, routing), tile)
        return part if shared is None else add(part, shared)

    def _inner(self, hidden: torch.Tensor, routing: Routing, tile: int | None) -> torch.Tensor:
        """What is multiplied by the down projections [num_places, intermediate]."""
        if self.is_gated:
            return gated_linear_of_experts(
                hidden, self.gate_up_projs, routing, tile, self._gate_up_biases, self._activation
            )
        up = linear_of_experts(hidden, self.gate_up_projs, routing, tile, self._gate_up_biases, of_rows=True)
        return gate(up, up, "relu")

    def _shared_part(self, hidden: torch.Tensor, tile: int | None) -> torch.Tensor | None:
        if self.shared is None:
            return None
        part = self.shared.own_part(hidden, tile)
        if self.shared_gate is None:
            return part
        return gate(part, linear(hidden, self.shared_gate, None, tile), "sigmoid")

    def router_logits(self, hidden: torch.Tensor, tile: int | None) -> torch.Tensor:
        """[num_rows, num_experts] float32."""
        return router_logits(hidden, self.router, tile, self._router_bias)

    @property
    def is_gated(self) -> bool:
        """As MLP.is_gated, of each expert."""
        return self._num_inner == 2

    @property
    def rows_for_one(self) -> int:
        """Of a launch, of which an expert has one on average."""
        return -(-self.shapes.num_experts // self.shapes.rule.choices)

    @property
    def products_per_row(self) -> int:
        own = self.gate_up_projs[0].shape.numel() + self.down_projs[0].shape.numel()
        shared = 0 if self.shared is None else self.shared.products_per_row
        of_latent = sum(product.weight.shape.numel() for product in self.latent_projections)
        return self.router.shape.numel() + self.shapes.rule.choices * own + shared + of_latent

    @property
    def product_weights(self) -> list[Weight]:
        """Of one expert, which are shaped like those of all."""
        return [self.gate_up_projs[0], self.down_projs[0]]

    @property
    def product_names(self) -> list[str]:
        names = [name for expert in range(self.shapes.num_experts) for name in self.shapes.names_of(expert)]
        names += [name for product in self.latent_projections for name in product.part_rows]
        return [*names, *([] if self.shared is None else self.shared.product_names)]

    def convert(self, change: Change) -> None:
        """As Decoder.convert; but the router stays dense, whose scores are a rounding apart, and so does the gate."""
        router = change(self.router)
        self.router = self.router if isinstance(router, QuantizedWeight) else router
        if self.shared_gate is not None:
            gate = change(self.shared_gate)
            self.shared_gate = self.shared_gate if isinstance(gate, QuantizedWeight) else gate
        self.gate_up_projs, self.down_projs = (
            converted(weights, change) for weights in (self.gate_up_projs, self.down_projs)
        )
        for part in (*self.latent_projections, self.shared):
            if part is not None:
                part.convert(change)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        targets = {f"{prefix}{self.shapes.router_name}.weight": WeightTarget(view=unpacked(self.router))}
        num_parts = self._num_parts
        for expert, (gate_up, down) in enumerate(zip(self.gate_up_projs, self.down_projs, strict=True)):
            *inner_names, down_name = self.shapes.names_of(expert)
            for at, name in enumerate(inner_names):
                rows = slice(at * num_parts, (at + 1) * num_parts)
                targets[f"{prefix}{name}.weight"] = weight_target(gate_up, rows, 0)
            targets[f"{prefix}{down_name}.weight"] = weight_target(down, slice(None), 1)
        if self.corrections is not None:
            view = self.corrections.unsqueeze(0) if self.shapes.mixture.corrections_have_rows else self.corrections
            targets[f"{prefix}{self.shapes.corrections_name}"] = WeightTarget(view=view)
        if self.factors is not None:
            targets[f"{prefix}{self.shapes.factors_name}"] = WeightTarget(view=self.factors)
        for part in (*self.latent_projections, self.shared):
            targets |= {} if part is None else part.weight_targets(prefix)
        if self.shared_gate is not None:
            targets[f"{prefix}{self.shapes.shared_gate_name}"] = WeightTarget(view=unpacked(self.shared_gate))
        if self._router_bias is not None and self._gate_up_biases is not None and self._down_biases is not None:
            targets[f"{prefix}{self.shapes.router_name}.bias"] = WeightTarget(view=self._router_bias)
            gates, ups = self._gate_up_biases.split_with_sizes((num_parts, num_parts), dim=1)
            parts = ((gates, 1), (ups, 1), (self._down_biases, None))
            for name, (view, dim) in zip(self.shapes.mixture.projections, parts, strict=True):
                targets[f"{prefix}{self.shapes.prefix}{name}.bias"] = WeightTarget(view=view, shard_dim=dim)
        return targets


def converted(weights: ExpertWeights, change: Change) -> ExpertWeights:
    """As Decoder.convert; the same object where nothing changes: steps that other engines recorded read from it."""
    changed = [change(weight) for weight in weights]
    if all(new is old for new, old in zip(changed, weights, strict=True)):
        return weights
    return ExpertWeights(in_one_piece(changed))


def in_one_piece(weights: list[Weight]) -> list[Weight]:
    """Weights that were quantized each by itself, one behind another in memory; others as they are."""
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if not quantized:
        return weights
    whole: dict[str, Any] = {name: torch.cat([own.tensors[name] for own in quantized]) for name in quantized[0].tensors}
    return split_rows(replace(quantized[0], **whole), len(weights))


def split_rows(weight: Weight, num_parts: int) -> list[Weight]:
    """Views of a weight's rows, as many in each."""
    if not isinstance(weight, QuantizedWeight):
        return list(unpacked(weight).chunk(num_parts))
    size = len(weight.numbers) // num_parts
    return [weight.rows(slice(start, start + size)) for start in range(0, size * num_parts, size)]
