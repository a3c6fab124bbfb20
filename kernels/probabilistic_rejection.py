"""Verification of ragged chains of drafts by their probabilities: verifier/rules.py's Probabilistic in three launches.

The first, a program a request, judges the drafts; the second cuts the vocabulary among programs that each leave their
best token of the recovered distribution max(p - q, 0) and of p; the third takes the best. p is the distribution that
kernels/truncation.py describes, divided by its integer mass, so no order of summation can move a decision. Requests,
rows, -1 and padding as in kernels/rejection.py. Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.philox import gumbel_block, log
from kernels.reference.philox import Stream
from kernels.reference.rejection import Verified
from kernels.rejection import accept_uniforms, empty_result, length_of_prefix, load_drafts, store_tokens
from kernels.scores import check_rows, load_logits, ranks_of, token_of, value_of
from kernels.truncation import TruncatedRows

BLOCK = 4096  # tokens of a program
NUM_WARPS = 8
TARGET: tl.constexpr = tl.constexpr(int(Stream.TARGET))
RESIDUAL: tl.constexpr = tl.constexpr(int(Stream.RESIDUAL))
UNIT: tl.constexpr = tl.constexpr(2.0**-44)  # of TruncatedRows.masses


@triton.jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=["num_drafts_ptr", "positions_ptr", "cuts_ptr", "masses_ptr"],
)
def judge_kernel(
    token_ids_ptr,  # [num_requests, width] int64
    num_accepted_ptr,  # [num_requests] int64
    num_drafts_ptr,  # [num_requests] int64
    logits_ptr,  # [num_rows, vocab_size], rows row_stride apart
    draft_probs_ptr,  # [num_drafts, vocab_size], rows probs_stride apart, or None: one-hot
    draft_token_ids_ptr,  # [num_drafts] int64
    cu_ptr,  # [num_requests + 1] int
    seeds_ptr,  # [num_rows] int64
    positions_ptr,  # [num_rows] int64
    is_greedy_ptr,  # [num_rows] bool, or None
    temperatures_ptr,  # [num_rows] float32, or None
    argmax_ptr,  # [num_rows] int64
    maxima_ptr,  # [num_rows] float32
    cuts_ptr,  # [num_rows] float32
    masses_ptr,  # [num_rows] int64
    row_stride,
    probs_stride,
    width,
    PLACES: tl.constexpr,  # >= width
):
    """Which drafts stay: u * q(x) < p(x), in float64; in greedy requests the argmax, and what follows them."""
    request = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, PLACES)
    row, drafts, first = load_drafts(draft_token_ids_ptr, cu_ptr, request, places)
    num_drafts = length_of_prefix(drafts >= 0, places, PLACES)
    num_accepted = num_drafts * 0
    last_token_id = tl.full((), -1, dtype=tl.int64)  # a later launch draws it
    if tl.load(positions_ptr + row) >= 0:
        is_draft = drafts >= 0
        rows = row + places
        is_random = True
        if is_greedy_ptr is not None:
            is_random = tl.load(is_greedy_ptr + row) == 0
        if is_random:
            logits = tl.load(logits_ptr + rows * row_stride + drafts, mask=is_draft, other=float("-inf")).to(tl.float32)
            if temperatures_ptr is not None:
                logits = tl.div_rn(logits, tl.load(temperatures_ptr + rows, mask=is_draft, other=1.0))
            maxima = tl.load(maxima_ptr + rows, mask=is_draft, other=0.0)
            masses = tl.load(masses_ptr + rows, mask=is_draft, other=1).to(tl.float64)
            is_kept = is_draft & (logits >= tl.load(cuts_ptr + rows, mask=is_draft, other=0.0))
            p = tl.exp(logits.to(tl.float64) - maxima.to(tl.float64)) / (masses * UNIT)
            chances = accept_uniforms(seeds_ptr, positions_ptr, row, drafts, places)
            if draft_probs_ptr is not None:
                q = tl.load(draft_probs_ptr + (first + places) * probs_stride + drafts, mask=is_draft, other=0.0)
                chances = chances * q.to(tl.float64)
            accepted = is_kept & (chances < p)
            num_accepted = length_of_prefix(accepted, places, PLACES)
        else:
            accepted = is_draft & (tl.load(argmax_ptr + rows, mask=is_draft, other=-1) == drafts)
            num_accepted = length_of_prefix(accepted, places, PLACES)
            last_token_id = tl.load(argmax_ptr + row + num_accepted)
    else:
        num_drafts = num_drafts * 0
    store_tokens(token_ids_ptr, request, width, drafts, num_accepted, last_token_id, places)
    tl.store(num_accepted_ptr + request, num_accepted)
    tl.store(num_drafts_ptr + request, num_drafts)


@triton.jit(do_not_specialize_on_alignment=["num_drafts_ptr", "positions_ptr", "cuts_ptr", "masses_ptr"])
def recover_kernel(
    ranks_ptr,  # [num_requests, num_splits, 2] int64
    logits_ptr,  # [num_rows, vocab_size], rows row_stride apart
    draft_probs_ptr,  # [num_drafts, vocab_size], rows probs_stride apart, or None: one-hot
    draft_token_ids_ptr,  # [num_drafts] int64
    cu_ptr,  # [num_requests + 1] int
    num_accepted_ptr,  # [num_requests] int64
    num_drafts_ptr,  # [num_requests] int64
    seeds_ptr,  # [num_rows] int64
    positions_ptr,  # [num_rows] int64
    is_greedy_ptr,  # [num_rows] bool, or None
    temperatures_ptr,  # [num_rows] float32, or None
    maxima_ptr,  # [num_rows] float32
    cuts_ptr,  # [num_rows] float32
    masses_ptr,  # [num_rows] int64
    row_stride,
    probs_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """ranks[request, split]: the best of BLOCK tokens under max(p - q, 0) and under p, both with the row's noise."""
    request, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_accepted = tl.load(num_accepted_ptr + request)
    first = tl.load(cu_ptr + request).to(tl.int64)
    row = first + request + num_accepted
    is_random = tl.load(positions_ptr + first + request) >= 0
    if is_greedy_ptr is not None:
        is_random = is_random & (tl.load(is_greedy_ptr + row) == 0)
    if is_random:
        tokens = split * BLOCK + tl.arange(0, BLOCK)
        logits = load_logits(logits_ptr + row * row_stride, tokens, vocab_size)
        if temperatures_ptr is not None:
            logits = tl.div_rn(logits, tl.load(temperatures_ptr + row))
        logits = tl.where(logits >= tl.load(cuts_ptr + row), logits, float("-inf"))
        is_rejected = num_accepted < tl.load(num_drafts_ptr + request)
        # The recovered token must not reuse noise that the draft or a coupled target draw has used here.
        stream = tl.where(is_rejected, RESIDUAL, TARGET)
        noise = gumbel_block(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), stream, 0, split * BLOCK, BLOCK)
        of_target = tl.max(ranks_of(logits + noise, tokens, vocab_size), axis=0)
        of_residual = of_target
        if is_rejected:
            draft = first + num_accepted
            if draft_probs_ptr is None:
                remains = tokens != tl.load(draft_token_ids_ptr + draft)
                rest = tl.where(remains, logits, float("-inf"))
            else:
                probs_ptr = draft_probs_ptr + draft * probs_stride
                q = tl.load(probs_ptr + tokens, mask=tokens < vocab_size, other=0.0).to(tl.float32)
                scale = (1.0 / (tl.load(masses_ptr + row).to(tl.float64) * UNIT)).to(tl.float32)
                excess = tl.exp(logits - tl.load(maxima_ptr + row)) * scale - q
                tiny = 1.1754943508222875e-38  # the least that `log` takes; no draw can tell it from nothing
                rest = tl.where(excess >= tiny, log(tl.maximum(excess, tiny)), float("-inf"))
            of_residual = tl.max(ranks_of(rest + noise, tokens, vocab_size), axis=0)
        place = (request * tl.num_programs(1) + split) * 2
        tl.store(ranks_ptr + place, of_residual)
        tl.store(ranks_ptr + place + 1, of_target)


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["positions_ptr"])
def recovered_token_kernel(
    token_ids_ptr,  # [num_requests, width] int64
    ranks_ptr,  # [num_requests, num_splits, 2] int64
    cu_ptr,  # [num_requests + 1] int
    num_accepted_ptr,  # [num_requests] int64
    positions_ptr,  # [num_rows] int64
    is_greedy_ptr,  # [num_rows] bool, or None
    width,
    num_splits,
    SPLITS: tl.constexpr,  # >= num_splits
):
    """The best of the residual, or of p where the residual is empty."""
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(cu_ptr + request).to(tl.int64) + request
    is_random = tl.load(positions_ptr + row) >= 0
    if is_greedy_ptr is not None:
        is_random = is_random & (tl.load(is_greedy_ptr + row) == 0)
    if is_random:
        splits = tl.arange(0, SPLITS)
        places = (request * num_splits + splits) * 2
        worst = -0x7FFFFFFFFFFFFFFF
        of_residual = tl.max(tl.load(ranks_ptr + places, mask=splits < num_splits, other=worst), axis=0)
        of_target = tl.max(tl.load(ranks_ptr + places + 1, mask=splits < num_splits, other=worst), axis=0)
        is_empty = value_of(of_residual >> 32) == float("-inf")
        token_id = token_of(tl.where(is_empty, of_target, of_residual))
        tl.store(token_ids_ptr + request * width + tl.load(num_accepted_ptr + request), token_id)


