"""kernels/reference/cluster_logits.py: a program multiplies one row by tokens of one of its clusters."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kernel import Kernel
from kernels.reference.cluster_logits import OUTSIDE
from kernels.sizes import cdiv

TOKENS, COLUMNS = 32, 128  # of a program, and of a step of its sums


@Kernel
@triton.jit
def cluster_logits_kernel(
    states_ptr,  # [num_rows, HIDDEN], rows states_stride apart
    table_ptr,  # [num_clusters, SIZE, HIDDEN]
    token_ids_ptr,  # [num_clusters, SIZE] int64
    chosen_ptr,  # [num_rows, num_chosen] int64
    logits_ptr,  # [num_rows, vocab_size] float32
    states_stride,
    vocab_size,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cluster = tl.load(chosen_ptr + row * tl.num_programs(1) + tl.program_id(1))
    tokens = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    is_token, places = tokens < SIZE, cluster * SIZE + tokens
    sums = tl.zeros([TOKENS], dtype=tl.float32)
    for first in range(0, HIDDEN, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        is_column = columns < HIDDEN
        state = tl.load(states_ptr + row * states_stride + columns, mask=is_column, other=0.0).to(tl.float32)
        is_number = is_token[:, None] & is_column[None, :]
        weights = tl.load(table_ptr + places[:, None] * HIDDEN + columns[None, :], mask=is_number, other=0.0)
        sums += tl.sum(weights.to(tl.float32) * state[None, :], axis=1)
    ids = tl.load(token_ids_ptr + places, mask=is_token, other=0)
    tl.store(logits_ptr + row * vocab_size + ids, sums, mask=is_token)


def cluster_logits(states: Tensor, table: Tensor, token_ids: Tensor, chosen: Tensor) -> Tensor:
    """states: [num_rows, hidden], whose rows may lie further apart; the other arguments are contiguous."""
    assert states.stride(1) == 1 and table.is_contiguous() and token_ids.is_contiguous() and chosen.is_contiguous()
    (num_rows, num_chosen), (_, size, hidden) = chosen.shape, table.shape
    logits = torch.full((num_rows, token_ids.numel()), OUTSIDE, dtype=torch.float32, device=states.device)
    if num_rows:
        cluster_logits_kernel[(num_rows, num_chosen, cdiv(size, TOKENS))](
            states,
            table,
            token_ids,
            chosen,
            logits,
            states.stride(0),
            logits.shape[1],
            SIZE=size,
            HIDDEN=hidden,
            TOKENS=TOKENS,
            COLUMNS=COLUMNS,
        )
    return logits
