"""kernels/reference/experts.py but for its products (kernels/experts_linear.py): routing in two launches, sums in one.

Nothing is read back and every shape follows from the arguments' shapes. Among a row's experts the order is that of
their scores as they come out here: of two that are a rounding apart the reference may take the other.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import await_input, can_overlap
from kernels.kernel import Kernel
from kernels.reference.experts import LEAST_TOTAL, Routing, RoutingRule
from kernels.sizes import cdiv, next_power_of_2

CHUNK = 1024  # goings that a program looks at together
BLOCK = 1024  # columns of a sum's program
LEAST: tl.constexpr = tl.constexpr(LEAST_TOTAL)


@Kernel
@triton.jit
def choose_kernel(
    weights_ptr,  # [num_rows, NUM_CHOICES] float32
    experts_ptr,  # [num_rows, NUM_CHOICES] int32
    logits_ptr,  # [num_rows, NUM_EXPERTS] float32
    corrections_ptr,  # [NUM_EXPERTS] float32; None: there are none
    factors_ptr,  # [NUM_EXPERTS] float32; None: there are none
    scale,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,  # >= NUM_EXPERTS
    NUM_CHOICES: tl.constexpr,
    CHOICES: tl.constexpr,  # >= NUM_CHOICES
    IS_SOFTMAX: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    NUM_GROUPS: tl.constexpr,  # of experts, as many in each
    GROUPS: tl.constexpr,  # >= NUM_GROUPS
    KEPT_GROUPS: tl.constexpr,
    OVERLAPS: tl.constexpr,  # with the launch before
):
    row = tl.program_id(0).to(tl.int64)
    numbers, choices = tl.arange(0, EXPERTS), tl.arange(0, CHOICES)
    is_expert = numbers < NUM_EXPERTS
    if OVERLAPS:
        await_input()
    logits = tl.load(logits_ptr + row * NUM_EXPERTS + numbers, mask=is_expert, other=-float("inf"))
    if IS_SOFTMAX:
        powers = tl.exp(logits - tl.max(logits, axis=0))
        scores = tl.div_rn(powers, tl.sum(powers, axis=0))
    else:
        scores = tl.div_rn(1.0, 1.0 + tl.exp(-logits))
    order = scores
    if corrections_ptr is not None:
        order += tl.load(corrections_ptr + numbers, mask=is_expert, other=0.0)
    # A row that is not a number goes to as many experts as any other: none is found twice, and none behind the last.
    left = tl.where(is_expert, tl.where(order == order, order, float("inf")), -float("inf"))
    if NUM_GROUPS > 1:
        groups, group_of = tl.arange(0, GROUPS), numbers // (NUM_EXPERTS // NUM_GROUPS)
        totals = tl.full((GROUPS,), -float("inf"), tl.float32)
        for group in range(NUM_GROUPS):
            own = tl.where(group_of == group, left, -float("inf"))
            best = tl.max(own, axis=0)
            first = tl.min(tl.where(own == best, numbers, EXPERTS), axis=0)
            total_of_group = best + tl.max(tl.where(numbers == first, -float("inf"), own), axis=0)
            totals = tl.where(groups == group, total_of_group, totals)
        is_kept = numbers < 0
        for _ in range(KEPT_GROUPS):
            group = tl.min(tl.where(totals == tl.max(totals, axis=0), groups, GROUPS), axis=0)
            totals = tl.where(groups == group, -float("inf"), totals)
            is_kept = is_kept | (group_of == group)
        left = tl.where(is_kept, left, -float("inf"))
    weights = tl.zeros((CHOICES,), dtype=tl.float32)
    experts = tl.zeros((CHOICES,), dtype=tl.int32)
    total = tl.zeros((), dtype=tl.float32)
    for choice in range(NUM_CHOICES):
        expert = tl.min(tl.where(left == tl.max(left, axis=0), numbers, EXPERTS), axis=0)
        weight = tl.sum(tl.where(numbers == expert, scores, 0.0), axis=0)
        left = tl.where(numbers == expert, -float("inf"), left)
        weights = tl.where(choices == choice, weight, weights)
        experts = tl.where(choices == choice, expert, experts)
        total += weight
    if IS_NORMALIZED:
        weights = tl.div_rn(weights, total + LEAST)
    weights *= scale
    is_choice = choices < NUM_CHOICES
    if factors_ptr is not None:
        weights *= tl.load(factors_ptr + experts, mask=is_choice, other=0.0)
    tl.store(weights_ptr + row * NUM_CHOICES + choices, weights, mask=is_choice)
    tl.store(experts_ptr + row * NUM_CHOICES + choices, experts, mask=is_choice)


# A program for each expert. Not specialized on num_places, which would make other programs for multiples of 16.
@Kernel
@triton.jit(do_not_specialize=["num_places"])
def place_kernel(
    places_ptr,  # [num_places] int64, of each going in the order of the rows
    rows_ptr,  # [num_places] int64
    starts_ptr,  # [experts + 1] int64
    experts_ptr,  # [num_places] int32 or int64, of each going in the order of the rows
    num_places,
    NUM_CHOICES: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAPS: tl.constexpr,  # with the launch before
):
    expert = tl.program_id(0)
    goings = tl.arange(0, CHUNK)
    if OVERLAPS:
        await_input()
    num_before = tl.zeros((CHUNK,), dtype=tl.int32)
    for start in range(0, num_places, CHUNK):
        experts = tl.load(experts_ptr + start + goings, mask=start + goings < num_places, other=expert)
        num_before += (experts < expert).to(tl.int32)
    place = tl.sum(num_before, axis=0)
    tl.store(starts_ptr + expert, place.to(tl.int64))
    for start in range(0, num_places, CHUNK):
        experts = tl.load(experts_ptr + start + goings, mask=start + goings < num_places, other=-1)
        is_own = experts == expert
        places = place + tl.cumsum(is_own.to(tl.int32), axis=0) - 1
        tl.store(places_ptr + start + goings, places.to(tl.int64), mask=is_own)
        tl.store(rows_ptr + places, ((start + goings) // NUM_CHOICES).to(tl.int64), mask=is_own)
        place += tl.sum(is_own.to(tl.int32), axis=0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts_ptr + expert + 1, place.to(tl.int64))


@Kernel
@triton.jit
def sum_of_experts_kernel(
    out_ptr,  # [num_rows, width]
    results_ptr,  # [num_places, width]
    weights_ptr,  # [num_rows, NUM_CHOICES] float32
    places_ptr,  # [num_rows, NUM_CHOICES] int64
    shared_ptr,  # [num_rows, width]; None: there is none
    width,
    NUM_CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,  # with the launch before
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < width
    if OVERLAPS:
        await_input()
    own = row * NUM_CHOICES
    first = tl.load(results_ptr + tl.load(places_ptr + own) * width + columns, mask=is_column, other=0.0)
    total = first.to(tl.float32) * tl.load(weights_ptr + own)
    for choice in tl.static_range(1, NUM_CHOICES):
        place, weight = tl.load(places_ptr + own + choice), tl.load(weights_ptr + own + choice)
        result = tl.load(results_ptr + place * width + columns, mask=is_column, other=0.0)
        total += result.to(tl.float32) * weight
    if shared_ptr is not None:
        total += tl.load(shared_ptr + row * width + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + columns, total.to(first.dtype), mask=is_column)


def route(
    logits: Tensor,  # [num_rows, num_experts] float32, contiguous
    rule: RoutingRule,
    corrections: Tensor | None = None,  # [num_experts] float32
    factors: Tensor | None = None,  # [num_experts] float32
) -> Routing:
    """What kernels.reference.experts.route says."""
    (num_rows, num_experts), choices = logits.shape, rule.choices
    assert logits.is_contiguous() and logits.dtype == torch.float32 and 1 <= choices <= num_experts
    assert num_experts % rule.num_groups == 0
    device, overlaps = logits.device, can_overlap(logits.device)
    weights = torch.empty(num_rows, choices, device=device)
    experts = torch.empty(num_rows, choices, dtype=torch.int32, device=device)
    if num_rows:
        choose_kernel[(num_rows,)](
            weights,
            experts,
            logits,
            corrections,
            factors,
            rule.scale,
            NUM_EXPERTS=num_experts,
            EXPERTS=next_power_of_2(num_experts),
            NUM_CHOICES=choices,
            CHOICES=next_power_of_2(choices),
            IS_SOFTMAX=rule.scores == "softmax",
            IS_NORMALIZED=rule.is_normalized,
            NUM_GROUPS=rule.num_groups,
            GROUPS=next_power_of_2(rule.num_groups),
            KEPT_GROUPS=rule.kept_groups,
            OVERLAPS=overlaps,
            num_warps=1,
            launch_pdl=overlaps,
        )
    return sort_by_expert(experts, weights, num_experts)


def sort_by_expert(
    experts: Tensor,  # [num_rows, choices] int32 or int64, contiguous
    weights: Tensor,  # [num_rows, choices] float32, contiguous
    num_experts: int,
) -> Routing:
    """What kernels.reference.experts.sort_by_expert says."""
    (num_rows, choices), device, overlaps = experts.shape, experts.device, can_overlap(experts.device)
    num_places = num_rows * choices
    assert experts.is_contiguous() and weights.is_contiguous()
    places = torch.empty(num_rows, choices, dtype=torch.int64, device=device)
    rows = torch.empty(num_places, dtype=torch.int64, device=device)
    starts = torch.empty(num_experts + 1, dtype=torch.int64, device=device)
    place_kernel[(num_experts,)](
        places,
        rows,
        starts,
        experts,
        num_places,
        NUM_CHOICES=choices,
        CHUNK=CHUNK,
        OVERLAPS=overlaps,
        launch_pdl=overlaps,
    )
    return Routing(weights, places, rows, starts)


def sum_of_experts(
    results: Tensor,  # [num_places, width], contiguous
    routing: Routing,
    shared: Tensor | None = None,  # [num_rows, width], contiguous
) -> Tensor:  # [num_rows, width]
    """What kernels.reference.experts.sum_of_experts says, bit by bit."""
    (num_rows, choices), width = routing.places.shape, results.shape[1]
    assert results.is_contiguous() and len(results) == num_rows * choices
    assert shared is None or (shared.is_contiguous() and shared.shape == (num_rows, width))
    assert shared is None or shared.dtype == results.dtype
    out = torch.empty(num_rows, width, dtype=results.dtype, device=results.device)
    overlaps = can_overlap(results.device)
    if out.numel() > 0:
        sum_of_experts_kernel[(num_rows, cdiv(width, BLOCK))](
            out,
            results,
            routing.weights,
            routing.places,
            shared,
            width,
            NUM_CHOICES=choices,
            BLOCK=BLOCK,
            OVERLAPS=overlaps,
            enable_fp_fusion=False,  # each product is rounded before it is added
            launch_pdl=overlaps,
        )
    return out
