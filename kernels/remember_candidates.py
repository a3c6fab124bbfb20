"""kernels/reference/remember_candidates.py in one launch: a program a row, which looks whether another tells more.

Of the rows of one token the surest alone writes, so programs share no element.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.kernel import Kernel
from kernels.sizes import next_power_of_2

CHUNK = 128  # rows that are looked at together


@triton.jit
def sureness_of(log_probs_ptr, mask):
    log_prob = tl.load(log_probs_ptr, mask=mask, other=float("-inf"))
    return tl.where(log_prob == log_prob, log_prob, float("-inf"))


@Kernel
@triton.jit(do_not_specialize=["num_rows", "width"])
def remember_candidates_kernel(
    table_token_ids_ptr,  # [vocab + 1, width] int64
    table_log_probs_ptr,  # [vocab + 1, width] float32
    token_ids_ptr,  # [num_rows] int64
    candidates_ptr,  # [num_rows, width] int64
    log_probs_ptr,  # [num_rows, width] float32
    num_rows,
    width,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0)
    token_id = tl.load(token_ids_ptr + row)
    own_sureness = sureness_of(log_probs_ptr + row * width, True)
    told_better = 0
    for start in range(0, num_rows, CHUNK):
        others = start + tl.arange(0, CHUNK)
        is_same = tl.load(token_ids_ptr + others, mask=others < num_rows, other=-1) == token_id
        is_same = is_same & (others < num_rows) & (token_id >= 0)
        sureness = sureness_of(log_probs_ptr + others * width, is_same)
        is_surer = (sureness > own_sureness) | ((sureness == own_sureness) & (others < row))
        told_better += tl.sum((is_same & is_surer).to(tl.int32), axis=0)
    places = tl.arange(0, WIDTH)
    is_place = (places < width) & (token_id >= 0) & (told_better == 0)
    own, known = row * width + places, token_id * width + places
    tl.store(table_token_ids_ptr + known, tl.load(candidates_ptr + own, mask=is_place, other=0), mask=is_place)
    tl.store(table_log_probs_ptr + known, tl.load(log_probs_ptr + own, mask=is_place, other=0.0), mask=is_place)


def remember_candidates(
    table_token_ids: Tensor, table_log_probs: Tensor, token_ids: Tensor, candidates: Tensor, log_probs: Tensor
) -> None:
    """The kernel above over contiguous arguments."""
    tensors = (table_token_ids, table_log_probs, token_ids, candidates, log_probs)
    assert all(tensor.is_contiguous() for tensor in tensors)
    num_rows, width = candidates.shape
    if num_rows:
        widest = next_power_of_2(width)
        remember_candidates_kernel[(num_rows,)](*tensors, num_rows, width, CHUNK=CHUNK, WIDTH=widest)
