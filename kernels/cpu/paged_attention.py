"""kernels/reference/paged_attention.py over PagedSegments, by kernels/cpu/attend.py.

A row's bits depend on its query and the keys that it sees alone, in the order of their positions. Nothing is padded to
the longest context, so a launch costs what its rows see.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.amx import has_amx
from kernels.cpu.attend import HEADS, TREE_ROWS, attends_in_pairs, attention, room_of, vectors_of
from kernels.cpu.elements import ELEMENTS
from kernels.cpu.exp2 import LOG2_E
from kernels.cpu.kernel import bits_of
from kernels.cpu.key_panels import KEYS
from kernels.cpu.linear import NOTHING
from kernels.cpu.panels import LANES
from kernels.cpu.recording import empty
from kernels.cpu.rows import zeros
from kernels.cpu.seen_keys import OFFSETS
from kernels.cpu.threads import parts_of
from kernels.paged_segments import PagedSegments
from kernels.reference.fp8_rows import FP8, NO_SCALES, KVScales, are_kept_in

PART_PRODUCTS, AMX_PRODUCTS = 1 << 17, 1 << 18  # of queries and keys, at most, made in some microseconds
PART_UNITS = 4  # where there are enough for all threads: fewer heads read too little of each row of the cache


class LayerLaunch:
    """One launch in layers of one shape: what stays from layer to layer is made once."""

    def __init__(
        self,
        segments: PagedSegments,
        query: Tensor,
        kv_cache: Tensor,
        *,
        num_kv_heads: int,
        value_dim: int,
        scale: float,
        window: int,  # 0: none; below 0: chunks of so many
        is_causal: bool,
        softcap: float | None,
        values_in_keys: bool,
    ) -> None:
        num_rows, num_heads, head_dim = query.shape
        num_blocks, block_size, width = kv_cache.shape
        max_context, group = segments.max_context, num_heads // num_kv_heads
        assert segments.num_shared_tiles == 0, "what is split is shared"
        rows_of_tree = segments.segments_per_table
        assert rows_of_tree == 1 or len(segments.tile_rows) == len(segments.branch_starts), "a tile a row of a tree"
        work = num_rows * num_heads * head_dim * max_context  # products, at most
        is_paired = attends_in_pairs(query.dtype, head_dim, value_dim)
        on_amx = is_paired and has_amx()
        families = len(segments.tile_rows) // rows_of_tree * -(-rows_of_tree // TREE_ROWS)
        units = families * num_kv_heads * -(-group // HEADS)
        most = max(units // PART_UNITS, min(units, torch.get_num_threads()))
        self._parts = parts_of(work, AMX_PRODUCTS if on_amx else PART_PRODUCTS, most)
        expands = kv_cache.dtype == FP8
        vectors = vectors_of(value_dim), vectors_of(KEYS)
        self._attend = attention(ELEMENTS[query.dtype], *vectors, is_paired, on_amx, expands)
        # A lone row has any stride, and is read as the beginning of a second one would be.
        query_stride = query.stride(0) if num_rows > 1 else num_heads * head_dim
        tile_size, widest = max(segments.max_tile_size, min(rows_of_tree, TREE_ROWS)), max(head_dim, value_dim)
        num_floats = room_of(tile_size, group, widest, expands=expands)
        assert num_floats % LANES == 0, "a thread's room begins on a line: vectors are read whole"
        threads = torch.get_num_threads()
        self._offsets = empty(threads * OFFSETS * KEYS, dtype=torch.int64)
        self._floats = empty(threads * num_floats)
        self._tensors = [tensor.long() for tensor in segments.tensors]
        assert all(tensor.is_contiguous() for tensor in self._tensors)
        self._columns = num_heads * value_dim
        self._steepness = scale * LOG2_E if softcap is None else scale / softcap  # without the keys' own scale
        self._cap = 0.0 if softcap is None else softcap * LOG2_E
        self._numbers = (
            *(tensor.data_ptr() for tensor in (*self._tensors, self._offsets, self._floats, NOTHING)),
            num_floats,
            *(num_rows, num_heads, query_stride, num_blocks * block_size, width),
            *(len(segments.tile_rows), len(segments.branch_starts), segments.block_tables.shape[1]),
            *(segments.segments_per_table, segments.branch_slots.shape[1], block_size),
            *(num_kv_heads, head_dim, value_dim, window, is_causal),
            *(0 if values_in_keys else num_kv_heads * head_dim, max_context),
        )

    def __call__(self, query: Tensor, kv_cache: Tensor, sinks: Tensor | None, kv_scales: KVScales) -> Tensor:
        output = zeros(len(query), self._columns, dtype=query.dtype)
        wide_sinks = None if sinks is None else sinks.float().contiguous()  # kept until they are read
        addresses = (output.data_ptr(), query.data_ptr(), kv_cache.data_ptr())
        of_sinks = 0 if wide_sinks is None else wide_sinks.data_ptr()
        scales = map(bits_of, (self._steepness * kv_scales[0], self._cap, kv_scales[1]))
        self._attend(*addresses, of_sinks, *self._numbers, *scales, parts=self._parts)
        return output


def paged_attention(
    query: Tensor,  # [num_rows, num_heads, head_dim]; rows may be strided
    kv_cache: Tensor,  # [num_blocks, block_size, num_kv_heads * (head_dim + value_dim)], keys before values
    segments: PagedSegments,
    *,
    num_kv_heads: int,
    value_dim: int,
    scale: float,
    sliding_window: int | None = None,
    attention_chunk: int | None = None,
    is_causal: bool = True,  # False: a row sees up to its tile's last_keys
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [num_heads]
    values_in_keys: bool = False,
    kv_scales: KVScales = NO_SCALES,  # of a cache in FP8
) -> Tensor:  # [num_rows, num_heads * value_dim]; zeros in rows of no tile
    """What kernels.reference.paged_attention.paged_attention says, in the arithmetic of kernels/cpu/attend.py."""
    head_dim = query.shape[2]
    assert query.stride()[1:] == (head_dim, 1) and kv_cache.is_contiguous()
    assert are_kept_in(query.dtype, kv_cache.dtype, kv_scales) and (num_kv_heads == 1 or not values_in_keys)
    assert not values_in_keys or kv_scales[0] == kv_scales[1]
    assert kv_cache.shape[2] == num_kv_heads * (head_dim + (0 if values_in_keys else value_dim))
    sizes = (*query.shape, query.stride(0), kv_cache.shape)
    window = sliding_window or -(attention_chunk or 0)
    assert window >= 0 or is_causal
    shape = (
        query.dtype,
        kv_cache.dtype,
        *sizes,
        num_kv_heads,
        value_dim,
        scale,
        window,
        is_causal,
        softcap,
        values_in_keys,
    )
    launch = segments.by_shape.get((shape, torch.get_num_threads()))  # each has its room
    if launch is None:
        launch = segments.by_shape[shape, torch.get_num_threads()] = LayerLaunch(
            segments,
            query,
            kv_cache,
            num_kv_heads=num_kv_heads,
            value_dim=value_dim,
            scale=scale,
            window=window,
            is_causal=is_causal,
            softcap=softcap,
            values_in_keys=values_in_keys,
        )
    return launch(query, kv_cache, sinks, kv_scales)
