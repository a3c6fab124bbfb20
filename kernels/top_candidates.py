"""The tokens that come first in each row of logits, and their log-probabilities, in two launches.

The vocabulary is cut among programs that each leave their best tokens in order, ranked as kernels/sampling.py ranks
them, and their sum of exponentials; a second launch merges a row's lists and sums. A logit's exponential depends on the
logit alone but for a power of two, and sums are in float64. So neither the rows beside a row nor the way the vocabulary
is cut moves a token, nor a log-probability but where the last bits of a float64 decide how it is rounded.
Follows kernels/reference/top_candidates.py.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.drawn_scores import load_scores
from kernels.reference.top_candidates import Candidates
from kernels.scores import check_rows, ranks_of, token_of, value_of

BLOCK = 1024  # columns of a program
LEAST: tl.constexpr = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # the rank of nothing
NO_EXPONENT: tl.constexpr = tl.constexpr(-0x40000000)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
LN_2_HIGH: tl.constexpr = tl.constexpr(0.693359375)  # few bits, so that products with exponents are exact
LN_2_LOW: tl.constexpr = tl.constexpr(-2.12194440e-4)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def sum_of_exponentials(scores):
    """(sum, exponent): exp of the float32 scores adds up to the float64 sum times 2**exponent; without NaN or +inf."""
    is_number = scores > float("-inf")
    finite = tl.where(is_number, scores, 0.0)
    exponents = tl.floor(finite * LOG2_E + 0.5)
    mantissas = tl.exp(finite - exponents * LN_2_HIGH - exponents * LN_2_LOW)
    exponents = tl.where(is_number, exponents.to(tl.int32), NO_EXPONENT)
    largest = tl.max(exponents, axis=0)
    # Below 2**-126 of the largest nothing reaches the last bit of the sum.
    lower = exponents - largest
    powers = ((tl.maximum(lower, -126) + 127) << 23).to(tl.float32, bitcast=True)
    terms = tl.where(is_number & (lower >= -126), mantissas * powers, 0.0)
    return tl.sum(terms.to(tl.float64), axis=0), largest


@triton.jit(
    do_not_specialize=["rows_of_owner", "width"],
    do_not_specialize_on_alignment=["positions_ptr", "seeds_ptr", "is_greedy_ptr", "temperatures_ptr", "cuts_ptr"],
)
def block_candidates_kernel(
    ranks_ptr,  # [num_rows, num_splits, width] int64
    sums_ptr,  # [num_rows, num_splits] float64
    exponents_ptr,  # [num_rows, num_splits] int32
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
    width,
    stream,
    BLOCK: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
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
    scores = tl.where(scores == scores, scores, float("-inf"))
    part = row * tl.num_programs(1) + split
    total, exponent = sum_of_exponentials(scores)
    tl.store(sums_ptr + part, total)
    tl.store(exponents_ptr + part, exponent)
    ranks = ranks_of(scores, tokens, end)
    for place in range(width):
        best = tl.max(ranks, axis=0)
        tl.store(ranks_ptr + part * width + place, best)
        ranks = tl.where(ranks == best, LEAST, ranks)


@triton.jit(do_not_specialize=["num_splits", "listed", "width"])
def merge_candidates_kernel(
    token_ids_ptr,  # [num_rows, width] int64
    log_probs_ptr,  # [num_rows, width] float32
    ranks_ptr,  # [num_rows, num_splits, listed] int64, each list from the best on
    sums_ptr,  # [num_rows, num_splits] float64
    exponents_ptr,  # [num_rows, num_splits] int32
    num_splits,
    listed,
    width,
    SPLITS: tl.constexpr,  # >= num_splits
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    is_split = split < num_splits
    part = row * num_splits + split
    exponents = tl.load(exponents_ptr + part, mask=is_split, other=NO_EXPONENT)
    largest = tl.max(exponents, axis=0)
    lower = exponents - largest
    powers = ((tl.maximum(lower, -1022) + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    sums = tl.load(sums_ptr + part, mask=is_split & (lower >= -1022), other=0.0)
    total = tl.sum(sums * powers, axis=0)
    log_sum = largest.to(tl.float64) * LN_2 + tl.log(tl.where(total > 0.0, total, 1.0))

    ranks_ptr += part * listed
    taken = tl.zeros((SPLITS,), dtype=tl.int32)  # of each list
    heads = tl.load(ranks_ptr, mask=is_split, other=LEAST)
    for place in range(width):
        best = tl.max(heads, axis=0)
        score = value_of(best >> 32)
        log_prob = tl.minimum(score.to(tl.float64) - log_sum, 0.0).to(tl.float32)
        tl.store(token_ids_ptr + row * width + place, token_of(best))
        tl.store(log_probs_ptr + row * width + place, tl.where(score > float("-inf"), log_prob, float("-inf")))
        is_best = is_split & (heads == best)
        taken += is_best.to(tl.int32)
        following = tl.load(ranks_ptr + taken, mask=is_best & (taken < listed), other=LEAST)
        heads = tl.where(is_best, following, heads)


def top_candidates(
    logits: Tensor,  # [num_rows, vocab] float32, rows any distance apart
    width: int,
    seeds: Tensor | None = None,  # [num_owners] int64
    positions: Tensor | None = None,  # [num_owners] int64
    *,
    stream: int = 0,
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
    num_splits, listed = triton.cdiv(vocab_size, BLOCK), min(width, BLOCK)
    ranks = torch.empty(num_rows, num_splits, listed, dtype=torch.int64, device=logits.device)
    sums = torch.empty(num_rows, num_splits, dtype=torch.float64, device=logits.device)
    exponents = torch.empty(num_rows, num_splits, dtype=torch.int32, device=logits.device)
    block_candidates_kernel[(num_rows, num_splits)](
        ranks,
        sums,
        exponents,
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
        listed,
        int(stream),
        BLOCK=BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    merge_candidates_kernel[(num_rows,)](
        *found,
        ranks,
        sums,
        exponents,
        num_splits,
        listed,
        width,
        SPLITS=triton.next_power_of_2(num_splits),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return found
