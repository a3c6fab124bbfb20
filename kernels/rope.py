"""What lies between the fused projection and the attention, in one launch: head norms, rotation, the cache's new rows.

kernels/reference/rope.py and kernels/reference/rms_norm.py are the definition. Arithmetic is float32 and rounded once,
at the end. A program takes one row and some of its heads, so a row's bits depend on that row alone.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import await_input, can_overlap
from kernels.kernel import Kernel
from kernels.partial_sums import load_row, row_arguments
from kernels.reference.partial_sums import PartialSums
from kernels.sizes import cdiv, next_power_of_2

MAX_REGISTERS = 128  # of a thread. Told so, ptxas lets a program ask for all that it reads before it waits for any
HEADS = 16  # of a program: with 4 warps a thread has 16 bytes of either half of a 128 wide head


@Kernel
@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def rope_kernel(
    x_ptr,  # [num_rows, (num_heads + 2 * num_kv_heads) * HEAD_DIM], rows x_stride apart; if NUM_PARTS so many of them
    queries_ptr,  # [num_rows, num_heads * HEAD_DIM], rows queries_stride apart; x itself unless NUM_PARTS
    table_ptr,  # [max_model_len, HEAD_DIM] float32
    positions_ptr,  # [num_rows] int64
    slots_ptr,  # [num_rows] int64
    kv_ptr,  # [num_slots, 2 * num_kv_heads * HEAD_DIM]
    q_norm_ptr,  # [HEAD_DIM] or None
    k_norm_ptr,  # [HEAD_DIM] or None
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
    OVERLAPS: tl.constexpr,  # with the launch before
):
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = kv_ptr.dtype.element_ty
    if OVERLAPS:
        await_input()
    row = tl.program_id(0).to(tl.int64)
    # Before the norms' sums and the stores, which the compiler moves no load across.
    table_row_ptr = table_ptr + tl.load(positions_ptr + row) * HEAD_DIM
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
    if k_norm_ptr is not None:
        mean = tl.sum(first * first + second * second, axis=1) / HEAD_DIM
        scale = tl.rsqrt(mean + tl.load(eps_ptr))[:, None]
        first *= scale * _weights(q_norm_ptr, k_norm_ptr, columns, is_column, is_query)
        second *= scale * _weights(q_norm_ptr, k_norm_ptr, columns + HALF, is_column, is_query)
    rotated_first = (first * cos - second * sin).to(first_stored.dtype)
    rotated_second = (second * cos + first * sin).to(first_stored.dtype)
    first = tl.where(is_value[:, None], first_stored, rotated_first)
    second = tl.where(is_value[:, None], second_stored, rotated_second)
    query_ptrs, is_stored = queries_ptr + row * queries_stride + places, is_element & is_query[:, None]
    tl.store(query_ptrs, first, mask=is_stored)
    tl.store(query_ptrs + HALF, second, mask=is_stored)
    cached_ptr = kv_ptr + slot * (2 * NUM_KV_HEADS * HEAD_DIM) + (places - NUM_HEADS * HEAD_DIM)
    # A padding row may hold NaN, and is not cached: a masked key's value is multiplied by 0, so it must be finite.
    is_cached = is_element & (head >= NUM_HEADS)[:, None] & (slot >= BLOCK_SIZE)
    tl.store(cached_ptr, first, mask=is_cached)
    tl.store(cached_ptr + HALF, second, mask=is_cached)


@triton.jit
def _weights(q_norm_ptr, k_norm_ptr, columns, is_column, is_query):
    """[HEADS or 1, HALF_BLOCK] float32: of query heads the first, where there is one, of all others the second."""
    weights = tl.load(k_norm_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if q_norm_ptr is not None:
        of_queries = tl.load(q_norm_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        weights = tl.where(is_query[:, None], of_queries, weights)
    return weights  # the one return: two of different shapes do not compile


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
    eps: Tensor | None = None,
) -> Tensor:
    """Turns a launch's queries, in place where qkv is whole, and puts its turned keys and its values into the cache.

    Args:
        qkv: [num_rows, (num_heads + 2 * num_kv_heads) * head_dim], rows may be strided. Its keys stay as they are.
        table: [max_model_len, head_dim] float32, RopeTable.compact.
        positions: [num_rows] int64.
        slot_mapping: [num_rows] int64, block * block_size + offset; in block 0, the null block, nothing is stored.
        kv_cache: [num_blocks, block_size, 2 * num_kv_heads * head_dim], keys before values.
        num_heads: 0 for rows of keys and values alone (DFlash's context).
        q_norm, k_norm: [head_dim], weights of the norms that come first (Qwen3), of qkv's dtype or of float32; both,
            or the latter if there are no queries, or neither.
        eps: [] float32, of the norms.

    Returns:
        the queries [num_rows, num_heads * head_dim], rows may be strided.
    """
    num_rows, width = qkv.shape
    num_all_heads = num_heads + 2 * num_kv_heads
    assert width == num_all_heads * head_dim and kv_cache.is_contiguous()
    assert kv_cache.shape[2] == 2 * num_kv_heads * head_dim and kv_cache.dtype == qkv.dtype
    assert table.dtype == torch.float32 and table.is_contiguous() and table.shape[1] == head_dim
    assert positions.dtype == slot_mapping.dtype == torch.int64
    assert (k_norm is None) == (eps is None) and (q_norm is None) == (k_norm is None or num_heads == 0)
    overlaps, columns = can_overlap(kv_cache.device), num_heads * head_dim
    queries = kv_cache.new_empty(num_rows, columns) if isinstance(qkv, PartialSums) else qkv[:, :columns]
    if num_rows:
        rope_kernel[(num_rows, cdiv(num_all_heads, HEADS))](
            queries_ptr=queries,
            table_ptr=table,
            positions_ptr=positions,
            slots_ptr=slot_mapping,
            kv_ptr=kv_cache,
            q_norm_ptr=q_norm,
            k_norm_ptr=k_norm,
            eps_ptr=eps,
            queries_stride=queries.stride(0),
            **row_arguments(qkv),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HALF_BLOCK=next_power_of_2(head_dim // 2),
            BLOCK_SIZE=kv_cache.shape[1],
            HEADS=HEADS,
            OVERLAPS=overlaps,
            launch_pdl=overlaps,
            num_warps=4,
            maxnreg=MAX_REGISTERS,
            enable_fp_fusion=False,  # as torch rounds: products, then their sum
        )
    return queries
