"""Logprobs of chosen tokens and of the likeliest ones: the definition.

Each row's bits depend on that row alone, and ties are broken by token id, so that the result does not depend on
the batch or on how many top tokens its other rows ask for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.order_keys import order_keys, token_ids_of

_SLAB_ELEMENTS = 1 << 22  # logits at a time: their keys and logprobs are larger than they are


def num_columns(num_top: int) -> int:
    """Of top_logprobs."""
    return 3 + 2 * num_top


def top_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """What a row of logits says of one token and of the num_top likeliest, all in one tensor for one copy.

    Args:
        logits: [num_rows, vocab], any float dtype.
        token_ids: [num_rows] int64, in the vocabulary.
        num_top: in [0, vocab].

    Returns:
        [num_rows, num_columns(num_top)] float64, which holds ids and float32 exactly: token id, its logprob (float32
        log_softmax), its rank from 1, the top tokens' ids in order of rank, their logprobs.
    """
    num_rows, vocab_size = logits.shape
    packed = torch.empty(num_rows, num_columns(num_top), dtype=torch.float64, device=logits.device)
    step = max(1, _SLAB_ELEMENTS // vocab_size)
    for rows in (slice(first, first + step) for first in range(0, num_rows, step)):
        logprobs = logits[rows].to(torch.float32).log_softmax(dim=-1)
        keys = order_keys(logprobs)
        own_ids = token_ids[rows].unsqueeze(1)
        top_keys = keys.topk(num_top, dim=-1).values
        top_ids = token_ids_of(top_keys)
        packed[rows, 0:1] = own_ids.to(torch.float64)
        packed[rows, 1:2] = logprobs.gather(1, own_ids).to(torch.float64)
        packed[rows, 2:3] = (keys >= keys.gather(1, own_ids)).sum(dim=-1, keepdim=True).to(torch.float64)
        packed[rows, 3 : 3 + num_top] = top_ids.to(torch.float64)
        packed[rows, 3 + num_top :] = logprobs.gather(1, top_ids).to(torch.float64)
    return packed
