"""kernels/reference/candidate_logits.py: a program scores all candidates of one row."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kernel import Kernel
from kernels.reference.cluster_logits import OUTSIDE
from kernels.sizes import next_power_of_2

COLUMNS = 128  # of a step of the sums


@Kernel
@triton.jit(do_not_specialize=["rows_of_owner", "vocab_size"])
def candidate_logits_kernel(
    unary_ptr,  # [num_owners, NUM_CANDIDATES] float32, rows unary_stride apart
    candidates_ptr,  # [num_owners, NUM_CANDIDATES] int64, rows candidates_stride apart
    hidden_ptr,  # [num_owners, RANK], rows hidden_stride apart
    predecessors_ptr,  # [vocab_size, RANK]
    successors_ptr,  # [vocab_size, RANK]
    token_ids_ptr,  # [num_rows] int64, tokens_stride apart
    logits_ptr,  # [num_rows, vocab_size] float32
    unary_stride,
    candidates_stride,
    hidden_stride,
    tokens_stride,
    rows_of_owner,
    vocab_size,
    NUM_CANDIDATES: tl.constexpr,
    RANK: tl.constexpr,
    CANDIDATES: tl.constexpr,  # >= NUM_CANDIDATES
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    owner = row // rows_of_owner
    places = tl.arange(0, CANDIDATES)
    is_candidate = places < NUM_CANDIDATES
    candidates = tl.load(candidates_ptr + owner * candidates_stride + places, mask=is_candidate, other=0)
    token = tl.load(token_ids_ptr + row * tokens_stride)
    sums = tl.zeros([CANDIDATES], dtype=tl.float32)
    for first in range(0, RANK, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        is_column = columns < RANK
        before = tl.load(predecessors_ptr + token * RANK + columns, mask=is_column, other=0.0).to(tl.float32)
        latent = before * tl.load(hidden_ptr + owner * hidden_stride + columns, mask=is_column, other=0.0).to(
            tl.float32
        )
        is_number = is_candidate[:, None] & is_column[None, :]
        behind = tl.load(successors_ptr + candidates[:, None] * RANK + columns[None, :], mask=is_number, other=0.0)
        sums += tl.sum(behind.to(tl.float32) * latent[None, :], axis=1)
    unary = tl.load(unary_ptr + owner * unary_stride + places, mask=is_candidate, other=0.0)
    tl.store(logits_ptr + row * vocab_size + candidates, unary + sums, mask=is_candidate)


def candidate_logits(
    unary: Tensor, candidates: Tensor, hidden: Tensor, predecessors: Tensor, successors: Tensor, token_ids: Tensor
) -> Tensor:
    """Rows of the first three, and tokens, may lie any distance apart; the tables are contiguous."""
    assert unary.stride(1) == candidates.stride(1) == hidden.stride(1) == 1
    assert predecessors.is_contiguous() and successors.is_contiguous() and predecessors.shape == successors.shape
    num_rows, (num_owners, num_candidates) = len(token_ids), candidates.shape
    logits = torch.full((num_rows, len(successors)), OUTSIDE, dtype=torch.float32, device=unary.device)
    if num_rows:
        candidate_logits_kernel[(num_rows,)](
            unary,
            candidates,
            hidden,
            predecessors,
            successors,
            token_ids,
            logits,
            unary.stride(0),
            candidates.stride(0),
            hidden.stride(0),
            token_ids.stride(0),
            num_rows // num_owners,
            len(successors),
            NUM_CANDIDATES=num_candidates,
            RANK=predecessors.shape[1],
            CANDIDATES=next_power_of_2(num_candidates),
            COLUMNS=COLUMNS,
        )
    return logits
