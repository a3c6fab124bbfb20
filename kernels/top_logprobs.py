"""kernels/reference/top_logprobs.py in one launch, which reads each logit once.

The vocabulary is cut among programs that each leave their best tokens in order, how many tokens come before the chosen
one, and their sum of exponentials; the last to arrive merges a row's parts (kernels/ranked_parts.py).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kernel import Kernel
from kernels.last_to_arrive import arrival_counters, is_last_to_arrive
from kernels.ranked_parts import (
    first_heads,
    log_of_sums,
    log_prob_of,
    number_or_least,
    store_best,
    sum_of_exponentials,
    take_best,
)
from kernels.reference.top_logprobs import num_columns
from kernels.scores import check_rows, load_logits, ranks_of, token_of, value_of
from kernels.sizes import cdiv, next_power_of_2

BLOCK = 1024  # columns of a program


@Kernel
@triton.jit(do_not_specialize=["width", "num_splits", "listed"], do_not_specialize_on_alignment=["own_ids_ptr"])
def top_logprobs_kernel(
    packed_ptr,  # [num_rows, 3 + 2 * width] float64
    ranks_ptr,  # [num_rows, num_splits, listed] int64, each list from the best on
    counts_ptr,  # [num_rows, num_splits] int32: tokens that do not come behind the chosen one
    sums_ptr,  # [num_rows, num_splits] float64
    exponents_ptr,  # [num_rows, num_splits] int32
    arrivals_ptr,  # [num_rows] int32, zeros before and after
    logits_ptr,  # [num_rows, vocab_size], rows row_stride apart
    own_ids_ptr,  # [num_rows] int64
    row_stride,
    vocab_size,
    width,
    num_splits,
    listed,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,  # >= num_splits
):
    # Row by row, so that most rows are merged while others are read.
    row, split = (tl.program_id(0) // num_splits).to(tl.int64), tl.program_id(0) % num_splits
    logits_ptr += row * row_stride
    tokens, own = split * BLOCK + tl.arange(0, BLOCK), tl.load(own_ids_ptr + row)
    scores = number_or_least(load_logits(logits_ptr, tokens, vocab_size))
    ranks = ranks_of(scores, tokens, vocab_size)
    own_score = number_or_least(tl.load(logits_ptr + own))
    part = row * num_splits + split
    total, exponent = sum_of_exponentials(scores)
    tl.store(sums_ptr + part, total)
    tl.store(exponents_ptr + part, exponent)
    tl.store(counts_ptr + part, tl.sum((ranks >= ranks_of(own_score, own, vocab_size)).to(tl.int32), axis=0))
    store_best(ranks_ptr + part * listed, ranks, listed)
    if is_last_to_arrive(arrivals_ptr + row, num_splits):
        splits = tl.arange(0, SPLITS)
        parts, is_part = row * num_splits + splits, splits < num_splits
        log_sum = log_of_sums(sums_ptr, exponents_ptr, parts, is_part)
        rank = tl.sum(tl.load(counts_ptr + parts, mask=is_part, other=0, cache_modifier=".cg"), axis=0)
        told_ptr = packed_ptr + row * (3 + 2 * width)
        tl.store(told_ptr, own.to(tl.float64))
        tl.store(told_ptr + 1, log_prob_of(own_score, log_sum).to(tl.float64))
        tl.store(told_ptr + 2, rank.to(tl.float64))
        lists_ptr = ranks_ptr + parts * listed
        taken, heads = tl.zeros((SPLITS,), dtype=tl.int32), first_heads(lists_ptr, is_part, listed)
        for place in range(width):
            best, heads, taken = take_best(lists_ptr, heads, taken, is_part, listed)
            tl.store(told_ptr + 3 + place, token_of(best).to(tl.float64))
            tl.store(told_ptr + 3 + width + place, log_prob_of(value_of(best >> 32), log_sum).to(tl.float64))


def top_logprobs(
    logits: Tensor,  # [num_rows, vocab] float32, rows any distance apart
    token_ids: Tensor,  # [num_rows] int64
    num_top: int,
) -> Tensor:  # [num_rows, num_columns(num_top)] float64
    """What kernels.reference.top_logprobs.top_logprobs says."""
    check_rows(logits, token_ids)
    num_rows, vocab_size = logits.shape
    assert num_top <= vocab_size, "they are columns"
    device, num_splits, listed = logits.device, cdiv(vocab_size, BLOCK), min(num_top, BLOCK)
    packed = torch.empty(num_rows, num_columns(num_top), dtype=torch.float64, device=device)
    if num_rows == 0:
        return packed
    ranks = torch.empty(num_rows, num_splits, listed, dtype=torch.int64, device=device)
    sums = torch.empty(num_rows, num_splits, dtype=torch.float64, device=device)
    counts = torch.empty(num_rows, num_splits, dtype=torch.int32, device=device)
    exponents = torch.empty_like(counts)
    top_logprobs_kernel[(num_rows * num_splits,)](
        *(packed, ranks, counts, sums, exponents, arrival_counters(num_rows, device)),
        *(logits, token_ids, logits.stride(0), vocab_size, num_top, num_splits, listed),
        BLOCK=BLOCK,
        SPLITS=next_power_of_2(num_splits),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return packed
