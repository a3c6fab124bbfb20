"""Merges the partial results of an attention that is split over the keys, and holds what both halves share.

Each row merges its own splits and no others, MERGED_SPLITS at a time, at absolute places. So its bits do not depend on
how many splits its neighbours need, or its launch has room for.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import await_input, can_overlap
from kernels.exp2 import LOG2_E
from kernels.kernel import Kernel
from kernels.registers import MAX_REGISTERS

MERGED_SPLITS = 16


@triton.jit
def with_sink(maximum, total, sink):
    """(what values are to be scaled by, sum) after one more logit that brings no value."""
    larger = tl.maximum(maximum, sink)
    alpha = tl.exp2(maximum - larger)
    return alpha, tl.fma(total, alpha, tl.exp2(sink - larger))


@triton.jit
def visible(position, last_key, WINDOW: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """First and last key position that the row at `position` sees; none behind last_key, the last one of its tile."""
    first = position * 0
    last = first + last_key
    if IS_CAUSAL:
        last = tl.minimum(last, position)
    if WINDOW < 0:  # chunks of so many
        first = position // -WINDOW * -WINDOW
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
        if not IS_CAUSAL:
            last = tl.minimum(last, position + WINDOW - 1)
    return first, last


@Kernel
@triton.jit(
    do_not_specialize=["num_splits"],
    do_not_specialize_on_alignment=["totals_ptr", "rows_ptr", "sizes_ptr", "positions_ptr", "last_keys_ptr"],
)
def merge_kernel(
    numerators_ptr,  # [num_rows, num_heads, num_splits, VALUE_DIM] float32
    maxima_ptr,  # [num_rows, num_heads, num_splits] float32
    totals_ptr,  # as maxima_ptr
    output_ptr,  # [num_rows, num_heads, VALUE_DIM]
    sinks_ptr,  # [num_heads] or None
    value_scale,
    rows_ptr,
    sizes_ptr,
    positions_ptr,
    last_keys_ptr,
    num_splits,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,  # >= VALUE_DIM
    SPLIT_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    MERGED_SPLITS: tl.constexpr,
    OVERLAPS: tl.constexpr,  # with the launch before
):
    """One row and head: its own splits, MERGED_SPLITS at a time, from the first key it sees to the last."""
    if OVERLAPS:
        await_input()
    tile, row_in_tile, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if row_in_tile >= tl.load(sizes_ptr + tile):
        return
    row = (tl.load(rows_ptr + tile) + row_in_tile).to(tl.int64) * tl.num_programs(2) + head
    position = tl.load(positions_ptr + tile) + row_in_tile
    first, last = visible(position, tl.load(last_keys_ptr + tile), WINDOW, IS_CAUSAL)
    first, last = first // SPLIT_KEYS, last // SPLIT_KEYS
    columns = tl.arange(0, VALUE_BLOCK)
    is_column = columns < VALUE_DIM
    maximum = float("-inf")
    total = 0.0
    numerator = tl.zeros((VALUE_BLOCK,), tl.float32)
    for chunk in range(first // MERGED_SPLITS * MERGED_SPLITS, last + 1, MERGED_SPLITS):
        split = chunk + tl.arange(0, MERGED_SPLITS)
        is_own = (split >= first) & (split <= last)
        entry = row * num_splits + split
        maxima = tl.load(maxima_ptr + entry, mask=is_own, other=float("-inf"))
        sums = tl.load(totals_ptr + entry, mask=is_own, other=0.0)
        numerators = tl.load(
            numerators_ptr + entry[:, None] * VALUE_DIM + columns[None, :],
            mask=is_own[:, None] & is_column[None, :],
            other=0.0,
        )
        larger = tl.maximum(maximum, tl.max(maxima, axis=0))  # finite: a row sees something of each of its splits
        alpha = tl.exp2(maximum - larger)
        weights = tl.exp2(maxima - larger)
        total = tl.fma(total, alpha, tl.sum(weights * sums, axis=0))
        numerator = numerator * alpha + tl.sum(weights[:, None] * numerators, axis=0)
        maximum = larger
    if sinks_ptr is not None:
        alpha, total = with_sink(maximum, total, tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E)
        numerator *= alpha
    output = (numerator / total * value_scale).to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + row * VALUE_DIM + columns, output, mask=is_column)


def merge_splits(
    numerators: Tensor,  # [num_rows, num_heads, num_splits, value_dim] float32, not yet divided by their sums
    maxima: Tensor | None,  # [num_rows, num_heads, num_splits] float32, of the logits times log2(e)
    sums: Tensor | None,  # [num_rows, num_heads, num_splits] float32, of 2 ** (logit - maximum)
    output: Tensor,  # [num_rows, num_heads * value_dim]: written where a tile has a row
    sinks: Tensor | None,  # [num_heads]
    value_scale: float,
    tile_rows: Tensor,  # [num_tiles] int32, as the next three: see PagedSegments
    tile_sizes: Tensor,
    tile_positions: Tensor,
    last_keys: Tensor,
    max_tile_size: int,
    **seen: int,  # merge_kernel's constants; the first half was given the same
) -> None:
    _, num_heads, num_splits, _ = numerators.shape
    overlaps = can_overlap(numerators.device)
    merge_kernel[(len(tile_rows), max_tile_size, num_heads)](
        numerators,
        maxima,
        sums,
        output,
        sinks,
        value_scale,
        tile_rows,
        tile_sizes,
        tile_positions,
        last_keys,
        num_splits,
        MERGED_SPLITS=MERGED_SPLITS,
        OVERLAPS=overlaps,
        launch_pdl=overlaps,
        **seen,
        num_warps=4,
        maxnreg=MAX_REGISTERS,
        enable_fp_fusion=False,
    )
