"""What of its row each law keeps: argmax, maximum, cut and mass of logits rows.

The law of a row is the softmax of logits / temperature over the values >= cut, where the cut stands for min_p, top_k
and top_p in that order (kernels/reference/sampling.py). Nothing is sorted: a cut is the largest float32 value for which
enough tokens, or enough mass, lie at or above it, and a search over float32's order-preserving integer image finds it.
The vocabulary is cut among programs, a launch for each pass over it: a pass measures NUM_THRESHOLDS values between what
is known to suffice and what is known not to, so that each leaves one part in NUM_THRESHOLDS + 1. Tokens are counted and
mass is added up in integers, so no order of summation can move a cut: kept sets and masses are the reference's bit for
bit.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.scores import (
    check_rows,
    fixed_point_weights,
    image_of,
    load_logits,
    load_scaled,
    ranks_of,
    token_of,
    value_of,
)

BLOCK = 2048  # tokens of a program
NUM_WARPS = 8
NUM_THRESHOLDS: tl.constexpr = tl.constexpr(32)
NUM_PASSES = 7  # 33 ** 7 > 2 ** 32, the images there are
NO_MASS_FROM: tl.constexpr = tl.constexpr(32.0)  # that far below the maximum weights are 0


class RowLaws(NamedTuple):
    """Of every row, greedy rows included; nothing is written for padding (a negative position)."""

    argmax: Tensor  # [num_rows] int64: of the logits as they came, ties to the lowest id
    maxima: Tensor  # [num_rows] float32: of logits / temperature
    cuts: Tensor  # [num_rows] float32: kept is what is >= this
    masses: Tensor  # [num_rows] int64: kernels.reference.sampling.fixed_point_weights of what is kept, added up


# What there is one of for each row lies side by side in one allocation, aligned or not as their number has it.
@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
def best_kernel(
    ranks_ptr,  # [num_rows, num_splits] int64
    logits_ptr,  # [num_rows, vocab_size], rows row_stride apart
    positions_ptr,  # [num_rows] int64
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """ranks[row, split] = the best of BLOCK tokens."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(positions_ptr + row) >= 0:
        tokens = split * BLOCK + tl.arange(0, BLOCK)
        ranks = ranks_of(load_logits(logits_ptr + row * row_stride, tokens, vocab_size), tokens, vocab_size)
        tl.store(ranks_ptr + row * tl.num_programs(1) + split, tl.max(ranks, axis=0))


@triton.jit
def is_drawn(positions_ptr, is_greedy_ptr, row):
    """Whether a law is wanted of a row."""
    wanted = tl.load(positions_ptr + row) >= 0
    if is_greedy_ptr is not None:
        wanted = wanted & (tl.load(is_greedy_ptr + row) == 0)
    return wanted


@triton.jit
def temperature_of(temperatures_ptr, row):
    temperature = tl.full((), 1.0, dtype=tl.float32)
    if temperatures_ptr is not None:
        temperature = tl.load(temperatures_ptr + row)
    return temperature


