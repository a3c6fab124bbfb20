"""What lies between the fused projection and the attention, in one launch: head norms, rotation, the cache's new rows.

kernels/reference/rope.py and kernels/reference/rms_norm.py are the definition. Arithmetic is float32 and rounded once,
at the end. A program takes one row and some of its heads, so a row's bits depend on that row alone.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import await_input, can_overlap
from kernels.fp8_rows import in_octets, stored
from kernels.kernel import Kernel
from kernels.partial_sums import load_row, row_arguments
from kernels.reference.fp8_rows import NO_SCALES, KVScales, are_kept_in
from kernels.reference.partial_sums import PartialSums
from kernels.registers import MAX_REGISTERS
from kernels.sizes import cdiv, next_power_of_2

HEADS = 16  # of a program: with 4 warps a thread has 16 bytes of either half of a 128 wide head
WIDE_HEADS = 4  # of heads wider than 256: the same of a 512 wide one, 16 of which fill a thread's registers


@Kernel
@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def rope_kernel(
    x_ptr,  # [num_rows, (num_heads + 2 * num_kv_heads) * HEAD_DIM], rows x_stride apart; if NUM_PARTS so many of them
    queries_ptr,  # [num_rows, num_heads * HEAD_DIM], rows queries_stride apart; x itself unless NUM_PARTS
    table_ptr,  # [max_model_len, HEAD_DIM] float32
    positions_ptr,  # [num_rows] int64
    slots_ptr,  # [num_rows] int64; None without keys and values
    kv_ptr,  # [num_slots, 2 * num_kv_heads * HEAD_DIM], or None likewise; or in_octets
    key_factor,  # what numbers are multiplied by that become octets
    value_factor,
    q_norm_ptr,  # [HEAD_DIM] or None
    k_norm_ptr,  # [HEAD_DIM] or None
    v_norm_ptr,  # [HEAD_DIM] or None
    eps_ptr,  # [] float32; None without norms
    scales_ptr,  # of partial sums [columns of x] float32, or None
    bias_ptr,  # likewise [columns of x], or None
    x_stride,
    part_stride,
    queries_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,  # >= HEAD_DIM // 2
    BLOCK_SIZE: tl.constexpr,  # slots of the null block, the first ones
    HEADS: tl.constexpr,
    NUM_PARTS: tl.constexpr,  # partial sums that x is left in; 0: none
    TURNS_FIRST: tl.constexpr,  # norms are of what is turned
    OVERLAPS: tl.constexpr,  # with the launch before
):
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = queries_ptr.dtype.element_ty
    if OVERLAPS:
        await_input()
    row = tl.program_id(0).to(tl.int64)
    # Before the norms' sums and the stores, which the compiler moves no load across.
    table_row_ptr = table_ptr + tl.load(positions_ptr + row) * HEAD_DIM
    if kv_ptr is not None:
        slot = tl.load(slots_ptr + row)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_query, is_value = head < NUM_HEADS, head >= NUM_HEADS + NUM_KV_HEADS
    columns = tl.arange(0, HALF_BLOCK)
    is_column = columns < HALF
    is_element = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & is_column[None, :]
    places = head[:, None] * HEAD_DIM + columns[None, :]
    row_ptr = x_ptr + row * x_stride
    first_stored = load_row(row_ptr, places, is_element, part_stride, scales_ptr, bias_ptr, NUM_PARTS, dtype)
    second_stored = load_row(row_ptr, places + HALF, is_element, part_stride, scales_ptr, bias_ptr, NUM_PARTS, dtype)
    cos = tl.load(table_row_ptr + columns, mask=is_column, other=0.0)[None, :]
    sin = tl.load(table_row_ptr + columns + HALF, mask=is_column, other=0.0)[None, :]
    first, second = first_stored.to(tl.float32), second_stored.to(tl.float32)
    if TURNS_FIRST:
        first, second = _turned(first, second, cos, sin)
    if eps_ptr is not None:
        mean = tl.sum(first * first + second * second, axis=1) / HEAD_DIM
        scale = tl.rsqrt(mean + tl.load(eps_ptr))[:, None]
        first *= scale * _weights(q_norm_ptr, k_norm_ptr, v_norm_ptr, columns, is_column, is_query, is_value)
        second *= scale * _weights(q_norm_ptr, k_norm_ptr, v_norm_ptr, columns + HALF, is_column, is_query, is_value)
    if v_norm_ptr is not None:
        first_stored, second_stored = first.to(first_stored.dtype), second.to(second_stored.dtype)
    if not TURNS_FIRST:
        first, second = _turned(first, second, cos, sin)
    first = tl.where(is_value[:, None], first_stored, first.to(first_stored.dtype))
    second = tl.where(is_value[:, None], second_stored, second.to(first_stored.dtype))
    query_ptrs, is_stored = queries_ptr + row * queries_stride + places, is_element & is_query[:, None]
    tl.store(query_ptrs, first, mask=is_stored)
    tl.store(query_ptrs + HALF, second, mask=is_stored)
    if kv_ptr is not None:
        cached_ptr = kv_ptr + slot * (2 * NUM_KV_HEADS * HEAD_DIM) + (places - NUM_HEADS * HEAD_DIM)
        # A padding row may hold NaN, and is not cached: a masked key's value is multiplied by 0, so it must be finite.
        is_cached = is_element & (head >= NUM_HEADS)[:, None] & (slot >= BLOCK_SIZE)
        factor = tl.where(is_value, value_factor, key_factor)[:, None]
        tl.store(cached_ptr, stored(first, factor, kv_ptr.dtype.element_ty), mask=is_cached)
        tl.store(cached_ptr + HALF, stored(second, factor, kv_ptr.dtype.element_ty), mask=is_cached)


@triton.jit
def _turned(first, second, cos, sin):
    """Both halves of heads [HEADS, HALF_BLOCK]."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _weights(q_norm_ptr, k_norm_ptr, v_norm_ptr, columns, is_column, is_query, is_value):
    """[HEADS or 1, HALF_BLOCK] float32: of heads of each kind their own, where they have one, else the keys'."""
    if k_norm_ptr is None:
        weights = _load_weights(q_norm_ptr, columns, is_column)
    else:
        weights = _load_weights(k_norm_ptr, columns, is_column)
        if q_norm_ptr is not None:
            weights = tl.where(is_query[:, None], _load_weights(q_norm_ptr, columns, is_column), weights)
        if v_norm_ptr is not None:
            weights = tl.where(is_value[:, None], _load_weights(v_norm_ptr, columns, is_column), weights)
    return weights  # the one return: two of different shapes do not compile


