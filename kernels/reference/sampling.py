"""Sampling operations on logits rows: the definition of every processor, and the Gumbel-max draw.

All take and return float32 [num_rows, vocab] without changing their input; a masked token has logit -inf.
Each row's bits depend on that row alone: sums that decide something are sums of integers, and a value that
switches a processor off for a row (penalty 0, repetition 1, min_p 0, top_k 0, top_p 1) leaves the row's bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.reference.philox import gumbel, row_slabs
from kernels.reference.row_sum import row_sum

_NEG_INF = float("-inf")
_FARTHEST = 32.0 - 2.0**-19  # the last float32 distance that fits 31 bits in units of 2**-26; its weight is 0
_MASK31 = 0x7FFFFFFF
FIXED_LOG2_E = 3098164009  # in units of 2**-31
# 2**x - 1 on [0, 1] is about x * (c0 + c1 * x + ...), in units of 2**-32, to 5.3e-9; at 1 it stays below 1.
EXP2_COEFFICIENTS = (2977044430, 1031767986, 238353606, 41455862, 5451244, 894123)


def apply_logit_bias(logits: Tensor, row_idx: Tensor, token_ids: Tensor, bias: Tensor) -> Tensor:
    """Adds bias[i] to logits[row_idx[i], token_ids[i]]; each (row, token) at most once."""
    return logits.index_put((row_idx, token_ids), logits[row_idx, token_ids] + bias)


def mask_tokens(logits: Tensor, row_idx: Tensor, token_ids: Tensor) -> Tensor:
    """Forbids token_ids[i] in row row_idx[i]."""
    return logits.index_put((row_idx, token_ids), logits.new_full((), _NEG_INF))


def mask_tokens_where(logits: Tensor, row_idx: Tensor, token_ids: Tensor, applies: Tensor) -> Tensor:
    """Forbids token_ids[i] in row row_idx[i] where applies[i], a bool that the device alone knows."""
    # Adding -0 keeps every float's bits, so that pairs may name a token twice and disagree.
    change = torch.where(applies, _NEG_INF, -0.0).to(logits.dtype)
    return logits.index_put((row_idx, token_ids), change, accumulate=True)


def ends_with(histories: Tensor, suffixes: Tensor) -> Tensor:
    """Whether history r ends with suffix w, [num_histories, num_suffixes] bool.

    histories: [num_histories, L] int64. suffixes: [num_suffixes, L] int64, -1 in front of a shorter one.
    """
    return ((suffixes < 0) | (histories.unsqueeze(1) == suffixes)).all(dim=-1)


def keep_tokens(logits: Tensor, is_allowed: Tensor) -> Tensor:
    """Forbids every token but those of is_allowed [num_rows, vocab] bool."""
    return logits.masked_fill(~is_allowed, _NEG_INF)


def unpack_bitmask(bitmask: Tensor, *, vocab_size: int) -> Tensor:
    """[num_rows, ceil(vocab_size / 32)] int32 -> [num_rows, vocab_size] bool; token v is bit v % 32 of word v // 32."""
    # Made on the device: uploading a list would wait for it.
    order = torch.arange(8, dtype=torch.uint8, device=bitmask.device)
    places = torch.ones_like(order) << order
    # Byte by byte, the lowest first as all our platforms store them: a quarter of the memory of word by word.
    bits = bitmask.contiguous().view(torch.uint8).unsqueeze(-1) & places
    return bits.view(bitmask.shape[0], -1)[:, :vocab_size] != 0


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, *, fallback: Tensor) -> Tensor:
    """Keeps the tokens in the bitmask; a row that would keep none keeps them of its fallback [num_rows, vocab]."""
    is_allowed = unpack_bitmask(bitmask, vocab_size=logits.shape[-1])
    kept = logits.masked_fill(~is_allowed, _NEG_INF)
    is_empty = (kept == _NEG_INF).all(dim=-1, keepdim=True)
    return torch.where(is_empty & is_allowed, fallback, kept)


def condition_on_bitmask(probs: Tensor, bitmask: Tensor) -> Tensor:
    """probs [num_rows, vocab] given that the token is in the bitmask; zeros where none of their mass is."""
    kept = probs * unpack_bitmask(bitmask, vocab_size=probs.shape[-1])
    mass = row_sum(kept).to(kept.dtype).unsqueeze(1)
    return kept / mass.clamp(min=torch.finfo(kept.dtype).tiny)


def add_ancestor_counts_(counts: Tensor, ancestor_ids: Tensor, num_ancestors: Tensor) -> None:
    """Adds the first num_ancestors[row] of ancestor_ids [num_rows, K] to counts [num_rows, vocab]; -1 counts nothing.

    In place, for the counts are as large as the logits.
    """
    offsets = torch.arange(ancestor_ids.shape[1], device=ancestor_ids.device)
    is_ancestor = (offsets < num_ancestors.unsqueeze(1)) & (ancestor_ids >= 0)
    counts.scatter_add_(1, ancestor_ids.clamp(min=0), is_ancestor.to(counts.dtype))


