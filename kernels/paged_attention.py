"""kernels/reference/paged_attention.py on a GPU: flash attention over a paged cache, each row on its own.

A program takes BLOCK_M packed rows, the query heads of one KV head times a tile's launch rows, so that keys and values
are read once for all of them; a KV head with more query heads has several programs. Where values are the first columns
of keys (latent attention: DeepSeek-V2, arXiv 2405.04434), they are read once and multiplied as both. Other values that
are wider than VALUE_COLUMNS (Gemma 4) are shared among programs, each of which multiplies by all keys. Split form
(decode and verification, after Flash-Decoding): a program sees the keys of one split, and merge_splits.py merges each
row's splits. Whole form (prompts): it walks all keys of its tile.

A row's bits depend on its query and its visible keys alone. Keys sit at their absolute positions in blocks of BLOCK_N
and in splits, so every product and every sum has the same shape wherever a row is; a block that only a neighbour needs
multiplies by exactly 1 and adds exact zeros; splits that only a neighbour needs are not merged. Only
tl.fma fuses a product and a sum (enable_fp_fusion=False), so programs compiled for other arguments round alike.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import await_input, can_overlap
from kernels.exp2 import LOG2_E
from kernels.fp8_rows import in_pairs, load_fp8_rows
from kernels.kernel import Kernel
from kernels.merge_splits import merge_splits, visible, with_sink
from kernels.paged_segments import PagedSegments
from kernels.reference.fp8_rows import FP8, NO_SCALES, KVScales, are_kept_in
from kernels.shared_memory import shared_memory
from kernels.sizes import cdiv, next_power_of_2
from kernels.tanh import tanh

BLOCK_M = 64  # packed rows of a tile: with 4 warps, what Hopper's wgmma takes, for one row as for many
BLOCK_N = 64  # keys of a step
WIDE_BLOCK_N = 32  # of heads wider than 128: with 64 keys a thread's registers would not hold a step
NARROW_BLOCK_N = 16  # of heads wider than 256: the slots of 32 keys would have no registers left; and of short memory
FLOAT32_BLOCK_N = 16  # float32 has no tensor cores: plain multiply-adds, all of a step's in registers
SPLIT_KEYS = 512  # keys of a split; a multiple of BLOCK_N
OWN_SPLITS = 2  # of a tree's row: the split in which its tree begins, and the next one
# Values apart that a program takes: all that registers of four warps hold beside a step. Eight hold twice as many, but
# Triton lays them along the rows of a first product whose result another one takes, and there are no more than four
# warps' rows: both halves would multiply the same queries and keys. They do where values lie in keys.
VALUE_COLUMNS = 256
STAGE_BYTES = 96 * 1024  # shared memory for keys and values on their way; sm_80 has 163 KB, the queries need some too
# Queries wider than 256 need so much memory that they are counted: bytes of both. A GPU that has less than the second
# number for a program (compute capability 8.6, 8.9, 12.0) takes NARROW_BLOCK_N keys at a time, from as many bytes of a
# key and value on as the third says, and counts the queries too.
WIDE_BYTES, LEAST_WIDE_BYTES, WIDE_KEY_BYTES = 220 * 1024, 120 * 1024, 1024


def rows_per_tile(num_heads: int, num_kv_heads: int) -> int:
    """Launch rows that fill a tile."""
    return BLOCK_M // heads_of_a_program(num_heads, num_kv_heads)


@cache
def heads_of_a_program(num_heads: int, num_kv_heads: int) -> int:
    """All query heads of a KV head, or as large an equal share of them as a tile holds."""
    group = num_heads // num_kv_heads
    assert group * num_kv_heads == num_heads, "every KV head has as many query heads"
    return max(share for share in range(1, min(group, BLOCK_M) + 1) if group % share == 0)


@triton.jit
def slots_of(
    keys, last_seen, table_ptr, branch_ptr, branch_start, BLOCK_SIZE: tl.constexpr, HAS_BRANCHES: tl.constexpr
):
    """[BLOCK_N] int32: the cache slots of keys (positions); undefined for keys past last_seen."""
    is_seen = keys <= last_seen
    slots = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_seen, other=0) * BLOCK_SIZE + keys % BLOCK_SIZE
    if HAS_BRANCHES:
        is_apart = is_seen & (keys >= branch_start)
        slots = tl.where(is_apart, tl.load(branch_ptr + keys - branch_start, mask=is_apart, other=0), slots)
    return slots


@Kernel
@triton.jit(
    do_not_specialize=["table_stride", "branch_stride", "num_splits", "num_shared_tiles", "segments_per_table"],
    do_not_specialize_on_alignment=[
        "totals_ptr",
        "segments_ptr",
        "rows_ptr",
        "sizes_ptr",
        "positions_ptr",
        "first_keys_ptr",
        "last_keys_ptr",
        "tables_ptr",
        "branch_starts_ptr",
        "branch_slots_ptr",
    ],
)
def attend_kernel(
    query_ptr,  # [num_rows, num_heads, head_dim], strided
    kv_ptr,  # [num_slots, NUM_KV_HEADS * (HEAD_DIM + VALUE_DIM)]; if VALUES_IN_KEYS [num_slots, HEAD_DIM]; or in_pairs
    output_ptr,  # whole: [num_rows, num_heads, VALUE_DIM]; split: [num_rows, num_heads, num_splits, VALUE_DIM] float32
    maxima_ptr,  # split: [num_rows, num_heads, num_splits] float32; whole: None
    totals_ptr,  # as maxima_ptr
    sinks_ptr,  # whole: [num_heads] or None
    segments_ptr,  # [num_tiles], and so on: PagedSegments
    rows_ptr,
    sizes_ptr,
    positions_ptr,
    first_keys_ptr,  # or None: 0
    last_keys_ptr,
    tables_ptr,
    branch_starts_ptr,
    branch_slots_ptr,
    scale,  # of the logits, with that of keys; times log2(e) unless they are capped
    value_scale,
    query_row_stride,
    query_head_stride,
    table_stride,
    branch_stride,
    num_splits,
    num_shared_tiles,
    segments_per_table,
    GROUP: tl.constexpr,  # query heads of a program
    SHARES: tl.constexpr,  # programs that a KV head's query heads are shared among
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,  # >= HEAD_DIM; if VALUES_IN_KEYS VALUE_BLOCK
    VALUE_BLOCK: tl.constexpr,  # times VALUE_PARTS >= VALUE_DIM
    VALUE_PARTS: tl.constexpr,  # programs that a head's values are shared among
    TAIL_BLOCK: tl.constexpr,  # if VALUES_IN_KEYS >= HEAD_DIM - VALUE_DIM, or 0 where there are no such columns
    VALUES_IN_KEYS: tl.constexpr,  # of the one KV head: its first VALUE_DIM columns are both
    BLOCK_SIZE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,  # 0: whole
    OWN_SPLITS: tl.constexpr,  # that the keys from a tile's first_keys on lie in, at most
    WINDOW: tl.constexpr,  # 0: none; below 0: chunks of so many
    IS_CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,  # 0: none
    HAS_BRANCHES: tl.constexpr,
    OVERLAPS: tl.constexpr,  # with the launch before
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One tile, share of heads and split: the attention, or, split, its numerators and their sums and maxima."""
    WIDTH: tl.constexpr = NUM_KV_HEADS * (HEAD_DIM + (0 if VALUES_IN_KEYS else VALUE_DIM))
    KEY_DIM: tl.constexpr = VALUE_DIM if VALUES_IN_KEYS else HEAD_DIM  # columns of the first product
    IS_FP8: tl.constexpr = kv_ptr.dtype.element_ty == tl.int16
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    if OVERLAPS:
        await_input()
    tile, share, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if VALUE_PARTS > 1:
        value_part, share = share % VALUE_PARTS, share // VALUE_PARTS
    kv_head = share // SHARES
    if first_keys_ptr is not None:  # shared tiles have a program for each split, the others for those they attend to
        own = tile - num_shared_tiles * num_splits
        split = tl.where(own < 0, tile % num_splits, own % OWN_SPLITS)
        tile = tl.where(own < 0, tile // num_splits, num_shared_tiles + own // OWN_SPLITS)
        split += tl.load(first_keys_ptr + tile) // SPLIT_KEYS
    # All that a tile is known by at once: what is asked for behind a condition waits for it.
    size, position, last_key = tl.load(sizes_ptr + tile), tl.load(positions_ptr + tile), tl.load(last_keys_ptr + tile)
    segment, first_row = tl.load(segments_ptr + tile), tl.load(rows_ptr + tile)
    first_seen, _ = visible(position, last_key, WINDOW, IS_CAUSAL)
    _, last_seen = visible(position + size - 1, last_key, WINDOW, IS_CAUSAL)
    start, stop = first_seen // BLOCK_N * BLOCK_N, last_seen + 1
    if SPLIT_KEYS > 0:
        start, stop = tl.maximum(start, split * SPLIT_KEYS), tl.minimum(stop, (split + 1) * SPLIT_KEYS)
        if first_keys_ptr is not None:
            start = tl.maximum(start, tl.load(first_keys_ptr + tile))
    if size == 0 or start >= stop:
        return

    table_ptr = tables_ptr + (segment // segments_per_table).to(tl.int64) * table_stride
    branch_start = tl.load(branch_starts_ptr + segment)
    branch_ptr = branch_slots_ptr + segment.to(tl.int64) * branch_stride
    packed = tl.arange(0, BLOCK_M)
    row_in_tile = packed // GROUP
    row = (first_row + row_in_tile).to(tl.int64)
    head = share * GROUP + packed % GROUP
    is_row = row_in_tile < size
    # Places without a row see what the last row sees: if they saw no key, they would divide zero by zero.
    first, last = visible(position + tl.minimum(row_in_tile, size - 1), last_key, WINDOW, IS_CAUSAL)
    head_columns, value_columns = tl.arange(0, HEAD_BLOCK), tl.arange(0, VALUE_BLOCK)
    if VALUE_PARTS > 1:
        value_columns += value_part * VALUE_BLOCK
    is_head_column, is_value_column = head_columns < KEY_DIM, value_columns < VALUE_DIM
    query = tl.load(
        query_ptr + (row * query_row_stride + head * query_head_stride)[:, None] + head_columns[None, :],
        mask=is_row[:, None] & is_head_column[None, :],
        other=0.0,
    )
    if TAIL_BLOCK > 0:
        tail_columns = VALUE_DIM + tl.arange(0, TAIL_BLOCK)
        is_tail_column = tail_columns < HEAD_DIM
        query_tail = tl.load(
            query_ptr + (row * query_row_stride + head * query_head_stride)[:, None] + tail_columns[None, :],
            mask=is_row[:, None] & is_tail_column[None, :],
            other=0.0,
        )
    key_column, value_column = kv_head * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM + kv_head * VALUE_DIM
    key_ptr, value_ptr = kv_ptr + key_column, kv_ptr + value_column

    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    numerator = tl.zeros((BLOCK_M, VALUE_BLOCK), tl.float32)
    in_block = tl.arange(0, BLOCK_N)
    slots = slots_of(start + in_block, last_seen, table_ptr, branch_ptr, branch_start, BLOCK_SIZE, HAS_BRANCHES)
    for block in range(start, stop, BLOCK_N):
        keys = block + in_block
        # Looked up a block ahead. If a block's keys depended on what the same block loads from the table, Triton's
        # pipeline would give that load half of its stages, and wait for each block before it computes anything.
        next_slots = slots_of(keys + BLOCK_N, last_seen, table_ptr, branch_ptr, branch_start, BLOCK_SIZE, HAS_BRANCHES)
        # Keys that no row of the tile sees are not read: their memory may hold anything, even NaN.
        is_key = (keys >= first_seen) & (keys <= last_seen)
        if IS_FP8:
            key = tl.trans(load_fp8_rows(kv_ptr, slots, is_key, key_column, KEY_DIM, HEAD_BLOCK, WIDTH, dtype))
        else:
            key = tl.load(
                key_ptr + slots.to(tl.int64)[None, :] * WIDTH + head_columns[:, None],
                mask=is_key[None, :] & is_head_column[:, None],
                other=0.0,
            )
        logits = tl.dot(query, key, input_precision="ieee")
        if TAIL_BLOCK > 0:
            if IS_FP8:
                tail = load_fp8_rows(kv_ptr, slots, is_key, VALUE_DIM, HEAD_DIM - VALUE_DIM, TAIL_BLOCK, WIDTH, dtype)
                key_tail = tl.trans(tail)
            else:
                key_tail = tl.load(
                    key_ptr + slots.to(tl.int64)[None, :] * WIDTH + tail_columns[:, None],
                    mask=is_key[None, :] & is_tail_column[:, None],
                    other=0.0,
                )
            logits = tl.dot(query_tail, key_tail, logits, input_precision="ieee")
        logits *= scale
        if SOFTCAP > 0:
            logits = tanh(logits) * (SOFTCAP * LOG2_E)
        is_visible = (keys[None, :] >= first[:, None]) & (keys[None, :] <= last[:, None])
        logits = tl.where(is_visible, logits, float("-inf"))
        larger = tl.maximum(maximum, tl.max(logits, axis=1))
        # A row that has seen no key yet keeps its zeros; -inf minus -inf would be NaN.
        base = tl.where(larger == float("-inf"), 0.0, larger)
        alpha = tl.exp2(maximum - base)
        weights = tl.exp2(logits - base[:, None])
        total = tl.fma(total, alpha, tl.sum(weights, axis=1))
        if VALUES_IN_KEYS:
            value = tl.trans(key)
        elif IS_FP8:
            columns_left = VALUE_DIM
            if VALUE_PARTS > 1:
                columns_left -= value_part * VALUE_BLOCK
            first_column = value_column + VALUE_DIM - columns_left
            value = load_fp8_rows(kv_ptr, slots, is_key, first_column, columns_left, VALUE_BLOCK, WIDTH, dtype)
        else:
            value = tl.load(
                value_ptr + slots.to(tl.int64)[:, None] * WIDTH + value_columns[None, :],
                mask=is_key[:, None] & is_value_column[None, :],
                other=0.0,
            )
        numerator = tl.dot(weights.to(value.dtype), value, numerator * alpha[:, None], input_precision="ieee")
        maximum, slots = larger, next_slots

    if VALUES_IN_KEYS or VALUE_PARTS > 1:
        # The same without quotients, where it can be: a thread stores parts of many rows, and what it knew of each
        # since before the loop would have no registers.
        is_row = packed < size * GROUP
        OTHERS: tl.constexpr = (NUM_KV_HEADS * SHARES - 1) * GROUP  # heads of a row that other programs take
        result_row = first_row.to(tl.int64) * (OTHERS + GROUP) + share * GROUP + packed
        if OTHERS > 0:
            result_row += packed // GROUP * OTHERS
    else:
        result_row = row * (NUM_KV_HEADS * SHARES * GROUP) + head
    if SPLIT_KEYS > 0:
        result_row = result_row * num_splits + split
        tl.store(maxima_ptr + result_row, maximum, mask=is_row)
        tl.store(totals_ptr + result_row, total, mask=is_row)
    else:
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
            alpha, total = with_sink(maximum, total, sink)
            numerator *= alpha[:, None]
        numerator = numerator / total[:, None] * value_scale
    tl.store(
        output_ptr + result_row[:, None] * VALUE_DIM + value_columns[None, :],
        numerator.to(output_ptr.dtype.element_ty),
        mask=is_row[:, None] & is_value_column[None, :],
    )


def paged_attention(
    query: Tensor,  # [num_rows, num_heads, head_dim]; heads and rows may be strided
    kv_cache: Tensor,  # [num_blocks, block_size, num_kv_heads * (head_dim + value_dim)], keys before values
    segments: PagedSegments,
    *,
    num_kv_heads: int,
    value_dim: int,
    scale: float,
    split_keys: int | None,  # None: whole. Part of a token's arithmetic, so one choice for a model and kind of launch
    values_in_keys: bool = False,  # one KV head [.., head_dim], whose first value_dim elements are values too (MLA)
    sliding_window: int | None = None,
    attention_chunk: int | None = None,  # a text is cut into so many tokens, and a row sees its own piece (Llama 4)
    is_causal: bool = True,  # False: a row sees up to its tile's last_keys
    softcap: float | None = None,  # logits become softcap * tanh(logits / softcap) (Gemma 2)
    sinks: Tensor | None = None,  # [num_heads]: a logit that takes mass and yields nothing (gpt-oss)
    kv_scales: KVScales = NO_SCALES,  # of a cache in FP8
) -> Tensor:  # [num_rows, num_heads * value_dim]
    """kernels.reference.paged_attention.paged_attention by the kernels above; float32, float16 or bfloat16."""
    num_rows, num_heads, head_dim = query.shape
    is_split = split_keys is not None and segments.max_context > split_keys
    window = sliding_window or -(attention_chunk or 0)
    assert window >= 0 or is_causal
    shares = is_split and segments.num_shared_tiles > 0 and window == 0
    own = segments.own_tiles  # every row is in one
    attending = segments if shares else own
    num_tiles = len(attending.tile_rows)
    assert query.stride(2) == 1 and kv_cache.is_contiguous() and are_kept_in(query.dtype, kv_cache.dtype, kv_scales)
    assert kv_cache.shape[2] == (head_dim if values_in_keys else num_kv_heads * (head_dim + value_dim))
    assert not values_in_keys or (num_kv_heads == 1 and value_dim <= head_dim)
    assert not values_in_keys or kv_scales[0] == kv_scales[1]
    assert segments.max_tile_size <= rows_per_tile(num_heads, num_kv_heads)
    assert split_keys is None or split_keys % BLOCK_N == 0
    output = query.new_empty(num_rows, num_heads * value_dim)
    if num_tiles == 0:
        return output
    blocks = blocks_of(head_dim, value_dim, values_in_keys=values_in_keys)
    value_parts = blocks["VALUE_PARTS"]
    seen: dict[str, Any] = {"WINDOW": window, "IS_CAUSAL": is_causal}
    seen |= {"SPLIT_KEYS": split_keys if is_split else 0, "VALUE_DIM": value_dim}
    overlaps = can_overlap(query.device)
    num_splits = cdiv(segments.max_context, split_keys) if is_split and split_keys is not None else 1
    attended, maxima, sums = output, None, None
    if is_split:
        maxima, sums = query.new_empty(2, num_rows, num_heads, num_splits, dtype=torch.float32)
        attended = query.new_empty(num_rows, num_heads, num_splits, value_dim, dtype=torch.float32)
    scale *= kv_scales[0]
    group = heads_of_a_program(num_heads, num_kv_heads)
    programs = num_heads // group * value_parts  # of a tile and split
    grid = (num_tiles, programs, num_splits)
    if shares:
        assert split_keys is not None and segments.branch_slots.shape[1] <= split_keys  # so that OWN_SPLITS suffice
        grid = (segments.num_shared_tiles * num_splits + len(own.tile_rows) * OWN_SPLITS, programs, 1)
    attend_kernel[grid](
        query,
        in_pairs(kv_cache),
        attended,
        maxima,
        sums,
        None if is_split else sinks,
        attending.tile_segments,
        attending.tile_rows,
        attending.tile_sizes,
        attending.tile_positions,
        segments.first_keys if shares else None,
        attending.last_keys,
        segments.block_tables,
        segments.branch_starts,
        segments.branch_slots,
        scale * LOG2_E.value if softcap is None else scale / softcap,
        kv_scales[1],
        query.stride(0),
        query.stride(1),
        segments.block_tables.stride(0),
        segments.branch_slots.stride(0),
        num_splits,
        segments.num_shared_tiles,
        segments.segments_per_table,
        GROUP=group,
        SHARES=num_heads // (num_kv_heads * group),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        VALUES_IN_KEYS=values_in_keys,
        BLOCK_SIZE=kv_cache.shape[1],
        SOFTCAP=softcap or 0.0,
        OWN_SPLITS=OWN_SPLITS,
        HAS_BRANCHES=segments.branch_slots.shape[1] > 0,
        OVERLAPS=overlaps,
        launch_pdl=overlaps,
        BLOCK_M=BLOCK_M,
        **blocks,
        **seen,
        **launch_options(
            blocks,
            query.element_size(),
            values_in_keys=values_in_keys,
            is_fp8=kv_cache.dtype == FP8,
            capacity=shared_memory(query.device),
        ),
    )
    if is_split:
        merge_splits(
            attended,
            maxima,
            sums,
            output,
            sinks,
            kv_scales[1],
            own.tile_rows,
            own.tile_sizes,
            own.tile_positions,
            own.last_keys,
            segments.max_tile_size,
            VALUE_BLOCK=blocks["VALUE_BLOCK"] * value_parts,
            **seen,
        )
    return output


@cache
def blocks_of(head_dim: int, value_dim: int, *, values_in_keys: bool) -> dict[str, int]:
    """Of attend_kernel: columns that a program takes, rounded up to powers of two, and programs of a head's values."""
    head_block, value_block = (max(16, next_power_of_2(dim)) for dim in (head_dim, value_dim))
    if values_in_keys:
        tail_block = max(16, next_power_of_2(head_dim - value_dim)) if head_dim > value_dim else 0
        return {"HEAD_BLOCK": value_block, "TAIL_BLOCK": tail_block, "VALUE_BLOCK": value_block, "VALUE_PARTS": 1}
    value_parts = max(1, value_block // VALUE_COLUMNS)
    value_block //= value_parts
    return {"HEAD_BLOCK": head_block, "TAIL_BLOCK": 0, "VALUE_BLOCK": value_block, "VALUE_PARTS": value_parts}


def launch_options(
    blocks: dict[str, int], element_size: int, *, values_in_keys: bool, is_fp8: bool, capacity: int
) -> dict[str, Any]:
    """How attend_kernel is compiled; as many blocks of keys and values under way as memory holds.

    Args:
        blocks: see blocks_of.
        element_size: bytes of an element of queries, and of keys and values unless is_fp8.
        capacity: bytes of shared memory that a program may have.

    Raises:
        ValueError: The queries of a tile and a block of keys take more.
    """
    key_columns = blocks["HEAD_BLOCK"] + blocks["TAIL_BLOCK"]
    columns = key_columns + (0 if values_in_keys else blocks["VALUE_BLOCK"])
    query_bytes = BLOCK_M * key_columns * element_size
    block_n, num_warps, stage_bytes, most_stages = BLOCK_N if columns <= 256 else WIDE_BLOCK_N, 4, STAGE_BYTES, 3
    if blocks["HEAD_BLOCK"] > 256:
        stage_bytes = WIDE_BYTES - query_bytes
        if values_in_keys:
            num_warps = 8
        else:
            block_n, most_stages = NARROW_BLOCK_N, 4
    if columns * element_size >= WIDE_KEY_BYTES and capacity < LEAST_WIDE_BYTES:
        block_n, stage_bytes = NARROW_BLOCK_N, capacity - query_bytes
    if element_size == 4:
        block_n, num_warps = min(BLOCK_N, FLOAT32_BLOCK_N), 16
    least_bytes = query_bytes + block_n * key_columns * element_size
    if least_bytes > capacity:
        raise ValueError(
            f"attention to keys of {key_columns} columns of {element_size} bytes takes {least_bytes // 1024} KB of "
            f"shared memory, and this GPU has {capacity // 1024} KB for a program"
        )
    kept_size = element_size
    if is_fp8:  # beside what is on its way there is one operand of a product, expanded
        stage_bytes -= block_n * max(key_columns, blocks["VALUE_BLOCK"]) * element_size
        kept_size, most_stages = 1, 4
    # Of 16 bits two always fit: there the queries lie in registers, in part.
    least_stages = 2 if element_size == 2 else 1
    num_stages = min(most_stages, max(least_stages, stage_bytes // (block_n * columns * kept_size)))
    return {"BLOCK_N": block_n, "num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}
