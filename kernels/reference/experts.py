"""A mixture of experts: each row goes through the few MLPs that its router picks (Shazeer et al., arXiv 1701.06538).

What a row becomes is a matter of that row alone: which experts it goes to, the products there, and the order in which
their results are added. Rows are sorted by expert, so that an expert's weights are read once for all of its rows; who
else goes to an expert moves rows about and changes no bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.reference.act_and_mul import Activation, act_and_mul
from kernels.reference.linear import linear
from kernels.reference.sampling import softmax


class Routing(NamedTuple):
    """Of num_rows rows, each of which goes to `choices` experts; a place is one of the num_rows * choices goings."""

    weights: Tensor  # [num_rows, choices] float32: what the results of a row's experts are multiplied by
    places: Tensor  # [num_rows, choices] int64: of a row's goings, which are sorted by expert, then by row
    rows: Tensor  # [num_rows * choices] int64: of each place
    starts: Tensor  # [num_experts + 1] int64: the first place of each expert, and how many places there are


Scores = Literal["softmax", "sigmoid"]
ENOUGH = 64.0
LEAST_TOTAL = 1e-20  # added to a sum of scores, which may all be too small for a float32; lost in any other sum


class RoutingRule(NamedTuple):
    """How a router's logits send rows to experts."""

    choices: int  # experts that a row goes to, 1 .. num_experts
    is_normalized: bool  # the weights of a row's experts add up to 1, before they are scaled
    scores: Scores = "softmax"  # over all experts; or each expert's own (DeepSeek-V3, arXiv 2412.19437)
    scale: float = 1.0  # of the weights
    # Experts lie in so many groups, as many in each, and a row goes to those of the best ones alone (DeepSeek-V3).
    num_groups: int = 1
    kept_groups: int = 1  # with the highest sums of their two best scores, and with experts enough


def route(
    logits: Tensor, rule: RoutingRule, corrections: Tensor | None = None, factors: Tensor | None = None
) -> Routing:
    """The experts of each row with the highest scores, the highest first; of equals the one with the lower number.

    Args:
        logits: [num_rows, num_experts] float32.
        corrections: [num_experts] float32, added to the scores that experts are chosen by, not to those that their
            results are weighted by (Wang et al., arXiv 2408.15664): they keep all experts busy in training.
        factors: [num_experts] float32, which the weights of each expert are multiplied by last (Gemma 4).
    """
    scores = softmax(logits) if rule.scores == "softmax" else _sigmoid(logits)
    order = scores if corrections is None else scores + corrections
    if rule.num_groups > 1:
        order = _in_best_groups(order, rule)
    experts = order.sort(dim=1, descending=True, stable=True).indices[:, : rule.choices]
    weights = scores.gather(1, experts)
    if rule.is_normalized:
        total = weights[:, :1]
        for choice in range(1, rule.choices):
            total = total + weights[:, choice : choice + 1]
        weights = weights / (total + LEAST_TOTAL)
    weights = weights * rule.scale
    if factors is not None:
        weights = weights * factors[experts]
    return sort_by_expert(experts, weights.contiguous(), logits.shape[1])


def _in_best_groups(order: Tensor, rule: RoutingRule) -> Tensor:
    """Scores that experts are chosen by [num_rows, num_experts], none chosen in other groups; of equals the first."""
    grouped = order.view(len(order), rule.num_groups, order.shape[1] // rule.num_groups)
    totals = grouped.topk(2, dim=2).values.sum(2)
    kept = totals.sort(dim=1, descending=True, stable=True).indices[:, : rule.kept_groups]
    is_kept = torch.zeros_like(totals, dtype=torch.bool).scatter_(1, kept, True)
    return grouped.masked_fill(~is_kept[:, :, None], float("-inf")).view_as(order)


def _sigmoid(logits: Tensor) -> Tensor:
    """A logit against 0: torch's own sigmoid has other bits where a loop over whole vectors ends.

    Of what is above ENOUGH no float32 is less than 1, and of an infinity softmax makes no number.
    """
    against_zero = torch.stack((logits.clamp(max=ENOUGH), torch.zeros_like(logits)), dim=-1)
    return softmax(against_zero.flatten(0, 1))[:, 0].view_as(logits)


def sort_by_expert(experts: Tensor, weights: Tensor, num_experts: int) -> Routing:
    """Of rows whose experts are chosen: [num_rows, choices] int64; and their weights, float32 and contiguous."""
    in_order, order = experts.flatten().sort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    numbers = torch.arange(num_experts + 1, device=order.device)
    return Routing(
        weights=weights,
        places=places.view(experts.shape),
        rows=order // experts.shape[1],
        starts=torch.searchsorted(in_order, numbers),
    )


def gated_linear_of_experts(
    x: Tensor,
    weights: Sequence[Tensor],
    routing: Routing,
    tile: int | None,
    biases: Tensor | None = None,
    activation: Activation = "silu",
) -> Tensor:
    """activation(x Wg^T + bg) * (x Wu^T + bu) of the expert and the row at each place, [num_places, intermediate].

    Args:
        x: [num_rows, in_features].
        weights: of each expert [2 * intermediate, in_features], gate rows first.
        tile: rows of one product, as kernels/reference/linear.py has them.
        biases: [num_experts, 2 * intermediate].
    """
    of_places = x.index_select(0, routing.rows)
    return act_and_mul(linear_of_experts(of_places, weights, routing, tile, biases), activation)


def linear_of_experts(
    x: Tensor, weights: Sequence[Tensor], routing: Routing, tile: int | None, biases: Tensor | None = None
) -> Tensor:
    """x W^T + b of the expert at each place; x: [num_places, in_features], of the places.

    weights: of each expert [out_features, in_features]; biases: [num_experts, out_features]. Returns
    [num_places, out_features].
    """
    parts = []
    for expert, rows in enumerate(x.split_with_sizes(routing.starts.diff().tolist())):
        padded, bias = F.pad(rows, (0, 0, 0, -len(rows) % (tile or 1))), None if biases is None else biases[expert]
        if len(rows) > 0:
            parts.append(linear(padded, weights[expert], bias, tile)[: len(rows)])
    return torch.cat(parts) if parts else x.new_empty(0, weights[0].shape[0])


def sum_of_experts(results: Tensor, routing: Routing, shared: Tensor | None = None) -> Tensor:
    """The results [num_places, width] of each row's experts times their weights, [num_rows, width].

    ((w0 y0) + w1 y1) + ..., in the order of the row's choices, in float32, each product rounded; the sum is rounded
    once, to the dtype of the results. shared [num_rows, width], of an expert that all rows go to, is added last.
    """
    own = [
        results.index_select(0, places).float() * weights.unsqueeze(1)
        for places, weights in zip(routing.places.unbind(1), routing.weights.unbind(1), strict=True)
    ]
    if shared is not None:
        own.append(shared.float())
    return reduce(torch.add, own).to(results.dtype)
