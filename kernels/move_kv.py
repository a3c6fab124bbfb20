"""kernels/reference/move_kv.py in one launch: a program for each request, layer and block of columns.

A program makes its moves in order, so what one overwrites has been read, and programs share no element but the null
slot's, which nobody reads.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.kernel import Kernel
from kernels.sizes import cdiv

BLOCK = 1024  # elements of a slot that a program moves


@Kernel
@triton.jit(do_not_specialize=["num_moves"])
def move_kernel(
    kv_ptr,
    layer_offsets_ptr,  # [num_layers] int64
    layer_widths_ptr,  # [num_layers] int64
    source_slots_ptr,  # [num_requests, num_moves] int64
    target_slots_ptr,  # [num_requests, num_moves] int64
    num_moves,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    width = tl.load(layer_widths_ptr + layer)
    layer_ptr = kv_ptr + tl.load(layer_offsets_ptr + layer)
    is_column = columns < width
    for move in range(num_moves):
        source = tl.load(source_slots_ptr + request * num_moves + move)
        target = tl.load(target_slots_ptr + request * num_moves + move)
        if source != target:
            values = tl.load(layer_ptr + source * width + columns, mask=is_column)
            tl.store(layer_ptr + target * width + columns, values, mask=is_column)


def move_kv(
    kv: Tensor, layer_offsets: Tensor, layer_widths: Tensor, source_slots: Tensor, target_slots: Tensor, *, widest: int
) -> None:
    """The kernel above over contiguous arguments. widest: the largest of layer_widths, on the host."""
    assert kv.is_contiguous() and source_slots.is_contiguous() and target_slots.is_contiguous()
    num_requests, num_moves = source_slots.shape
    if num_requests and num_moves:
        grid = (num_requests, len(layer_widths), cdiv(widest, BLOCK))
        move_kernel[grid](kv, layer_offsets, layer_widths, source_slots, target_slots, num_moves, BLOCK=BLOCK)
