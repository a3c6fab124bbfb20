"""Uniform variates in one launch: kernels/reference/philox.py's, bit for bit."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kernel import Kernel
from kernels.philox import random_words, words_to_uniform
from kernels.sizes import cdiv, next_power_of_2


@triton.jit
def store_lane(uniforms_ptr, words, entries, num_entries):
    tl.store(uniforms_ptr + entries, words_to_uniform(words), mask=entries < num_entries)


@Kernel
@triton.jit(do_not_specialize=["num_entries"], do_not_specialize_on_alignment=["positions_ptr", "draft_steps_ptr"])
def uniforms_kernel(
    uniforms_ptr,  # [num_rows, num_entries] float64
    seeds_ptr,  # [num_rows] int64
    positions_ptr,  # [num_rows] int64
    draft_steps_ptr,  # [num_rows] int64, or None: 0
    num_entries,
    stream,
    BLOCKS: tl.constexpr,  # >= num_entries / 4
):
    row = tl.program_id(0).to(tl.int64)
    draft_step = 0
    if draft_steps_ptr is not None:
        draft_step = tl.load(draft_steps_ptr + row)
    blocks = tl.arange(0, BLOCKS)
    a, b, c, d = random_words(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), stream, draft_step, blocks)
    # Entry v takes lane v % 4.
    own_ptr = uniforms_ptr + row * num_entries
    store_lane(own_ptr, a, 4 * blocks, num_entries)
    store_lane(own_ptr, b, 4 * blocks + 1, num_entries)
    store_lane(own_ptr, c, 4 * blocks + 2, num_entries)
    store_lane(own_ptr, d, 4 * blocks + 3, num_entries)


def uniforms(
    seeds: Tensor,  # [num_rows] int64
    positions: Tensor,  # [num_rows] int64
    draft_steps: Tensor | None = None,  # [num_rows] int64; None = 0
    *,
    stream: int,
    num_entries: int = 1,
) -> Tensor:
    """Independent float64 in (0, 1), [num_rows, num_entries]: the variates of the first vocabulary entries."""
    assert all(keys is None or keys.is_contiguous() for keys in (seeds, positions, draft_steps))
    drawn = torch.empty(len(seeds), num_entries, dtype=torch.float64, device=seeds.device)
    if drawn.numel():
        blocks = next_power_of_2(cdiv(num_entries, 4))
        uniforms_kernel[(len(seeds),)](
            drawn, seeds, positions, draft_steps, num_entries, int(stream), BLOCKS=blocks, num_warps=1
        )
    return drawn
