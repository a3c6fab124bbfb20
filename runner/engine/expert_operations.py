"""The operations of a mixture of experts: kernels where there are some, else their references."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.cpu.panels import Panels, Weight, unpack
from kernels.quantized_weight import QuantizedWeight
from kernels.reference import experts as in_torch
from kernels.reference.experts import Routing
from runner.engine.backend import is_compiled, runs_kernels


def route(logits: torch.Tensor, choices: int, *, is_normalized: bool) -> Routing:
    """Which experts each row goes to; logits: [num_rows, num_experts] float32."""
    if is_compiled(logits):
        from kernels.cpu.experts import route as on_cpu

        return on_cpu(logits, choices, is_normalized=is_normalized)
    if not runs_kernels(logits):
        return in_torch.route(logits, choices, is_normalized=is_normalized)
    from kernels.experts import route as kernel

    return kernel(logits, choices, is_normalized=is_normalized)


def gated_linear_of_experts(
    x: torch.Tensor, weights: Sequence[Weight], routing: Routing, tile: int | None
) -> torch.Tensor:
    """[num_rows, in_features] and of each expert [2 * intermediate, in_features] -> [num_places, intermediate]."""
    if panels := _panels(weights):
        from kernels.cpu.experts_linear import gated_linear_of_experts as on_cpu

        return on_cpu(x, panels, routing)
    if not runs_kernels(x):
        return in_torch.gated_linear_of_experts(x, list(map(unpack, weights)), routing, tile)
    from kernels.experts_linear import gated_linear_of_experts as kernel

    return kernel(x, _no_panels(weights), routing)


def linear_of_experts(x: torch.Tensor, weights: Sequence[Weight], routing: Routing, tile: int | None) -> torch.Tensor:
    """[num_places, in_features] and of each expert [out_features, in_features] -> [num_places, out_features]."""
    if panels := _panels(weights):
        from kernels.cpu.experts_linear import linear_of_experts as on_cpu

        return on_cpu(x, panels, routing)
    if not runs_kernels(x):
        return in_torch.linear_of_experts(x, list(map(unpack, weights)), routing, tile)
    from kernels.experts_linear import linear_of_experts as kernel

    return kernel(x, _no_panels(weights), routing)


def sum_of_experts(results: torch.Tensor, routing: Routing) -> torch.Tensor:
    """[num_places, width] -> [num_rows, width], each result times its weight."""
    if is_compiled(results):
        from kernels.cpu.experts import sum_of_experts as on_cpu

        return on_cpu(results, routing)
    if not runs_kernels(results):
        return in_torch.sum_of_experts(results, routing)
    from kernels.experts import sum_of_experts as kernel

    return kernel(results, routing)


def _panels(weights: Sequence[Weight]) -> list[Panels]:
    """All of the weights, or none of them."""
    return [weight for weight in weights if isinstance(weight, Panels)]


def _no_panels(weights: Sequence[Weight]) -> list[torch.Tensor | QuantizedWeight]:
    return [weight for weight in weights if not isinstance(weight, Panels)]
