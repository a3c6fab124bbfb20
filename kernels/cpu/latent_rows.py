"""kernels/reference/latent_rows.py in one pass over the rows, with the cache's new rows stored.

Arithmetic is float32 and rounded once, as kernels/cpu/rope.py has it; padding writes to the null block.
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
from kernels.cpu.elements import ELEMENTS, elements, narrow, rounded_twice, widen
from kernels.cpu.kernel import Kernel, arguments_of, bits_of
from kernels.cpu.native import floats, integers
from kernels.cpu.threads import parts_of
from kernels.reference.fp8_rows import are_kept_in

PART_NUMBERS = 1 << 13  # of rows, turned in some microseconds
NOTHING, ONE = np.float32(0.0), np.float32(1.0)
Arguments = arguments_of(
    "turned",  # addresses: [num_rows, num_heads, dim]
    "queries",  # [num_rows, num_heads, unturned + dim]
    "latents",  # [num_rows, rank + dim]
    "table",  # [num_positions, dim] float32: cosines, then sines
    "positions",  # [num_rows] int64
    "slots",  # [num_rows] int64
    "kv",  # [num_slots, rank + dim]
    "weight",  # [rank]
    "eps",  # [] float32
    *("num_rows", "num_positions", "num_slots", "num_heads", "unturned", "rank", "dim"),
    *("turned_row", "turned_head", "query_row", "query_head", "latent_row"),  # from one to the next, in numbers
    "factor",  # the bits of a float32: what is multiplied by it that becomes numbers of 8 bits
)


@inlined
def turned_pair(source: Any, cosines: Any, sines: Any, column: Any) -> Any:
    low, high = widen(source[column]), widen(source[len(cosines) + column])
    cos, sin = cosines[column], sines[column]
    return low * cos - high * sin, high * cos + low * sin


@cache
def latents_rotation(element: Any, kept_element: Any) -> Kernel:
    """Of tensors of these elements, and a cache of those."""

    def rotate_rows(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        num_rows, num_heads, rank, dim, half = a.num_rows, a.num_heads, a.rank, a.dim, a.dim // 2
        turned = elements(a.turned, 1, (num_rows - 1) * a.turned_row + (num_heads - 1) * a.turned_head + dim, element)
        width = a.unturned + dim
        queries = elements(a.queries, 1, (num_rows - 1) * a.query_row + (num_heads - 1) * a.query_head + width, element)
        latents = elements(a.latents, 1, (num_rows - 1) * a.latent_row + rank + dim, element)
        turns, places = floats(a.table, a.num_positions, dim), integers(a.positions, num_rows)
        kept, targets = elements(a.kv, a.num_slots, rank + dim, kept_element), integers(a.slots, num_rows)
        factor = float_of_bits(np.int32(a.factor))
        scales = elements(a.weight, 1, rank, element)[0]
        for row in range(part, num_rows, num_parts):
            cosines, sines = turns[places[row], :half], turns[places[row], half:]
            for head in range(num_heads + 1):
                if head < num_heads:
                    first = row * a.query_row + head * a.query_head + a.unturned
                    source, place = queries[0, first : first + dim], row * a.turned_row + head * a.turned_head
                    target = turned[0, place : place + dim]
                    for column in range(half):
                        low, high = turned_pair(source, cosines, sines, column)
                        target[column], target[half + column] = (
                            narrow(low, source[column]),
                            narrow(high, source[column]),
                        )
                else:
                    first = row * a.latent_row + rank
                    source, key = latents[0, first : first + dim], kept[targets[row], rank:]
                    for column in range(half):
                        low, high = turned_pair(source, cosines, sines, column)
                        key[column] = rounded_twice(low, source[column], factor, key[column])
                        key[half + column] = rounded_twice(high, source[column], factor, key[column])
            own, normed = latents[0, row * a.latent_row : row * a.latent_row + rank], kept[targets[row], :rank]
            squares = NOTHING
            for column in range(rank):
                number = widen(own[column])
                squares += number * number
            scale = ONE / np.sqrt(squares / np.float32(rank) + floats(a.eps, 1, 1)[0, 0])
            for column in range(rank):
                number = widen(own[column]) * (scale * widen(scales[column]))
                normed[column] = rounded_twice(number, own[column], factor, normed[column])

    return Kernel(rotate_rows, Arguments)


def rotate_and_store_latents(
    queries: Tensor,  # [num_rows, num_heads, unturned + dim], rows and heads may lie further apart
    latents: Tensor,  # [num_rows, rank + dim], rows may lie further apart
    table: Tensor,  # [max_model_len, dim] float32: cosines, then sines
    positions: Tensor,  # [num_rows] int64
    slot_mapping: Tensor,  # [num_rows] int64
    kv_cache: Tensor,  # [num_blocks, block_size, rank + dim]
    turned: Tensor,  # [num_rows, num_heads, dim], written; rows and heads may lie further apart
    *,
    norm: Tensor,  # [rank], of the dtype of latents
    eps: Tensor,  # [] float32
    kv_scale: float = 1.0,  # of a cache in FP8
) -> None:
    num_rows, num_heads, width = queries.shape
    rank, dim = len(norm), table.shape[1]
    assert turned.shape == (num_rows, num_heads, dim) and latents.shape == (num_rows, rank + dim)
    assert kv_cache.shape[2] == rank + dim and kv_cache.is_contiguous() and table.is_contiguous()
    assert turned.stride(2) == queries.stride(2) == latents.stride(1) == 1 and table.dtype == torch.float32
    assert queries.dtype == latents.dtype == turned.dtype == norm.dtype
    assert are_kept_in(norm.dtype, kv_cache.dtype, (kv_scale, kv_scale))
    assert positions.is_contiguous() and positions.dtype == torch.int64 and len(positions) == num_rows
    assert slot_mapping.is_contiguous() and slot_mapping.dtype == torch.int64 and len(slot_mapping) == num_rows
    if num_rows == 0:
        return
    tensors = (turned, queries, latents, table, positions, slot_mapping, kv_cache, norm, eps)
    latents_rotation(ELEMENTS[queries.dtype], ELEMENTS[kv_cache.dtype])(
        *(tensor.data_ptr() for tensor in tensors),
        *(num_rows, len(table), kv_cache.shape[0] * kv_cache.shape[1], num_heads, width - dim, rank, dim),
        *(turned.stride(0), turned.stride(1), queries.stride(0), queries.stride(1), latents.stride(0)),
        bits_of(1.0 / kv_scale),
        parts=parts_of(num_rows * (num_heads * dim + rank), PART_NUMBERS, num_rows),
    )
