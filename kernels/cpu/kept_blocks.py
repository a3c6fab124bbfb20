"""kernels/reference/kept_blocks.py, compiled."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import integers
from kernels.cpu.recording import empty
from kernels.reference.kept_blocks import KeptBlocks

Arguments = arguments_of(
    *("kept_lengths", "kept_tables", "lengths", "tables", "num_requests", "max_blocks", "table_stride"),
    *("num_first", "num_recent", "num_kept", "block_size"),
)


@cache
def keeping() -> Kernel:
    def keep(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        kept_lengths, lengths = integers(a.kept_lengths, a.num_requests), integers(a.lengths, a.num_requests)
        kept, tables = (
            integers(a.kept_tables, a.num_requests * a.num_kept),
            integers(a.tables, a.num_requests * a.table_stride),
        )
        for request in range(part, a.num_requests, num_parts):
            num_left_out = max((lengths[request] - a.num_recent) // a.block_size, a.num_first) - a.num_first
            kept_lengths[request] = lengths[request] - num_left_out * a.block_size
            for column in range(a.num_kept):
                place = column + num_left_out if column >= a.num_first else column
                place = min(place, a.max_blocks - 1)
                kept[request * a.num_kept + column] = tables[request * a.table_stride + place]

    return Kernel(keep, Arguments)


def kept_blocks(
    lengths: Tensor,  # [num_requests] int64
    block_tables: Tensor,  # [num_requests, max_blocks] int64, rows any distance apart
    *,
    num_first: int,
    num_recent: int,
    num_kept: int,
    block_size: int,
) -> KeptBlocks:
    num_requests, max_blocks = block_tables.shape
    assert lengths.is_contiguous() and block_tables.dtype == torch.int64 and block_tables.stride(1) == 1
    kept_lengths = empty(num_requests, dtype=torch.int64)
    kept_tables = empty(num_requests, num_kept, dtype=torch.int64)
    keeping()(
        *(tensor.data_ptr() for tensor in (kept_lengths, kept_tables, lengths, block_tables)),
        *(num_requests, max_blocks, block_tables.stride(0)),
        *(num_first, num_recent, num_kept, block_size),
    )
    return KeptBlocks(kept_lengths, kept_tables)