@triton.jit(do_not_specialize_on_alignment=["cuts_ptr", "positions_ptr"])
def begin_kernel(
    argmax_ptr,  # [num_rows] int64
    maxima_ptr,  # [num_rows] float32
    cuts_ptr,  # [num_rows] float32
    ranks_ptr,  # [num_rows, num_splits] int64
    positions_ptr,  # [num_rows] int64
    is_greedy_ptr,  # [num_rows] bool, or None
    temperatures_ptr,  # [num_rows] float32, or None
    min_p_ptr,  # [num_rows] float32, or None
    num_splits,
    SPLITS: tl.constexpr,  # >= num_splits
):
    """argmax and maximum, and the cut of min_p."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(positions_ptr + row) >= 0:
        splits = tl.arange(0, SPLITS)
        own = tl.load(ranks_ptr + row * num_splits + splits, mask=splits < num_splits, other=-0x7FFFFFFFFFFFFFFF)
        rank = tl.max(own, axis=0)
        maximum = value_of(rank >> 32)
        tl.store(argmax_ptr + row, token_of(rank))
        cut = tl.full((), float("-inf"), dtype=tl.float32)
        if is_drawn(positions_ptr, is_greedy_ptr, row):
            maximum = tl.div_rn(maximum, temperature_of(temperatures_ptr, row))  # division keeps the order
            if min_p_ptr is not None:
                min_p = tl.load(min_p_ptr + row).to(tl.float64)
                if min_p > 0.0:
                    cut = maximum + tl.log(min_p).to(tl.float32)
        tl.store(maxima_ptr + row, maximum)
        tl.store(cuts_ptr + row, cut)


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
def thresholds_between(low, high):
    """Images at equal distances: above low, which suffices, and below high, which does not."""
    steps = tl.arange(0, NUM_THRESHOLDS) + 1
    images = low + (high - low) * steps // (NUM_THRESHOLDS + 1)
    return tl.minimum(tl.maximum(images, low + 1), high - 1)


@triton.jit
def bounds_after(measured_ptr, num_passes, num_rows, row, needed, floor, maximum):
    """(image that suffices, image that does not) after so many passes, which have left their counts in measured."""
    low, high = image_of(floor).to(tl.int64), image_of(maximum).to(tl.int64) + 1
    for index in range(num_passes):
        if high - low > 1:
            images = thresholds_between(low, high)
            places = (index * num_rows + row) * NUM_THRESHOLDS + tl.arange(0, NUM_THRESHOLDS)
            reaches = tl.load(measured_ptr + places) >= needed
            below, above = tl.where(reaches, images, low), tl.where(reaches, high, images)
            low, high = tl.maximum(low, tl.max(below, axis=0)), tl.minimum(high, tl.min(above, axis=0))
    return low, high


@triton.jit(
    do_not_specialize=["num_passes"], do_not_specialize_on_alignment=["cuts_ptr", "positions_ptr", "totals_ptr"]
)
def measure_kernel(
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
    """One pass: how many of BLOCK tokens, or how much of their mass, lies at or above each threshold."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if is_drawn(positions_ptr, is_greedy_ptr, row):
        is_searched, needed, floor = wanted_of(wanted_ptr, totals_ptr, maxima_ptr, cuts_ptr, vocab_size, row, BY_MASS)
        if is_searched:
            num_rows, maximum = tl.num_programs(0), tl.load(maxima_ptr + row)
            low, high = bounds_after(measured_ptr, num_passes, num_rows, row, needed, floor, maximum)
            if high - low > 1:
                tokens = split * BLOCK + tl.arange(0, BLOCK)
                temperature = temperature_of(temperatures_ptr, row)
                logits = load_scaled(logits_ptr + row * row_stride, tokens, vocab_size, temperature)
                thresholds = value_of(thresholds_between(low, high))
                is_above = (logits[:, None] >= thresholds[None, :]) & (tokens < vocab_size)[:, None]
                if BY_MASS:
                    weights = fixed_point_weights(maximum - logits)
                    measured = tl.sum(tl.where(is_above, weights[:, None], 0), axis=0)
                else:
                    measured = tl.sum(is_above.to(tl.int32), axis=0).to(tl.int64)
                places = (num_passes * num_rows + row) * NUM_THRESHOLDS + tl.arange(0, NUM_THRESHOLDS)
                tl.atomic_add(measured_ptr + places, measured, mask=measured > 0, sem="relaxed")


