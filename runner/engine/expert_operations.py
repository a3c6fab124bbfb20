"""The operations of a mixture of experts: kernels where there are some, else their references."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from kernels.cpu.panels import Panels, Weight, unpack, unpacked
from kernels.reference import experts as in_torch
from kernels.reference.act_and_mul import Activation
from kernels.reference.experts import Routing, RoutingRule
from kernels.reference.linear import linear as linear_in_tiles
from runner.engine.backend import is_compiled, runs_kernels
from runner.engine.operations import head_logits, take_rows

if TYPE_CHECKING:
    from kernels.cpu.experts_linear import PanelsOfExperts
    from kernels.experts_linear import ExpertsInMemory


def router_logits(
    rows: torch.Tensor, router: Weight, tile: int | None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[num_rows, hidden] x [num_experts, hidden] -> [num_rows, num_experts] float32, whose products nothing rounds.

    The router may be float32 beside rows of 16 bits. bias: [num_experts].
    """
    if isinstance(router, Panels) or runs_kernels(rows):
        return head_logits(rows if rows.dtype == router.dtype else _widened(rows), router, tile or 1, bias=bias)
    return linear_in_tiles(rows.float(), unpack(router).float(), None if bias is None else bias.float(), tile)


def _widened(rows: torch.Tensor) -> torch.Tensor:
    if not is_compiled(rows):
        return rows.float()
    from kernels.cpu.rows import widened

    return widened(rows)


def route(
    logits: torch.Tensor,
    rule: RoutingRule,
    corrections: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> Routing:
    """Which experts each row goes to; logits: [num_rows, num_experts] float32, the others: [num_experts] float32."""
    if is_compiled(logits):
        from kernels.cpu.experts import route as on_cpu

        return on_cpu(logits, rule, corrections, factors)
    if not runs_kernels(logits):
        return in_torch.route(logits, rule, corrections, factors)
    from kernels.experts import route as kernel

    return kernel(logits, rule, corrections, factors)


def sort_by_expert(chosen: torch.Tensor, weights: torch.Tensor, num_experts: int) -> Routing:
    """Of rows whose experts are chosen, [num_rows, choices] int64, with their weights, float32."""
    if is_compiled(weights):
        from kernels.cpu.experts import sort_by_expert as on_cpu

        return on_cpu(chosen.contiguous(), weights.contiguous(), num_experts)
    if not runs_kernels(weights):
        return in_torch.sort_by_expert(chosen, weights.contiguous(), num_experts)
    from kernels.experts import sort_by_expert as kernel

    return kernel(chosen.contiguous(), weights.contiguous(), num_experts)


class ExpertWeights(tuple[Weight, ...]):
    """The weights of one product, of each expert; what kernels ask of all of them is found once."""

    @cached_property
    def panels(self) -> PanelsOfExperts | None:
        """All of them, where they are panels."""
        panels = [weight for weight in self if isinstance(weight, Panels)]
        if not panels:
            return None
        from kernels.cpu.experts_linear import PanelsOfExperts

        return PanelsOfExperts(panels)

    @cached_property
    def whole(self) -> torch.Tensor:
        """[num_experts * out_features, in_features], of dense weights that lie one behind another."""
        first = unpacked(self[0])
        assert all(unpacked(own).data_ptr() == first.data_ptr() + at * first.nbytes for at, own in enumerate(self))
        return first.as_strided((len(self) * len(first), first.shape[1]), (first.shape[1], 1))

    @cached_property
    def in_memory(self) -> ExpertsInMemory:
        """Of a GPU."""
        from kernels.experts_linear import ExpertsInMemory

        return ExpertsInMemory.of([weight for weight in self if not isinstance(weight, Panels)])


def gated_linear_of_experts(
    x: torch.Tensor,
    weights: ExpertWeights,
    routing: Routing,
    tile: int | None,
    biases: torch.Tensor | None = None,
    activation: Activation = "silu",
) -> torch.Tensor:
    """[num_rows, in_features] and of each expert [2 * intermediate, in_features] -> [num_places, intermediate].

    biases: [num_experts, 2 * intermediate].
    """
    if weights.panels is not None:
        from kernels.cpu.experts_linear import gated_linear_of_experts as on_cpu

        return on_cpu(x, weights.panels, routing, biases, activation)
    if not runs_kernels(x):
        return in_torch.gated_linear_of_experts(x, list(map(unpack, weights)), routing, tile, biases, activation)
    from kernels.experts_linear import gated_linear_of_experts as kernel

    return kernel(x, weights.in_memory, routing, biases, activation)


def linear_of_experts(
    x: torch.Tensor,
    weights: ExpertWeights,
    routing: Routing,
    tile: int | None,
    biases: torch.Tensor | None = None,
    *,
    of_rows: bool = False,
) -> torch.Tensor:
    """[num_places, in_features] and of each expert [out_features, in_features] -> [num_places, out_features].

    Args:
        biases: [num_experts, out_features].
        of_rows: x is [num_rows, in_features], and a place has the row that routing gives it.
    """
    if of_rows and (weights.panels is not None or not runs_kernels(x)):
        x = take_rows(x, routing.rows)
    if weights.panels is not None:
        from kernels.cpu.experts_linear import linear_of_experts as on_cpu

        return on_cpu(x, weights.panels, routing, biases)
    if not runs_kernels(x):
        return in_torch.linear_of_experts(x, list(map(unpack, weights)), routing, tile, biases)
    from kernels.experts_linear import linear_of_experts as kernel

    return kernel(x, weights.in_memory, routing, biases, of_rows=of_rows)


def sum_of_experts(results: torch.Tensor, routing: Routing, shared: torch.Tensor | None = None) -> torch.Tensor:
    """[num_places, width] -> [num_rows, width], each result times its weight; and shared, [num_rows, width]."""
    if is_compiled(results):
        from kernels.cpu.experts import sum_of_experts as on_cpu

        return on_cpu(results, routing, shared)
    if not runs_kernels(results):
        return in_torch.sum_of_experts(results, routing, shared)
    from kernels.experts import sum_of_experts as kernel

    return kernel(results, routing, shared)