def verify_probabilistic(
    logits: Tensor,  # [num_rows, vocab] float32, rows any distance apart
    truncated: TruncatedRows,  # truncate_rows of these logits with the same is_greedy and temperatures, and its cuts
    draft_token_ids: Tensor,  # [num_drafts] int64
    draft_probs: Tensor | None,  # [num_drafts, vocab], rows any distance apart; None = one-hot
    cu_num_draft_tokens: Tensor,  # [num_requests + 1] int32 or int64
    seeds: Tensor,  # [num_rows] int64
    positions: Tensor,  # [num_rows] int64; negative: padding
    *,
    max_num_draft_tokens: int,
    is_greedy: Tensor | None = None,  # [num_rows] bool
    temperatures: Tensor | None = None,  # [num_rows] float32
) -> Verified:
    """A draft stays iff u * q(x) < p(x); after the first that does not, a token of max(p - q, 0), else one of p."""
    check_rows(logits, draft_token_ids, cu_num_draft_tokens, seeds, positions, is_greedy, temperatures)
    assert draft_probs is None or draft_probs.stride(1) == 1, "tokens side by side"
    verified, num_requests = empty_result(cu_num_draft_tokens, max_num_draft_tokens)
    if num_requests == 0:
        return verified
    width, vocab_size = max_num_draft_tokens + 1, logits.shape[1]
    num_splits = triton.cdiv(vocab_size, BLOCK)
    probs_stride = 0 if draft_probs is None else draft_probs.stride(0)
    judge_kernel[(num_requests,)](
        *verified,
        logits,
        draft_probs,
        draft_token_ids,
        cu_num_draft_tokens,
        seeds,
        positions,
        is_greedy,
        temperatures,
        *truncated,
        logits.stride(0),
        probs_stride,
        width,
        PLACES=triton.next_power_of_2(width),
        num_warps=1,
        enable_fp_fusion=False,
    )
    ranks = torch.empty(num_requests, num_splits, 2, dtype=torch.int64, device=logits.device)
    recover_kernel[(num_requests, num_splits)](
        ranks,
        logits,
        draft_probs,
        draft_token_ids,
        cu_num_draft_tokens,
        verified.num_accepted_tokens,
        verified.num_draft_tokens,
        seeds,
        positions,
        is_greedy,
        temperatures,
        truncated.maxima,
        truncated.cuts,
        truncated.masses,
        logits.stride(0),
        probs_stride,
        vocab_size,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    recovered_token_kernel[(num_requests,)](
        verified.token_ids,
        ranks,
        cu_num_draft_tokens,
        verified.num_accepted_tokens,
        positions,
        is_greedy,
        width,
        num_splits,
        SPLITS=triton.next_power_of_2(num_splits),
        num_warps=1,
    )
    return verified