@triton.jit
def _load_weights(norm_ptr, columns, is_column):
    """[1, HALF_BLOCK] float32."""
    return tl.load(norm_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]


def rope_and_write(
    qkv: Tensor | PartialSums,
    table: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    v_norm: Tensor | None = None,
    eps: Tensor | None = None,
    turns_first: bool = False,
    kv_scales: KVScales = NO_SCALES,
) -> Tensor:
    """Turns a launch's queries, in place where qkv is whole, and puts its turned keys and its values into the cache.

    Args:
        qkv: [num_rows, (num_heads + 2 * num_kv_heads) * head_dim], rows may be strided. Its keys and values stay as
            they are.
        table: [max_model_len, head_dim] float32, RopeTable.compact.
        positions: [num_rows] int64.
        slot_mapping: [num_rows] int64, block * block_size + offset; in block 0, the null block, nothing is stored.
        kv_cache: [num_blocks, block_size, 2 * num_kv_heads * head_dim], keys before values; of qkv's dtype or in FP8.
        num_heads: 0 for rows of keys and values alone (DFlash's context).
        q_norm, k_norm: [head_dim], weights of the norms that come first (Qwen3), of qkv's dtype or of float32; both,
            or k_norm alone if there are no queries, or neither.
        v_norm: [head_dim], likewise of values (Gemma 4), which are not turned; only beside k_norm.
        eps: [] float32, of the norms.
        turns_first: norms are of what is turned (Hunyuan); not beside v_norm.
        kv_scales: of a cache in FP8.

    Returns:
        the queries [num_rows, num_heads * head_dim], rows may be strided.
    """
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim and kv_cache.is_contiguous()
    assert kv_cache.shape[2] == 2 * num_kv_heads * head_dim and are_kept_in(qkv.dtype, kv_cache.dtype, kv_scales)
    assert slot_mapping.dtype == torch.int64 and (v_norm is None or k_norm is not None)
    assert not turns_first or (k_norm is not None and v_norm is None)
    assert (k_norm is None) == (eps is None) and (q_norm is None) == (k_norm is None or num_heads == 0)
    return _launch(
        qkv,
        table,
        positions,
        heads=(num_heads, num_kv_heads, head_dim),
        slots_ptr=slot_mapping,
        kv_ptr=in_octets(kv_cache),
        key_factor=1.0 / kv_scales[0],
        value_factor=1.0 / kv_scales[1],
        q_norm_ptr=q_norm,
        k_norm_ptr=k_norm,
        v_norm_ptr=v_norm,
        eps_ptr=eps,
        BLOCK_SIZE=kv_cache.shape[1],
        TURNS_FIRST=turns_first,
    )