def apply_penalties(
    logits: Tensor,  # [num_rows, vocab]
    seen: Tensor,  # [num_rows, vocab] bool: token is in prompt or output
    output_counts: Tensor,  # [num_rows, vocab] int32
    repetition: Tensor,  # [num_rows] float32
    frequency: Tensor,  # [num_rows] float32
    presence: Tensor,  # [num_rows] float32
) -> Tensor:
    """Repetition penalty (CTRL's) over prompt and output, then OpenAI's two over the output; vLLM's order."""
    factor = repetition.unsqueeze(1)
    logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    logits = logits - frequency.unsqueeze(1) * output_counts
    return logits - presence.unsqueeze(1) * (output_counts > 0)


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Drops tokens less likely than min_p [num_rows] float32 times the likeliest: logit < max + log(min_p)."""
    # The logarithm in float64, then rounded: libraries differ in the last bit of a float32 one.
    log_min_p = min_p.to(torch.float64).log().to(torch.float32)
    threshold = logits.amax(dim=-1, keepdim=True) + log_min_p.unsqueeze(1)
    return logits.masked_fill(logits < threshold, _NEG_INF)


def apply_top_k(logits: Tensor, top_k: Tensor, *, max_top_k: int) -> Tensor:
    """Keeps the top_k [num_rows] int64 likeliest tokens (<= 0 or >= vocab: all) and those that tie with the last.

    max_top_k: the largest top_k in the batch that is below the vocabulary size.
    """
    largest = logits.topk(max_top_k, dim=-1).values
    kth = largest.gather(1, (top_k.clamp(1, max_top_k) - 1).unsqueeze(1))
    keeps_all = ((top_k <= 0) | (top_k >= logits.shape[-1])).unsqueeze(1)
    return logits.masked_fill((logits < kth) & ~keeps_all, _NEG_INF)


def apply_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keeps all tokens with p >= t, t the largest probability for which the kept mass reaches top_p [num_rows] float64.

    The distribution is the softmax of the logits as they come, that is after min_p and top_k; ties at t are kept
    together. Mass is counted in fixed_point_weights: it reaches top_p when it is at least ceil(top_p * total), one
    float64 product, and at least 1, so a token of weight 0 is never needed.
    """
    ordered = logits.sort(dim=-1, descending=True).values
    mass = fixed_point_weights(ordered, ordered[:, :1]).cumsum(dim=-1)
    total = mass[:, -1:]
    needed = (top_p.unsqueeze(1) * total.to(torch.float64)).ceil_().to(torch.int64)
    num_below = (mass < needed.clamp_(min=1).minimum(total)).sum(dim=-1, keepdim=True)
    threshold = ordered.gather(1, num_below.clamp(max=logits.shape[-1] - 1))
    return logits.masked_fill((logits < threshold) & (top_p < 1.0).unsqueeze(1), _NEG_INF)


def fixed_point_weights(logits: Tensor, maxima: Tensor) -> Tensor:
    """exp(logits - maxima) in units of 2**-44, int64; float32 logits [num_rows, vocab], maxima [num_rows, 1].

    Integers add up to the same mass in any order, and the exponential is made of integers too, so every backend has
    its very bits: relative error below 2**-25 (the distance is cut at 2**-26), then rounded down; 0 from a
    distance of 30.5 on. Fewer than 2**19 entries cannot overflow.
    """
    distances = (maxima - logits).clamp_(max=_FARTHEST)
    # 5.26 times 1.31: exp(-d) = 2**-(exponent + fraction), and the polynomial in 1 - fraction is 2**(1 - fraction) - 1.
    products = distances.mul_(2.0**26).to(torch.int64).mul_(FIXED_LOG2_E)
    exponents = products >> 57
    rest = products.bitwise_right_shift_(26).bitwise_and_(_MASK31).neg_().add_(_MASK31)
    power = rest * EXP2_COEFFICIENTS[-1] >> 31
    for coefficient in EXP2_COEFFICIENTS[-2::-1]:
        power.add_(coefficient).mul_(rest).bitwise_right_shift_(31)
    return power.add_(1 << 32).bitwise_left_shift_(11).bitwise_right_shift_(exponents)


def greedy_argmax(logits: Tensor) -> Tensor:
    """argmax of each row, ties to the lowest id as torch.max documents, in a third of argmax's time on the CPU."""
    return logits.max(dim=-1).indices


def softmax(logits: Tensor) -> Tensor:
    """Of each row, [num_rows, vocab] float32.

    On a GPU torch deals a row's numbers to threads by where in 16 bytes it begins, so that a row's sum would go by its
    place among rows of an odd width: they are laid out at a width of whole 16 bytes.
    """
    lacking = -logits.shape[1] % 4 if logits.is_cuda else 0
    if lacking == 0:
        return logits.softmax(dim=-1)
    return pad(logits, (0, lacking), value=_NEG_INF).softmax(dim=-1)[:, : logits.shape[1]]


def gumbel_argmax(
    logits: Tensor,  # [num_rows, vocab] float32
    seeds: Tensor,  # [num_rows] int64
    positions: Tensor,  # [num_rows] int64
    stream: int | Tensor,  # Stream, or one for each row
    draft_step: int | Tensor = 0,
) -> Tensor:
    """A draw from softmax(logits) for each row, [num_rows] int64: argmax of logits + noise, ties to the lowest id."""
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    for rows in row_slabs(num_rows, vocab_size, logits.device):
        noise = gumbel(
            seeds[rows],
            positions[rows],
            stream[rows] if isinstance(stream, Tensor) else stream,
            draft_step[rows] if isinstance(draft_step, Tensor) else draft_step,
            vocab_size=vocab_size,
        )
        token_ids[rows] = greedy_argmax(logits[rows] + noise)
    return token_ids
