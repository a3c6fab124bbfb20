"""Truncates logits rows by min_p, top_k and top_p: the argmax, the maximum, the cut and the kept mass of each row.

A row keeps the values of logits / temperature that are >= its cut. The cut applies min_p, then top_k, then top_p
(kernels/reference/sampling.py); kernels/cut_search.py finds the cuts of top_k and top_p. All sums are of integers, so
kept tokens and masses equal the reference's bit for bit.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cut_search import raise_cuts
from kernels.kernel import Kernel
from kernels.scores import (
    check_rows,
    fixed_point_weights,
    is_drawn,
    load_logits,
    load_scaled,
    ranks_of,
    temperature_of,
    token_of,
    value_of,
)
from kernels.sizes import cdiv, next_power_of_2

BLOCK = 4096  # tokens of a program
NUM_WARPS = 8


class TruncatedRows(NamedTuple):
    """A value for every row, greedy rows included; nothing is written for padding (a negative position)."""

    argmax: Tensor  # [num_rows] int64: of the logits as they came, ties to the lowest id
    maxima: Tensor  # [num_rows] float32: of logits / temperature
    cuts: Tensor  # [num_rows] float32: the row keeps the values >= this one
    masses: Tensor  # [num_rows] int64: sum of kernels.reference.sampling.fixed_point_weights over the kept values


# Per-row values share one allocation, so whether a pointer is aligned depends on the number of rows.
@Kernel
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


@Kernel
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


@Kernel
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


def truncate_rows(
    logits: Tensor,  # [num_rows, vocab] float32, rows any distance apart
    positions: Tensor,  # [num_rows] int64; negative: padding
    *,
    is_greedy: Tensor | None = None,  # [num_rows] bool: not truncated; argmax and maximum are those of the logits
    temperatures: Tensor | None = None,  # [num_rows] float32
    min_p: Tensor | None = None,  # [num_rows] float32; 0: no cut
    top_k: Tensor | None = None,  # [num_rows] int64; <= 0 or >= vocab: no cut
    top_p: Tensor | None = None,  # [num_rows] float64; 1: no cut
    need_mass: bool = True,
) -> TruncatedRows:
    """Truncate the rows. Without need_mass the masses are not computed, and their values mean nothing."""
    check_rows(logits, positions, is_greedy, temperatures, min_p, top_k, top_p)
    num_rows, vocab_size = logits.shape
    assert vocab_size < 1 << 19, "fixed-point mass of more tokens may overflow"
    num_splits, device = cdiv(vocab_size, BLOCK), logits.device
    argmax = torch.empty(num_rows, dtype=torch.int64, device=device)
    floats = torch.empty(2, num_rows, dtype=torch.float32, device=device)
    sums = torch.zeros(2, num_rows, dtype=torch.int64, device=device)
    truncated = TruncatedRows(argmax=argmax, maxima=floats[0], cuts=floats[1], masses=sums[0])
    if num_rows == 0:
        return truncated
    splits = (num_rows, num_splits)
    options: dict[str, Any] = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    ranks = torch.empty(splits, dtype=torch.int64, device=device)
    best_kernel[splits](ranks, logits, positions, logits.stride(0), vocab_size, BLOCK=BLOCK, **options)
    begin_kernel[(num_rows,)](
        *truncated[:3],
        ranks,
        positions,
        is_greedy,
        temperatures,
        min_p,
        num_splits,
        SPLITS=next_power_of_2(num_splits),
        num_warps=1,
        enable_fp_fusion=False,
    )
    rows = (logits, positions, is_greedy, temperatures, truncated.maxima)
    if top_k is not None:
        raise_cuts(truncated.cuts, *rows, wanted=top_k, totals=None, block=BLOCK, options=options)
    if top_p is not None:
        mass_kernel[splits](sums[1], *rows, truncated.cuts, logits.stride(0), vocab_size, BLOCK=BLOCK, **options)
        raise_cuts(truncated.cuts, *rows, wanted=top_p, totals=sums[1], block=BLOCK, options=options)
    if need_mass:
        mass_kernel[splits](
            truncated.masses, *rows, truncated.cuts, logits.stride(0), vocab_size, BLOCK=BLOCK, **options
        )
    return truncated
