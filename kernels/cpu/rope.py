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

from kernels.cpu.elements import ELEMENTS, elements, narrow, widen
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import floats, integers
from kernels.cpu.threads import parts_of

PART_NUMBERS = 1 << 13  # of rows, turned in some microseconds
NOTHING, ONE = np.float32(0.0), np.float32(1.0)
Arguments = arguments_of(
    "qkv",  # addresses: [num_rows, (num_heads + 2 * num_kv_heads) * head_dim]
    "table",  # [num_positions, head_dim] float32: cosines, then sines
    "positions",  # [num_rows] int64
    "slots",  # [num_rows] int64
    "kv",  # [num_slots, 2 * num_kv_heads * head_dim]
    "q_weight",  # [head_dim]; 0: no norm
    "k_weight",
    "eps",  # [] float32
    *("num_rows", "num_positions", "num_slots", "num_heads", "num_kv_heads", "head_dim"),
)


@cache
def rows_rotation(element: Any, weight_element: Any) -> Kernel:
    """Of tensors of these elements, and norms of those."""

    def rotate_rows(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        num_rows, num_heads, head_dim = a.num_rows, a.num_heads, a.head_dim
        fresh, half = 2 * a.num_kv_heads * head_dim, head_dim // 2
        rows = elements(a.qkv, num_rows, num_heads * head_dim + fresh, element)
        turns, places = floats(a.table, a.num_positions, head_dim), integers(a.positions, num_rows)
        kept, targets = elements(a.kv, a.num_slots, fresh, element), integers(a.slots, num_rows)
        for row in range(part, num_rows, num_parts):
            turn = turns[places[row]]
            for head in range(num_heads + a.num_kv_heads):
                own = rows[row, head * head_dim : (head + 1) * head_dim]
                weight = a.q_weight if head < num_heads else a.k_weight
                if weight:
                    squares, scales = NOTHING, elements(weight, 1, head_dim, weight_element)[0]
                    for column in range(head_dim):
                        number = widen(own[column])
                        squares += number * number
                    scale = ONE / np.sqrt(squares / np.float32(head_dim) + floats(a.eps, 1, 1)[0, 0])
                    for column in range(head_dim):
                        own[column] = narrow(widen(own[column]) * (scale * widen(scales[column])), own[column])
                lows, highs, cosines, sines = own[:half], own[half:], turn[:half], turn[half:]
                for column in range(half):
                    low, high, cos, sin = widen(lows[column]), widen(highs[column]), cosines[column], sines[column]
                    lows[column] = narrow(low * cos - high * sin, lows[column])
                    highs[column] = narrow(high * cos + low * sin, lows[column])
            target, source = kept[targets[row]], rows[row, num_heads * head_dim :]
            for column in range(fresh):
                target[column] = source[column]

    return Kernel(rotate_rows, Arguments)


def rope_and_write(
    qkv: Tensor,  # [num_rows, (num_heads + 2 * num_kv_heads) * head_dim], contiguous; queries and keys are turned
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
    eps: Tensor | None = None,  # []
) -> Tensor:  # [num_rows, num_heads * head_dim], the queries
    num_rows, width = qkv.shape
    assert table.shape[1] == head_dim and width == (num_heads + 2 * num_kv_heads) * head_dim
    assert qkv.is_contiguous() and table.is_contiguous() and kv_cache.is_contiguous()
    assert qkv.dtype == kv_cache.dtype and table.dtype == torch.float32
    assert positions.is_contiguous() and positions.dtype == torch.int64 and len(positions) == num_rows
    assert slot_mapping.is_contiguous() and slot_mapping.dtype == torch.int64 and len(slot_mapping) == num_rows
    weight_dtype = qkv.dtype if k_norm is None else k_norm.dtype
    assert weight_dtype in (qkv.dtype, torch.float32) and (q_norm is None or q_norm.dtype == weight_dtype)
    rows_rotation(ELEMENTS[qkv.dtype], ELEMENTS[weight_dtype])(
        qkv.data_ptr(),
        table.data_ptr(),
        positions.data_ptr(),
        slot_mapping.data_ptr(),
        kv_cache.data_ptr(),
        0 if q_norm is None else q_norm.data_ptr(),
        0 if k_norm is None else k_norm.data_ptr(),
        0 if eps is None else eps.data_ptr(),
        num_rows,
        len(table),
        kv_cache.shape[0] * kv_cache.shape[1],
        num_heads,
        num_kv_heads,
        head_dim,
        parts=parts_of(num_rows * width, PART_NUMBERS, num_rows),
    )
    return qkv[:, : num_heads * head_dim]