def rotate(
    queries: Tensor | PartialSums,
    table: Tensor,
    positions: Tensor,
    *,
    num_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    eps: Tensor | None = None,
) -> Tensor:
    """Turns queries that have no keys beside them, as of layers that read another's (Gemma 4), in place where whole.

    Args:
        queries: [num_rows, num_heads * head_dim], rows may be strided.
        table, positions: as rope_and_write has them.
        q_norm: [head_dim], weight of the norm that comes first, of the queries' dtype or of float32.
        eps: [] float32, of the norm.

    Returns:
        the queries [num_rows, num_heads * head_dim], rows may be strided.
    """
    assert queries.shape[1] == num_heads * head_dim and (q_norm is None) == (eps is None)
    return _launch(
        queries,
        table,
        positions,
        heads=(num_heads, 0, head_dim),
        slots_ptr=None,
        kv_ptr=None,
        key_factor=1.0,
        value_factor=1.0,
        q_norm_ptr=q_norm,
        k_norm_ptr=None,
        v_norm_ptr=None,
        eps_ptr=eps,
        BLOCK_SIZE=0,
        TURNS_FIRST=False,
    )


def _launch(
    rows: Tensor | PartialSums,
    table: Tensor,
    positions: Tensor,
    heads: tuple[int, int, int],  # of queries, of keys, and elements of each
    **others: Any,  # of the kernel's arguments
) -> Tensor:  # the queries
    num_heads, num_kv_heads, head_dim = heads
    num_rows, columns = rows.shape[0], num_heads * head_dim
    assert table.dtype == torch.float32 and table.is_contiguous() and table.shape[1] == head_dim
    assert positions.dtype == torch.int64
    if isinstance(rows, PartialSums):
        queries = rows.parts.new_empty(num_rows, columns, dtype=rows.dtype)
    else:
        queries = rows[:, :columns]
    overlaps, of_program = can_overlap(queries.device), HEADS if head_dim <= 256 else WIDE_HEADS
    if num_rows:
        rope_kernel[(num_rows, cdiv(num_heads + 2 * num_kv_heads, of_program))](
            queries_ptr=queries,
            table_ptr=table,
            positions_ptr=positions,
            queries_stride=queries.stride(0),
            **row_arguments(rows),
            **others,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HALF_BLOCK=next_power_of_2(head_dim // 2),
            HEADS=of_program,
            OVERLAPS=overlaps,
            launch_pdl=overlaps,
            num_warps=4,
            maxnreg=MAX_REGISTERS,
            enable_fp_fusion=False,  # as torch rounds: products, then their sum
        )
    return queries
