"""kernels/reference/move_kv.py, compiled: bytes, whatever they stand for."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import integers, pointer
from kernels.cpu.threads import parts_of

PART_BYTES = 1 << 16  # copied in some microseconds
Arguments = arguments_of(
    *("kv", "layer_offsets", "layer_widths", "source_slots", "target_slots"),
    *("element_size", "num_layers", "num_requests", "num_moves"),
)


@cache
def moving() -> Kernel:
    def move(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        offsets, widths = integers(a.layer_offsets, a.num_layers), integers(a.layer_widths, a.num_layers)
        sources = integers(a.source_slots, a.num_requests * a.num_moves)
        targets = integers(a.target_slots, a.num_requests * a.num_moves)
        for own in range(part, a.num_layers * a.num_requests, num_parts):
            layer, request = own // a.num_requests, own % a.num_requests
            first, size = a.kv + offsets[layer] * a.element_size, widths[layer] * a.element_size
            for move in range(request * a.num_moves, (request + 1) * a.num_moves):
                if sources[move] != targets[move]:
                    source = carray(pointer(first + sources[move] * size), (size,), np.uint8)
                    target = carray(pointer(first + targets[move] * size), (size,), np.uint8)
                    for byte in range(size):
                        target[byte] = source[byte]

    return Kernel(move, Arguments)


def move_kv(
    kv: Tensor,  # [num_elements]
    layer_offsets: Tensor,  # [num_layers] int64
    layer_widths: Tensor,  # [num_layers] int64
    source_slots: Tensor,  # [num_requests, num_moves] int64; a request's slots are no other's
    target_slots: Tensor,  # [num_requests, num_moves] int64
    *,
    widest: int,  # of the layers
) -> None:
    values = (kv, layer_offsets, layer_widths, source_slots, target_slots)
    assert all(value.is_contiguous() for value in values)
    num_bytes = source_slots.numel() * len(layer_widths) * widest * kv.element_size()
    moving()(
        *(value.data_ptr() for value in values),
        *(kv.element_size(), len(layer_widths), *source_slots.shape),
        parts=parts_of(num_bytes, PART_BYTES, len(layer_widths) * len(source_slots)),
    )
