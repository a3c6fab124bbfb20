"""The tokens that come first in each row of logits, and their log-probabilities: what draft trees grow by."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.reference.order_keys import order_keys, token_ids_of
from kernels.reference.perturb import perturb


class Candidates(NamedTuple):
    """The highest first, of equals the lowest id first."""

    token_ids: Tensor  # [num_rows, width] int64
    log_probs: Tensor  # [num_rows, width] float32: at most 0, -inf of a logit that is


def top_candidates(
    logits: Tensor,  # [num_rows, vocab] float32
    width: int,  # in [1, vocab]
    seeds: Tensor | None = None,  # [num_owners] int64; None: no noise
    positions: Tensor | None = None,  # [num_owners] int64, in [0, 2**31); goes with seeds
    *,
    stream: int = 0,
    sharpness: int = 1,  # how many times the scores log-probabilities are of
    is_greedy: Tensor | None = None,  # [num_owners] bool: the logits as they are; None = no row
    temperatures: Tensor | None = None,  # [num_owners] float32
    cuts: Tensor | None = None,  # [num_rows] float32: what is lower once it is divided has no chance
    token_ids: Tensor | None = None,  # [vocab] int64, all different, below 2**31 - 1: the token of each column
) -> Candidates:
    """Of softmax(logits), or of softmax(logits + noise): then candidates are draws without replacement, in their order.

    Rows are owner by owner, equally many of each. With noise a log-probability is of the perturbed logits. A NaN is as
    -inf. Sharpness changes no candidate, only how sure of it a log-probability is. With token_ids, columns are a part
    of a larger vocabulary, whose noise they have.
    """
    num_owners = len(next((own for own in (seeds, is_greedy, temperatures) if own is not None), logits))
    processed = logits if temperatures is None else logits / _of_rows(temperatures, logits, num_owners).unsqueeze(1)
    if cuts is not None:
        processed = processed.masked_fill(~(processed >= cuts.unsqueeze(1)), float("-inf"))
    if seeds is not None:
        assert positions is not None, "noise has a position"
        own_seeds, own_positions = (_of_rows(values, logits, num_owners) for values in (seeds, positions))
        vocab_size = logits.shape[1] if token_ids is None else int(token_ids.max()) + 1
        nothing, no_steps = logits.new_zeros(len(logits), vocab_size), torch.zeros_like(own_seeds)
        noise = perturb(nothing, own_seeds, own_positions, no_steps, stream=stream)
        processed = processed + (noise if token_ids is None else noise.index_select(1, token_ids))
    if is_greedy is not None:
        processed = torch.where(_of_rows(is_greedy, logits, num_owners).unsqueeze(1), logits, processed)
    processed = torch.where(processed.isnan(), float("-inf"), processed)
    keys = order_keys(processed, token_ids)
    best = keys.topk(width, dim=-1)
    scores = processed.gather(1, best.indices)
    totals = (sharpness * processed.double()).logsumexp(dim=-1, keepdim=True)
    log_probs = (sharpness * scores.double() - totals).clamp(max=0.0)
    log_probs = torch.where(scores > float("-inf"), log_probs, float("-inf"))
    return Candidates(token_ids_of(best.values), log_probs.float())


def _of_rows(values: Tensor, logits: Tensor, num_owners: int) -> Tensor:
    return values.unsqueeze(1).expand(-1, len(logits) // max(num_owners, 1)).flatten()