@triton.jit(
    do_not_specialize=["num_passes"], do_not_specialize_on_alignment=["cuts_ptr", "positions_ptr", "totals_ptr"]
)
def settle_kernel(
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
            low, _ = bounds_after(measured_ptr, num_passes, tl.num_programs(0), row, needed, floor, maximum)
            # What a cut before this one has dropped lies below the rest, so it matters only where that one is higher.
            tl.store(cuts_ptr + row, tl.maximum(tl.load(cuts_ptr + row), value_of(low)))


@triton.jit(do_not_specialize_on_alignment=["masses_ptr", "cuts_ptr", "positions_ptr"])
def mass_kernel(
    masses_ptr,  # [num_rows] int64, zeros
    logits_ptr,
    positions_ptr,
    is_greedy_ptr,
    temperatures_ptr,
    maxima_ptr,
    cuts_ptr,
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Adds the mass of what a row keeps of BLOCK tokens."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if is_drawn(positions_ptr, is_greedy_ptr, row):
        tokens = split * BLOCK + tl.arange(0, BLOCK)
        temperature = temperature_of(temperatures_ptr, row)
        logits = load_scaled(logits_ptr + row * row_stride, tokens, vocab_size, temperature)
        is_kept = (logits >= tl.load(cuts_ptr + row)) & (tokens < vocab_size)
        weights = fixed_point_weights(tl.load(maxima_ptr + row) - logits)
        tl.atomic_add(masses_ptr + row, tl.sum(tl.where(is_kept, weights, 0), axis=0), sem="relaxed")


def row_laws(
    logits: Tensor,  # [num_rows, vocab] float32, rows any distance apart
    positions: Tensor,  # [num_rows] int64; negative: padding
    *,
    is_greedy: Tensor | None = None,  # [num_rows] bool: the law is not wanted, argmax and maximum are the logits' own
    temperatures: Tensor | None = None,  # [num_rows] float32
    min_p: Tensor | None = None,  # [num_rows] float32; 0: no cut
    top_k: Tensor | None = None,  # [num_rows] int64; <= 0 or >= vocab: no cut
    top_p: Tensor | None = None,  # [num_rows] float64; 1: no cut
    need_mass: bool = True,
) -> RowLaws:
    """The laws of the rows. Without need_mass, masses are not computed: what is there means nothing."""
    check_rows(logits, positions, is_greedy, temperatures, min_p, top_k, top_p)
    num_rows, vocab_size = logits.shape
    assert vocab_size < 1 << 19, "fixed-point mass of more tokens may overflow"
    num_splits, device = triton.cdiv(vocab_size, BLOCK), logits.device
    argmax = torch.empty(num_rows, dtype=torch.int64, device=device)
    floats = torch.empty(2, num_rows, dtype=torch.float32, device=device)
    sums = torch.zeros(2, num_rows, dtype=torch.int64, device=device)
    laws = RowLaws(argmax=argmax, maxima=floats[0], cuts=floats[1], masses=sums[0])
    if num_rows == 0:
        return laws
    splits = (num_rows, num_splits)
    rows: tuple[Any, ...] = (logits, positions, is_greedy, temperatures, laws.maxima, laws.cuts)
    options: dict[str, Any] = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    ranks = torch.empty(splits, dtype=torch.int64, device=device)
    best_kernel[splits](ranks, logits, positions, logits.stride(0), vocab_size, BLOCK=BLOCK, **options)
    begin_kernel[(num_rows,)](
        *laws[:3],
        ranks,
        positions,
        is_greedy,
        temperatures,
        min_p,
        num_splits,
        SPLITS=triton.next_power_of_2(num_splits),
        num_warps=1,
        enable_fp_fusion=False,
    )
    if top_k is not None:
        _search(rows, top_k, None, splits, options)
    if top_p is not None:
        mass_kernel[splits](sums[1], *rows, logits.stride(0), vocab_size, BLOCK=BLOCK, **options)
        _search(rows, top_p, sums[1], splits, options)
    if need_mass:
        mass_kernel[splits](laws.masses, *rows, logits.stride(0), vocab_size, BLOCK=BLOCK, **options)
    return laws


def _search(
    rows: tuple[Any, ...], wanted: Tensor, totals: Tensor | None, splits: tuple[int, int], options: dict[str, Any]
) -> None:
    """Raise the rows' cuts to the largest values that leave what is wanted: tokens, or, of totals, mass."""
    logits, positions, is_greedy, _, maxima, cuts = rows
    vocab_size, num_rows = logits.shape[1], splits[0]
    by_mass = totals is not None
    shape = (NUM_PASSES, num_rows, NUM_THRESHOLDS.value)
    measured = torch.zeros(shape, dtype=torch.int64, device=logits.device)
    for num_passes in range(NUM_PASSES):
        measure_kernel[splits](
            measured,
            *rows,
            wanted,
            totals,
            logits.stride(0),
            vocab_size,
            num_passes,
            BY_MASS=by_mass,
            BLOCK=BLOCK,
            **options,
        )
    settle_kernel[(num_rows,)](
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
