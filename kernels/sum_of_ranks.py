"""kernels/reference/sum_of_ranks.py in one launch."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import await_input, can_overlap
from kernels.kernel import Kernel
from kernels.sizes import cdiv

BLOCK = 1024  # numbers of a program


@Kernel
@triton.jit(do_not_specialize=["count"])
def sum_of_ranks_kernel(
    parts_ptr,  # [NUM_RANKS, count]
    sums_ptr,  # [count]
    count,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,  # with the launch before
):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_place = places < count
    if OVERLAPS:
        await_input()
    first = tl.load(parts_ptr + places, mask=is_place, other=0.0)
    total = first.to(tl.float32)
    for rank in tl.static_range(1, NUM_RANKS):
        total += tl.load(parts_ptr + rank * count.to(tl.int64) + places, mask=is_place, other=0.0).to(tl.float32)
    tl.store(sums_ptr + places, total.to(first.dtype), mask=is_place)


def sum_of_ranks(parts: Tensor) -> Tensor:
    """[num_ranks, num_rows, width], contiguous -> [num_rows, width]."""
    assert parts.is_contiguous()
    num_ranks, num_rows, width = parts.shape
    sums, count = torch.empty(num_rows, width, dtype=parts.dtype, device=parts.device), num_rows * width
    overlaps = can_overlap(parts.device)
    if count:
        sum_of_ranks_kernel[(cdiv(count, BLOCK),)](
            parts, sums, count, NUM_RANKS=num_ranks, BLOCK=BLOCK, OVERLAPS=overlaps, launch_pdl=overlaps
        )
    return sums
