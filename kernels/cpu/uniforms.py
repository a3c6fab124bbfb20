"""kernels/reference/philox.py's uniform variates, compiled."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import integers, pointer
from kernels.cpu.philox import random_words, uniform_of
from kernels.cpu.recording import empty

Arguments = arguments_of(
    *("uniforms", "seeds", "positions", "draft_steps"),  # the last 0: all are 0
    *("num_rows", "num_entries", "stream"),
)


@cache
def drawing_uniforms() -> Kernel:
    def draw(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        uniforms = carray(pointer(a.uniforms), (a.num_rows, a.num_entries), np.float64)
        seeds, positions = integers(a.seeds, a.num_rows), integers(a.positions, a.num_rows)
        draft_steps = integers(a.draft_steps, a.num_rows)  # not read where there are none
        for row in range(part, a.num_rows, num_parts):
            position, seed, stream = np.uint64(positions[row]), np.uint64(seeds[row]), np.uint64(a.stream)
            draft_step = np.uint64(draft_steps[row] if a.draft_steps else 0)
            for first in range(0, a.num_entries, 4):
                words = random_words(np.uint64(first // 4), position, stream, draft_step, seed)
                for lane in range(min(4, a.num_entries - first)):
                    uniforms[row, first + lane] = uniform_of(words[lane])

    return Kernel(draw, Arguments)


def uniforms(
    seeds: Tensor,  # [num_rows] int64
    positions: Tensor,  # [num_rows] int64
    draft_steps: Tensor | None = None,  # [num_rows] int64; None = 0
    *,
    stream: int,
    num_entries: int = 1,
) -> Tensor:
    """Independent float64 in (0, 1), [num_rows, num_entries]: the variates of the first vocabulary entries."""
    keys = (seeds, positions, draft_steps)
    assert all(own is None or own.is_contiguous() for own in keys)
    drawn = empty(len(seeds), num_entries, dtype=torch.float64)
    drawing_uniforms()(
        drawn.data_ptr(),
        *(0 if own is None else own.data_ptr() for own in keys),
        *(len(seeds), num_entries, int(stream)),
    )
    return drawn
