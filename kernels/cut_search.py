"""The search for a cut: the largest float32 value at or above which enough of a row's tokens, or of their mass, lie.

It runs over float32's order-preserving integer image, and nothing is sorted. The vocabulary is cut among programs, a
launch for each pass over it: a pass measures NUM_THRESHOLDS values between what is known to suffice and what is known
not to, so that each leaves one part in NUM_THRESHOLDS + 1. It looks at the tokens in between alone, for what lies above
them is known, and after half of the passes hardly a program has any. Tokens are counted and mass is added up in
integers, so no order of summation can move a cut.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kernel import Kernel
from kernels.scores import fixed_point_weights, image_of, is_drawn, load_scaled, temperature_of, value_of
from kernels.sizes import cdiv

# A pass over part of a row. Reading it once more costs little, comparing it with one more value costs all its threads.
NUM_THRESHOLDS: tl.constexpr = tl.constexpr(16)
NUM_PASSES = 8  # leave one of the 2 ** 32 images
NO_MASS_FROM: tl.constexpr = tl.constexpr(32.0)  # that far below the maximum weights are 0


@triton.jit
def wanted_of(wanted_ptr, totals_ptr, maxima_ptr, cuts_ptr, vocab_size, row, BY_MASS: tl.constexpr):
    """(whether there is anything to search for, how much is needed, a value that suffices for it)."""
    if BY_MASS:
        top_p = tl.load(wanted_ptr + row)
        total = tl.load(totals_ptr + row)
        needed = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
        needed = tl.minimum(tl.maximum(needed, 1), total)
        is_searched = top_p < 1.0
        floor = tl.maximum(tl.load(cuts_ptr + row), tl.load(maxima_ptr + row) - NO_MASS_FROM)
    else:
        needed = tl.load(wanted_ptr + row)
        is_searched = (needed > 0) & (needed < vocab_size)
        floor = tl.full((), float("-inf"), dtype=tl.float32)
    return is_searched, needed, floor


@triton.jit
def thresholds_between(low, high, steps):
    """Images at equal distances: above low, which suffices, and below high, which does not; steps: from 1 on."""
    images = low + (high - low) * steps // (NUM_THRESHOLDS + 1)
    return tl.minimum(tl.maximum(images, low + 1), high - 1)


@triton.jit
def bounds_after(bounds_ptr, measured_ptr, num_passes, num_rows, row, needed, floor, maximum):
    """(image that suffices, image that does not, what lies from there on) after so many passes.

    By what the last of them began with and measured.
    """
    low, high = image_of(floor).to(tl.int64), image_of(maximum).to(tl.int64) + 1
    beyond = needed * 0
    if num_passes > 0:
        place = (num_passes - 1) * num_rows + row
        low, high, beyond = (
            tl.load(bounds_ptr + place * 3),
            tl.load(bounds_ptr + place * 3 + 1),
            tl.load(bounds_ptr + place * 3 + 2),
        )
        if high - low > 1:
            steps = tl.arange(0, NUM_THRESHOLDS)
            images = thresholds_between(low, high, steps + 1)
            measured = beyond + tl.load(measured_ptr + place * NUM_THRESHOLDS + steps)
            reaches = measured >= needed
            below, above = tl.where(reaches, images, low), tl.where(reaches, high, images)
            # Of those that do not suffice the lowest has the most.
            beyond = tl.maximum(beyond, tl.max(tl.where(reaches, 0, measured), axis=0))
            low, high = tl.maximum(low, tl.max(below, axis=0)), tl.minimum(high, tl.min(above, axis=0))
    return low, high, beyond


@Kernel
@triton.jit(
    do_not_specialize=["num_passes"], do_not_specialize_on_alignment=["cuts_ptr", "positions_ptr", "totals_ptr"]
)
def measure_kernel(
    bounds_ptr,  # [NUM_PASSES, num_rows, 3] int64: what each pass began with, see bounds_after
    measured_ptr,  # [NUM_PASSES, num_rows, NUM_THRESHOLDS] int64, zeros where no pass has been
    logits_ptr,
    positions_ptr,
    is_greedy_ptr,
    temperatures_ptr,
    maxima_ptr,
    cuts_ptr,
    wanted_ptr,  # [num_rows]: top_k int64, or top_p float64
    totals_ptr,  # [num_rows] int64: the mass of what is kept so far; None unless BY_MASS
    row_stride,
    vocab_size,
    num_passes,  # that have been
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One pass: how many of BLOCK tokens, or how much of their mass, lies from each threshold on up to `high`."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if is_drawn(positions_ptr, is_greedy_ptr, row):
        is_searched, needed, floor = wanted_of(wanted_ptr, totals_ptr, maxima_ptr, cuts_ptr, vocab_size, row, BY_MASS)
        if is_searched:
            num_rows, maximum = tl.num_programs(0), tl.load(maxima_ptr + row)
            low, high, beyond = bounds_after(
                bounds_ptr, measured_ptr, num_passes, num_rows, row, needed, floor, maximum
            )
            place = num_passes * num_rows + row
            if split == 0:
                tl.store(bounds_ptr + place * 3, low)
                tl.store(bounds_ptr + place * 3 + 1, high)
                tl.store(bounds_ptr + place * 3 + 2, beyond)
            if high - low > 1:
                tokens = split * BLOCK + tl.arange(0, BLOCK)
                temperature = temperature_of(temperatures_ptr, row)
                logits = load_scaled(logits_ptr + row * row_stride, tokens, vocab_size, temperature)
                images = image_of(logits)
                is_between = (images > low.to(tl.int32)) & (images < high.to(tl.int32)) & (tokens < vocab_size)
                if tl.max(is_between.to(tl.int32), axis=0) > 0:
                    amounts = is_between.to(tl.int32)
                    if BY_MASS:
                        amounts = tl.where(is_between, fixed_point_weights(maximum - logits), 0)
                    steps = tl.arange(0, NUM_THRESHOLDS)
                    measured = tl.zeros((NUM_THRESHOLDS,), dtype=tl.int64)
                    # One after another: a table of tokens and thresholds would not fit registers.
                    for step in tl.static_range(NUM_THRESHOLDS):
                        threshold = thresholds_between(low, high, step + 1).to(tl.int32)
                        amount = tl.sum(tl.where(images >= threshold, amounts, 0), axis=0)
                        measured = tl.where(steps == step, amount.to(tl.int64), measured)
                    places = place * NUM_THRESHOLDS + steps
                    tl.atomic_add(measured_ptr + places, measured, mask=measured > 0, sem="relaxed")


@Kernel
@triton.jit(
    do_not_specialize=["num_passes"], do_not_specialize_on_alignment=["cuts_ptr", "positions_ptr", "totals_ptr"]
)
def settle_kernel(
    bounds_ptr,
    measured_ptr,
    positions_ptr,
    is_greedy_ptr,
    maxima_ptr,
    cuts_ptr,
    wanted_ptr,
    totals_ptr,
    vocab_size,
    num_passes,
    BY_MASS: tl.constexpr,
):
    """The cut that a search has found; arguments as measure_kernel has them."""
    row = tl.program_id(0).to(tl.int64)
    if is_drawn(positions_ptr, is_greedy_ptr, row):
        is_searched, needed, floor = wanted_of(wanted_ptr, totals_ptr, maxima_ptr, cuts_ptr, vocab_size, row, BY_MASS)
        if is_searched:
            maximum = tl.load(maxima_ptr + row)
            num_rows = tl.num_programs(0)
            low, _, _ = bounds_after(bounds_ptr, measured_ptr, num_passes, num_rows, row, needed, floor, maximum)
            # What a cut before this one has dropped lies below the rest, so it matters only where that one is higher.
            tl.store(cuts_ptr + row, tl.maximum(tl.load(cuts_ptr + row), value_of(low)))


def raise_cuts(
    cuts: Tensor,  # [num_rows] float32: the cuts so far; raised in place
    logits: Tensor,  # [num_rows, vocab] float32
    positions: Tensor,  # [num_rows] int64; negative: padding
    is_greedy: Tensor | None,  # [num_rows] bool: nothing is cut
    temperatures: Tensor | None,  # [num_rows] float32
    maxima: Tensor,  # [num_rows] float32: of logits / temperature
    *,
    wanted: Tensor,  # [num_rows]: top_k int64 (<= 0: no cut), or top_p float64 (1: no cut)
    totals: Tensor | None,  # [num_rows] int64: the mass of what is kept so far, for top_p; None: top_k
    block: int,  # tokens of a program
    options: dict[str, Any],  # of a launch over all the rows' tokens
) -> None:
    """Raise the rows' cuts to the largest values that leave what is wanted: so many tokens, or that share of totals."""
    num_rows, vocab_size = logits.shape
    by_mass = totals is not None
    shape = (NUM_PASSES, num_rows, NUM_THRESHOLDS.value)
    measured = torch.zeros(shape, dtype=torch.int64, device=logits.device)
    bounds = torch.empty(NUM_PASSES, num_rows, 3, dtype=torch.int64, device=logits.device)
    for num_passes in range(NUM_PASSES):
        measure_kernel[(num_rows, cdiv(vocab_size, block))](
            bounds,
            measured,
            logits,
            positions,
            is_greedy,
            temperatures,
            maxima,
            cuts,
            wanted,
            totals,
            logits.stride(0),
            vocab_size,
            num_passes,
            BY_MASS=by_mass,
            BLOCK=block,
            **options,
        )
    settle_kernel[(num_rows,)](
        bounds,
        measured,
        positions,
        is_greedy,
        maxima,
        cuts,
        wanted,
        totals,
        vocab_size,
        NUM_PASSES,
        BY_MASS=by_mass,
        num_warps=1,
        enable_fp_fusion=False,
    )
