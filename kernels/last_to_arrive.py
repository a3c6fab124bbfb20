"""What needs the results of several programs is done by the last of them to arrive, so that it takes no second launch.

Programs store what they have found, arrive, and the last one reads what all have stored. What is read once is read past
the first-level cache (`cache_modifier=".cg"`); what that cache held before, the arrival has thrown out (acquire).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_COUNTERS = 1 << 18


@triton.jit
def is_last_to_arrive(counter_ptr, number):
    """Whether this is the last of `number` programs; then the counter is back at zero."""
    tl.debug_barrier()  # all threads have stored before one announces it
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == number - 1
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


def arrival_counters(number: int, device: torch.device) -> Tensor:
    """At least so many, int32: zeros before and after every launch on the device, which follow one another."""
    assert number <= MOST_COUNTERS, f"{number} rows in one launch"
    return _counters(device)


@cache
def _counters(device: torch.device) -> Tensor:
    """Made at the first launch, which is no captured one: a launch has to be compiled before it can be captured."""
    return torch.zeros(MOST_COUNTERS, dtype=torch.int32, device=device)
