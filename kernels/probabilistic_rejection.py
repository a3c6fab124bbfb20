"""Verification of ragged chains of drafts by their probabilities: verifier/rules.py's Probabilistic in one launch.

The vocabulary is cut among programs that all judge their request's drafts, look at the row that its last token comes
from, and leave their best token of the recovered distribution max(p - q, 0) and of p; the last to arrive takes the
best. p is the distribution that kernels/truncation.py describes, divided by its integer mass, so no order of summation
can move a decision. Requests, rows, -1 and padding as in kernels/rejection.py.
Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kernel import Kernel
from kernels.last_to_arrive import arrival_counters, is_last_to_arrive
from kernels.philox import gumbel_block, log
from kernels.reference.philox import Stream
from kernels.reference.rejection import Verified
from kernels.rejection import accept_uniforms, empty_result, length_of_prefix, load_drafts, store_tokens
from kernels.scores import best_of_splits, check_rows, load_logits, ranks_of, token_of, value_of
from kernels.sizes import cdiv, next_power_of_2
from kernels.truncation import TruncatedRows

BLOCK = 4096  # tokens of a program
NUM_WARPS = 8
TARGET: tl.constexpr = tl.constexpr(int(Stream.TARGET))
RESIDUAL: tl.constexpr = tl.constexpr(int(Stream.RESIDUAL))
UNIT: tl.constexpr = tl.constexpr(2.0**-44)  # of TruncatedRows.masses


@triton.jit
def judge(
    drafts,  # [PLACES] int64, -1 where there is none
    first,  # the request's first draft
    row,  # and its first row
    logits_ptr,
    draft_probs_ptr,
    seeds_ptr,
    positions_ptr,
    temperatures_ptr,
    maxima_ptr,
    cuts_ptr,
    masses_ptr,
    row_stride,
    probs_stride,
    places,
    PLACES: tl.constexpr,
):
    """How many drafts stay: u * q(x) < p(x), in float64."""
    is_draft, rows = drafts >= 0, row + places
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
    return length_of_prefix(is_kept & (chances < p), places, PLACES)


@Kernel
@triton.jit(
    do_not_specialize=["width", "num_splits"],
    do_not_specialize_on_alignment=["num_drafts_ptr", "cu_ptr", "positions_ptr", "cuts_ptr", "masses_ptr"],
)
def verify_probabilistic_kernel(
    token_ids_ptr,  # [num_requests, width] int64
    num_accepted_ptr,  # [num_requests] int64
    num_drafts_ptr,  # [num_requests] int64
    ranks_ptr,  # [num_requests, num_splits, 2] int64
    arrivals_ptr,  # [num_requests] int32, zeros before and after
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
    vocab_size,
    width,
    num_splits,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,  # >= width
    SPLITS: tl.constexpr,  # >= num_splits
):
    """Every program judges its request's drafts; of padding and greedy requests the first then tells what becomes.

    Of the others each leaves the best of BLOCK tokens under max(p - q, 0) and under p, both with the row's noise.
    """
    request, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = tl.arange(0, PLACES)
    row, drafts, first = load_drafts(draft_token_ids_ptr, cu_ptr, request, places)
    num_drafts = length_of_prefix(drafts >= 0, places, PLACES)
    num_accepted = num_drafts * 0
    last_token_id = tl.full((), -1, dtype=tl.int64)
    is_here = tl.load(positions_ptr + row) >= 0
    is_random = is_here
    if is_greedy_ptr is not None:
        is_random = is_random & (tl.load(is_greedy_ptr + row) == 0)
    tells = (split == 0) & (is_random == 0)
    if is_random:
        num_accepted = judge(
            drafts,
            first,
            row,
            logits_ptr,
            draft_probs_ptr,
            seeds_ptr,
            positions_ptr,
            temperatures_ptr,
            maxima_ptr,
            cuts_ptr,
            masses_ptr,
            row_stride,
            probs_stride,
            places,
            PLACES,
        )
        own, tokens = row + num_accepted, split * BLOCK + tl.arange(0, BLOCK)
        logits = load_logits(logits_ptr + own * row_stride, tokens, vocab_size)
        if temperatures_ptr is not None:
            logits = tl.div_rn(logits, tl.load(temperatures_ptr + own))
        logits = tl.where(logits >= tl.load(cuts_ptr + own), logits, float("-inf"))
        is_rejected = num_accepted < num_drafts
        # The recovered token must not reuse noise that the draft or a coupled target draw have used here.
        stream = tl.where(is_rejected, RESIDUAL, TARGET)
        noise = gumbel_block(tl.load(seeds_ptr + own), tl.load(positions_ptr + own), stream, 0, split * BLOCK, BLOCK)
        of_target = tl.max(ranks_of(logits + noise, tokens, vocab_size), axis=0)
        of_residual = of_target
        if is_rejected:
            draft = first + num_accepted
            if draft_probs_ptr is None:
                remains = tokens != tl.load(draft_token_ids_ptr + draft)
                rest = tl.where(remains, logits, float("-inf"))
            else:
                q = tl.load(draft_probs_ptr + draft * probs_stride + tokens, mask=tokens < vocab_size, other=0.0)
                scale = (1.0 / (tl.load(masses_ptr + own).to(tl.float64) * UNIT)).to(tl.float32)
                excess = tl.exp(logits - tl.load(maxima_ptr + own)) * scale - q.to(tl.float32)
                tiny = 1.1754943508222875e-38  # the least that `log` takes; no draw can tell it from nothing
                rest = tl.where(excess >= tiny, log(tl.maximum(excess, tiny)), float("-inf"))
            of_residual = tl.max(ranks_of(rest + noise, tokens, vocab_size), axis=0)
        own_ranks_ptr = ranks_ptr + request * num_splits * 2
        tl.store(own_ranks_ptr + split * 2, of_residual)
        tl.store(own_ranks_ptr + split * 2 + 1, of_target)
        if is_last_to_arrive(arrivals_ptr + request, num_splits):
            of_residual = best_of_splits(own_ranks_ptr, num_splits, 2, SPLITS)
            of_target = best_of_splits(own_ranks_ptr + 1, num_splits, 2, SPLITS)
            is_empty = value_of(of_residual >> 32) == float("-inf")  # then p itself
            last_token_id = token_of(tl.where(is_empty, of_target, of_residual))
            tells = is_here
    elif is_here:
        accepted = (drafts >= 0) & (tl.load(argmax_ptr + row + places, mask=drafts >= 0, other=-1) == drafts)
        num_accepted = length_of_prefix(accepted, places, PLACES)
        last_token_id = tl.load(argmax_ptr + row + num_accepted)
    if tells:
        store_tokens(token_ids_ptr, request, width, drafts, num_accepted, last_token_id, places)
        tl.store(num_accepted_ptr + request, num_accepted)
        tl.store(num_drafts_ptr + request, tl.where(is_here, num_drafts, 0))


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
    num_splits, device = cdiv(vocab_size, BLOCK), logits.device
    verify_probabilistic_kernel[(num_requests, num_splits)](
        *verified,
        torch.empty(num_requests, num_splits, 2, dtype=torch.int64, device=device),
        arrival_counters(num_requests, device),
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
        0 if draft_probs is None else draft_probs.stride(0),
        vocab_size,
        width,
        num_splits,
        BLOCK=BLOCK,
        PLACES=next_power_of_2(width),
        SPLITS=next_power_of_2(num_splits),
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    return verified
