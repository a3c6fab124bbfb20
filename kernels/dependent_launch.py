"""Programmatic dependent launch: on Hopper a kernel's programs may be placed while the launch before still runs.

What a kernel does before `await_input` overlaps with that launch, so it may touch nothing that another kernel writes
and must write nothing; a kernel launched with `launch_pdl` awaits in every program, also where it has nothing to do.
(CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".)
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether kernels on the device may be launched with launch_pdl; never where they are interpreted."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def await_input():
    """Wait until what launches before have written is there, and let the next launch place its programs."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(ptrs):
    """Ask for the cache lines at ptrs. They come no nearer than the second-level cache, so they cannot be stale."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [ptrs.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
