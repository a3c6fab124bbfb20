"""The tokens that come first in each row of logits, and their log-probabilities, in one launch.

The vocabulary is cut among programs that each leave their best tokens in order, ranked as kernels/sampling.py ranks
them, and their sum of exponentials; the last to arrive merges a row's lists and sums (kernels/ranked_parts.py).
Follows kernels/reference/top_candidates.py.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.drawn_scores import load_scores
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
from kernels.reference.top_candidates import Candidates
from kernels.scores import check_rows, ranks_of, token_of, value_of
from kernels.sizes import cdiv, next_power_of_2

BLOCK = 1024  # columns of a program


@Kernel
@triton.jit(
    do_not_specialize=["rows_of_owner", "sharpness", "width", "num_splits", "listed"],
    do_not_specialize_on_alignment=["positions_ptr", "seeds_ptr", "is_greedy_ptr", "temperatures_ptr", "cuts_ptr"],
)
def top_candidates_kernel(
    candidates_ptr,  # [num_rows, width] int64
    log_probs_ptr,  # [num_rows, width] float32
    ranks_ptr,  # [num_rows, num_splits, listed] int64, each list from the best on
    sums_ptr,  # [num_rows, num_splits] float64
    exponents_ptr,  # [num_rows, num_splits] int32
    arrivals_ptr,  # [num_rows] int32, zeros before and after
    logits_ptr,  # [num_rows, vocab_size], rows row_stride apart
    positions_ptr,  # [num_owners] int64, or None without seeds
    seeds_ptr,  # [num_owners] int64, or None
    is_greedy_ptr,  # [num_owners] bool, or None
    temperatures_ptr,  # [num_owners] float32, or None
    cuts_ptr,  # [num_rows] float32, or None
    token_ids_ptr,  # [vocab_size] int64, or None
    rows_of_owner,
    row_stride,
    vocab_size,
    stream,
    sharpness,
    width,
    num_splits,
    listed,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,  # >= num_splits
):
    # Row by row, so that most rows are merged while others are read.
    row, split = (tl.program_id(0) // num_splits).to(tl.int64), tl.program_id(0) % num_splits
    owner = row // rows_of_owner
    position = tl.zeros((), dtype=tl.int64)
    if positions_ptr is not None:
        position = tl.load(positions_ptr + owner)
    scores, tokens, end = load_scores(
        logits_ptr,
        row,
        owner,
        position,
        seeds_ptr,
        None,
        is_greedy_ptr,
        temperatures_ptr,
        cuts_ptr,
        token_ids_ptr,
        row_stride,
        vocab_size,
        stream,
        split * BLOCK,
        BLOCK,
    )
    scores = number_or_least(scores)
    part = row * num_splits + split
    total, exponent = sum_of_exponentials(scores * sharpness)
    tl.store(sums_ptr + part, total)
    tl.store(exponents_ptr + part, exponent)
    store_best(ranks_ptr + part * listed, ranks_of(scores, tokens, end), listed)
    if is_last_to_arrive(arrivals_ptr + row, num_splits):
        splits = tl.arange(0, SPLITS)
        parts, is_part = row * num_splits + splits, splits < num_splits
        log_sum = log_of_sums(sums_ptr, exponents_ptr, parts, is_part)
        lists_ptr = ranks_ptr + parts * listed
        taken, heads = tl.zeros((SPLITS,), dtype=tl.int32), first_heads(lists_ptr, is_part, listed)
        for place in range(width):
            best, heads, taken = take_best(lists_ptr, heads, taken, is_part, listed)
            tl.store(candidates_ptr + row * width + place, token_of(best))
            tl.store(log_probs_ptr + row * width + place, log_prob_of(value_of(best >> 32) * sharpness, log_sum))


def top_candidates(
    logits: Tensor,  # [num_rows, vocab] float32, rows any distance apart
    width: int,
    seeds: Tensor | None = None,  # [num_owners] int64
    positions: Tensor | None = None,  # [num_owners] int64
    *,
    stream: int = 0,
    sharpness: int = 1,
    is_greedy: Tensor | None = None,  # [num_owners] bool
    temperatures: Tensor | None = None,  # [num_owners] float32
    cuts: Tensor | None = None,  # [num_rows] float32
    token_ids: Tensor | None = None,  # [vocab] int64
) -> Candidates:
    """What kernels.reference.top_candidates.top_candidates says."""
    check_rows(logits, seeds, positions, is_greedy, temperatures, cuts, token_ids)
    num_rows, vocab_size = logits.shape
    assert 0 < width <= vocab_size, "candidates are columns"
    num_owners = len(next((own for own in (seeds, is_greedy, temperatures) if own is not None), logits))
    found = Candidates(
        torch.empty(num_rows, width, dtype=torch.int64, device=logits.device),
        torch.empty(num_rows, width, dtype=torch.float32, device=logits.device),
    )
    if num_rows == 0:
        return found
    num_splits, listed = cdiv(vocab_size, BLOCK), min(width, BLOCK)
    ranks = torch.empty(num_rows, num_splits, listed, dtype=torch.int64, device=logits.device)
    sums = torch.empty(num_rows, num_splits, dtype=torch.float64, device=logits.device)
    exponents = torch.empty(num_rows, num_splits, dtype=torch.int32, device=logits.device)
    top_candidates_kernel[(num_rows * num_splits,)](
        *found,
        ranks,
        sums,
        exponents,
        arrival_counters(num_rows, logits.device),
        logits,
        None if seeds is None else positions,
        seeds,
        is_greedy,
        temperatures,
        cuts,
        token_ids,
        num_rows // num_owners,
        logits.stride(0),
        vocab_size,
        int(stream),
        sharpness,
        width,
        num_splits,
        listed,
        BLOCK=BLOCK,
        SPLITS=next_power_of_2(num_splits),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return found
