"""Head norms, rotations and the cache's new rows in one pass over the rows of a fused projection, in place.

As kernels/rope.py on a GPU, but that padding writes to the null block; rotations as kernels/reference/rope.py has them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.bits import float_of_bits
from kernels.cpu.compiled import inlined
from kernels.cpu.elements import ELEMENTS, elements, narrow, widen
from kernels.cpu.kernel import Kernel, arguments_of, bits_of
from kernels.cpu.native import floats, integers
from kernels.cpu.threads import parts_of
from kernels.reference.fp8_rows import NO_SCALES, KVScales, are_kept_in

PART_NUMBERS = 1 << 13  # of rows, turned in some microseconds
NOTHING, ONE = np.float32(0.0), np.float32(1.0)
Arguments = arguments_of(
    "rows",  # addresses: [num_rows, (num_heads + 2 * num_kv_heads) * head_dim]
    "table",  # [num_positions, head_dim] float32: cosines, then sines
    "positions",  # [num_rows] int64
    "slots",  # [num_rows] int64; 0: rows are queries alone
    "kv",  # [num_slots, 2 * num_kv_heads * head_dim], or 0 likewise
    "q_weight",  # [head_dim]; 0: no norm
    "k_weight",
    "v_weight",
    "eps",  # [] float32
    *("num_rows", "num_positions", "num_slots", "num_heads", "num_kv_heads", "head_dim"),
    # The bits of float32s: what keys and values are multiplied by that become numbers of 8 bits.
    *("key_factor", "value_factor"),
)


@inlined
def norm_head(own: Any, weights: Any, eps: Any) -> None:
    """In place, as the next."""
    squares = NOTHING
    for column in range(len(own)):
        number = widen(own[column])
        squares += number * number
    scale = ONE / np.sqrt(squares / np.float32(len(own)) + eps)
    for column in range(len(own)):
        own[column] = narrow(widen(own[column]) * (scale * widen(weights[column])), own[column])


@inlined
def turn_head(own: Any, turn: Any) -> None:
    """turn: cosines, then sines."""
    half = len(own) // 2
    lows, highs, cosines, sines = own[:half], own[half:], turn[:half], turn[half:]
    for column in range(half):
        low, high, cos, sin = widen(lows[column]), widen(highs[column]), cosines[column], sines[column]
        lows[column] = narrow(low * cos - high * sin, lows[column])
        highs[column] = narrow(high * cos + low * sin, lows[column])


@inlined
def store_narrowed(target: Any, source: Any, factor: Any) -> None:
    for column in range(len(target)):
        target[column] = narrow(widen(source[column]) * factor, target[column])


@cache
def rows_rotation(element: Any, kept_element: Any, weight_element: Any, turns_first: bool) -> Kernel:
    """Of tensors of these elements, a cache of those, and norms of others, which are of what is turned or before it."""
    is_narrowed = kept_element != element

    def rotate_rows(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        num_rows, num_heads, head_dim = a.num_rows, a.num_heads, a.head_dim
        fresh = 2 * a.num_kv_heads * head_dim
        rows = elements(a.rows, num_rows, num_heads * head_dim + fresh, element)
        turns, places = floats(a.table, a.num_positions, head_dim), integers(a.positions, num_rows)
        kept, targets = elements(a.kv, a.num_slots, fresh, kept_element), integers(a.slots, num_rows)
        key_factor, value_factor = float_of_bits(np.int32(a.key_factor)), float_of_bits(np.int32(a.value_factor))
        num_turned = num_heads + a.num_kv_heads
        num_changed = num_turned + (a.num_kv_heads if a.v_weight else 0)
        for row in range(part, num_rows, num_parts):
            turn = turns[places[row]]
            for head in range(num_changed):
                own = rows[row, head * head_dim : (head + 1) * head_dim]
                weight = a.q_weight if head < num_heads else a.k_weight if head < num_turned else a.v_weight
                is_turned = head < num_turned
                if turns_first and is_turned:
                    turn_head(own, turn)
                if weight:
                    norm_head(own, elements(weight, 1, head_dim, weight_element)[0], floats(a.eps, 1, 1)[0, 0])
                if not turns_first and is_turned:
                    turn_head(own, turn)
            if a.slots:
                target, source = kept[targets[row]], rows[row, num_heads * head_dim :]
                if is_narrowed:
                    store_narrowed(target[: fresh // 2], source[: fresh // 2], key_factor)
                    store_narrowed(target[fresh // 2 :], source[fresh // 2 :], value_factor)
                else:
                    for column in range(fresh):
                        target[column] = source[column]

    return Kernel(rotate_rows, Arguments)


def rope_and_write(
    qkv: Tensor,  # [num_rows, (num_heads + 2 * num_kv_heads) * head_dim], contiguous: queries and keys are turned
    table: Tensor,  # [max_model_len, head_dim] float32: cosines, then sines
    positions: Tensor,  # [num_rows] int64
    slot_mapping: Tensor,  # [num_rows] int64
    kv_cache: Tensor,  # [num_blocks, block_size, 2 * num_kv_heads * head_dim]
    *,
    num_heads: int,  # 0: rows are keys and values only
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,  # [head_dim], of qkv's dtype, or of float32
    k_norm: Tensor | None = None,
    v_norm: Tensor | None = None,  # of values, which are not turned
    eps: Tensor | None = None,  # []
    turns_first: bool = False,  # norms are of what is turned (Hunyuan)
    kv_scales: KVScales = NO_SCALES,  # of a cache in FP8
) -> Tensor:  # [num_rows, num_heads * head_dim], the queries
    assert kv_cache.shape[2] == 2 * num_kv_heads * head_dim
    assert kv_cache.is_contiguous() and are_kept_in(qkv.dtype, kv_cache.dtype, kv_scales)
    assert slot_mapping.is_contiguous() and slot_mapping.dtype == torch.int64 and len(slot_mapping) == len(qkv)
    heads, norms = (num_heads, num_kv_heads, head_dim), (q_norm, k_norm, v_norm)
    _turn(qkv, table, positions, (slot_mapping, kv_cache), heads, norms, eps, turns_first, kv_scales)
    return qkv[:, : num_heads * head_dim]


def rotate(
    queries: Tensor,  # [num_rows, num_heads * head_dim], contiguous: turned
    table: Tensor,  # [max_model_len, head_dim] float32: cosines, then sines
    positions: Tensor,  # [num_rows] int64
    *,
    num_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,  # [head_dim], of the queries' dtype, or of float32
    eps: Tensor | None = None,  # []
) -> Tensor:  # the queries
    _turn(queries, table, positions, None, (num_heads, 0, head_dim), (q_norm, None, None), eps)
    return queries


def _turn(
    rows: Tensor,
    table: Tensor,
    positions: Tensor,
    target: tuple[Tensor, Tensor] | None,  # slot_mapping and kv_cache
    heads: tuple[int, int, int],  # of queries, of keys, and elements of each
    norms: tuple[Tensor | None, ...],  # of queries, of keys, of values
    eps: Tensor | None,
    turns_first: bool = False,
    kv_scales: KVScales = NO_SCALES,
) -> None:
    num_rows, width = rows.shape
    num_heads, num_kv_heads, head_dim = heads
    assert table.shape[1] == head_dim and width == (num_heads + 2 * num_kv_heads) * head_dim
    assert rows.is_contiguous() and table.is_contiguous() and table.dtype == torch.float32
    assert positions.is_contiguous() and positions.dtype == torch.int64 and len(positions) == num_rows
    present = [norm for norm in norms if norm is not None]
    weight_dtype = present[0].dtype if present else rows.dtype
    assert weight_dtype in (rows.dtype, torch.float32) and all(norm.dtype == weight_dtype for norm in present)
    assert not present or eps is not None
    kept_dtype = rows.dtype if target is None else target[1].dtype
    rows_rotation(ELEMENTS[rows.dtype], ELEMENTS[kept_dtype], ELEMENTS[weight_dtype], turns_first)(
        rows.data_ptr(),
        table.data_ptr(),
        positions.data_ptr(),
        *((0, 0) if target is None else (tensor.data_ptr() for tensor in target)),
        *(0 if norm is None else norm.data_ptr() for norm in (*norms, eps)),
        num_rows,
        len(table),
        0 if target is None else target[1].shape[0] * target[1].shape[1],
        num_heads,
        num_kv_heads,
        head_dim,
        *(bits_of(1.0 / scale) for scale in kv_scales),
        parts=parts_of(num_rows * width, PART_NUMBERS, num_rows),
    )
