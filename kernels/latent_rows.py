"""What lies between latent attention's projections and its attention, in one launch: norm, rotations, the cache's rows.

kernels/reference/latent_rows.py is the definition. Rotations are float32 and rounded once, at the end; the norm is that
of kernels/rms_norm.py. A program takes one row's latent and key, or some of its heads, so a row's bits depend on that
row alone.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import await_input, can_overlap
from kernels.fp8_rows import in_octets, stored
from kernels.kernel import Kernel
from kernels.reference.fp8_rows import are_kept_in
from kernels.registers import MAX_REGISTERS
from kernels.rms_norm import norm_row
from kernels.sizes import cdiv, next_power_of_2

HEADS = 32  # of a program: with 4 warps a thread has 16 bytes of either half of 64 turned elements


@triton.jit
def turn(first_ptrs, second_ptrs, is_element, cos, sin):
    """What is at the pointers, of pairs the first and the second element, after their rotation."""
    first_stored = tl.load(first_ptrs, mask=is_element, other=0.0)
    second_stored = tl.load(second_ptrs, mask=is_element, other=0.0)
    first, second = first_stored.to(tl.float32), second_stored.to(tl.float32)
    rotated_first = (first * cos - second * sin).to(first_stored.dtype)
    return rotated_first, (second * cos + first * sin).to(first_stored.dtype)


@Kernel
@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def latent_rows_kernel(
    queries_ptr,  # [num_rows, NUM_HEADS, UNTURNED + TURNED], strided
    latents_ptr,  # [num_rows, RANK + TURNED], rows latents_stride apart
    table_ptr,  # [max_model_len, TURNED] float32
    positions_ptr,  # [num_rows] int64
    slots_ptr,  # [num_rows] int64
    kv_ptr,  # [num_slots, RANK + TURNED]; or in_octets
    turned_ptr,  # [num_rows, NUM_HEADS, TURNED], strided
    norm_ptr,  # [RANK]
    eps_ptr,  # [] float32
    factor,  # what numbers are multiplied by that become octets
    queries_row_stride,
    queries_head_stride,
    latents_stride,
    turned_row_stride,
    turned_head_stride,
    NUM_HEADS: tl.constexpr,
    UNTURNED: tl.constexpr,
    TURNED: tl.constexpr,
    HALF_BLOCK: tl.constexpr,  # >= TURNED // 2
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,  # >= RANK
    BLOCK_SIZE: tl.constexpr,  # slots of the null block, the first ones
    HEADS: tl.constexpr,
    OVERLAPS: tl.constexpr,  # with the launch before
):
    HALF: tl.constexpr = TURNED // 2
    if OVERLAPS:
        await_input()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    table_row_ptr = table_ptr + tl.load(positions_ptr + row) * TURNED
    columns = tl.arange(0, HALF_BLOCK)
    is_column = columns < HALF
    cos = tl.load(table_row_ptr + columns, mask=is_column, other=0.0)
    sin = tl.load(table_row_ptr + columns + HALF, mask=is_column, other=0.0)
    if part == 0:
        slot = tl.load(slots_ptr + row)
        places = tl.arange(0, RANK_BLOCK)
        is_place = places < RANK
        latent_ptr = latents_ptr + row * latents_stride
        key_ptrs = latent_ptr + RANK + columns
        latent = tl.load(latent_ptr + places, mask=is_place, other=0.0)
        weight = tl.load(norm_ptr + places, mask=is_place, other=0.0)
        key_first, key_second = turn(key_ptrs, key_ptrs + HALF, is_column, cos, sin)
        # A padding row may hold NaN, and is not cached: a masked key's value is multiplied by 0, so it must be finite.
        is_cached = slot >= BLOCK_SIZE
        cached_ptr = kv_ptr + slot * (RANK + TURNED)
        kept: tl.constexpr = kv_ptr.dtype.element_ty
        normed = norm_row(latent, weight, tl.load(eps_ptr), RANK)
        tl.store(cached_ptr + places, stored(normed, factor, kept), mask=is_place & is_cached)
        tl.store(cached_ptr + RANK + columns, stored(key_first, factor, kept), mask=is_column & is_cached)
        tl.store(cached_ptr + RANK + HALF + columns, stored(key_second, factor, kept), mask=is_column & is_cached)
    else:
        head = (part - 1) * HEADS + tl.arange(0, HEADS)
        is_element = (head < NUM_HEADS)[:, None] & is_column[None, :]
        query_ptr = queries_ptr + row * queries_row_stride + UNTURNED
        query_ptrs = query_ptr + head[:, None] * queries_head_stride + columns[None, :]
        first, second = turn(query_ptrs, query_ptrs + HALF, is_element, cos[None, :], sin[None, :])
        turned_ptrs = turned_ptr + row * turned_row_stride + head[:, None] * turned_head_stride + columns[None, :]
        tl.store(turned_ptrs, first, mask=is_element)
        tl.store(turned_ptrs + HALF, second, mask=is_element)


def rotate_and_store_latents(
    queries: Tensor,
    latents: Tensor,
    table: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    turned: Tensor,
    *,
    norm: Tensor,
    eps: Tensor,
    kv_scale: float = 1.0,
) -> None:
    """Puts a launch's normed latents and turned keys into the cache, and what is turned of its queries into `turned`.

    Args:
        queries: [num_rows, num_heads, unturned + d], rows and heads may lie apart.
        latents: [num_rows, rank + d], rows may lie apart.
        table: [max_model_len, d] float32, RopeTable.compact.
        positions: [num_rows] int64.
        slot_mapping: [num_rows] int64, block * block_size + offset; in block 0, the null block, nothing is stored.
        kv_cache: [num_blocks, block_size, rank + d], of the others' dtype or in FP8.
        turned: [num_rows, num_heads, d], rows and heads may lie apart.
        norm: [rank], weight of the latents' norm, of their dtype or of float32.
        eps: [] float32, of the norm.
        kv_scale: of a cache in FP8.
    """
    num_rows, num_heads, query_width = queries.shape
    rank, turned_width = len(norm), turned.shape[2]
    assert latents.shape == (num_rows, rank + turned_width) and kv_cache.shape[2] == rank + turned_width
    assert kv_cache.is_contiguous() and norm.is_contiguous()
    assert turned.shape[:2] == queries.shape[:2] and turned_width <= query_width
    assert queries.stride(2) == latents.stride(1) == turned.stride(2) == 1
    assert queries.dtype == latents.dtype == turned.dtype
    assert are_kept_in(queries.dtype, kv_cache.dtype, (kv_scale, kv_scale))
    assert norm.dtype in (latents.dtype, torch.float32) and eps.dtype == torch.float32
    assert table.dtype == torch.float32 and table.is_contiguous() and table.shape[1] == turned_width
    assert positions.dtype == slot_mapping.dtype == torch.int64
    if num_rows == 0:
        return
    overlaps = can_overlap(kv_cache.device)
    latent_rows_kernel[(num_rows, 1 + cdiv(num_heads, HEADS))](
        queries,
        latents,
        table,
        positions,
        slot_mapping,
        in_octets(kv_cache),
        turned,
        norm,
        eps,
        1.0 / kv_scale,
        queries.stride(0),
        queries.stride(1),
        latents.stride(0),
        turned.stride(0),
        turned.stride(1),
        NUM_HEADS=num_heads,
        UNTURNED=query_width - turned_width,
        TURNED=turned_width,
        HALF_BLOCK=next_power_of_2(turned_width // 2),
        RANK=rank,
        RANK_BLOCK=next_power_of_2(rank),
        BLOCK_SIZE=kv_cache.shape[1],
        HEADS=HEADS,
        OVERLAPS=overlaps,
        launch_pdl=overlaps,
        num_warps=4,
        maxnreg=MAX_REGISTERS,
        enable_fp_fusion=False,  # as torch rounds: products, then their sum
    )
