"""Logprobs of chosen tokens and of the likeliest ones: the definition.

Each row's bits depend on that row alone, and equal logits are ranked by token id, so that the result does not depend on
the batch or on how many top tokens its other rows ask for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.order_keys import order_keys, token_ids_of

_SLAB_ELEMENTS = 1 << 22  # logits at a time: what is made of them is larger than they are


def num_columns(num_top: int) -> int:
    """Of top_logprobs."""
    return 3 + 2 * num_top


def top_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """What a row of logits says of one token and of the num_top likeliest, all in one tensor for one copy.

    Args:
        logits: [num_rows, vocab] float32; a NaN is as -inf.
        token_ids: [num_rows] int64, in the vocabulary.
        num_top: in [0, vocab].

    Returns:
        [num_rows, num_columns(num_top)] float64, which holds ids and float32 exactly: token id, its logprob (logit -
        log(sum(exp(logits))) in float64, then rounded to float32), its rank by logit from 1, the top tokens' ids in
        order of rank, their logprobs.
    """
    num_rows, vocab_size = logits.shape
    packed = torch.empty(num_rows, num_columns(num_top), dtype=torch.float64, device=logits.device)
    step = max(1, _SLAB_ELEMENTS // vocab_size)
    for rows in (slice(first, first + step) for first in range(0, num_rows, step)):
        scores = torch.where(logits[rows].isnan(), float("-inf"), logits[rows])
        keys, own_ids = order_keys(scores), token_ids[rows].unsqueeze(1)
        top_ids = token_ids_of(keys.topk(num_top, dim=-1).values)
        ids = torch.cat((own_ids, top_ids), dim=1)
        told = scores.gather(1, ids)
        logprobs = (told.double() - scores.double().logsumexp(dim=-1, keepdim=True)).clamp(max=0.0).float()
        logprobs = torch.where(told > float("-inf"), logprobs, float("-inf")).double()
        rank = (keys >= keys.gather(1, own_ids)).sum(dim=-1, keepdim=True)
        packed[rows] = torch.cat((own_ids, logprobs[:, :1], rank, top_ids, logprobs[:, 1:]), dim=1)
    return packed
