"""What requests ask to change in their logits, where nobody but the device knows the text; the definition.

The same numbers as kernels/reference/sampling.py's processors, laid out for rows of whole steps: what a request has is
one row of a table, and what differs from row to row of one request are a few tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.sampling import apply_penalties, unpack_bitmask

PROMPT = 1 << 30  # in `said`, on top of the output's count: the prompt says the token


def mask_and_penalise(
    logits: Tensor,  # [num_requests * n, vocab] float32, n rows of each request
    *,
    bias: Tensor | None = None,  # [num_requests, vocab] float32, is added: -inf forbids a token, -0 leaves its logit
    forbidden: Tensor | None = None,  # [num_requests * n, most] int64: tokens; below 0: none
    bitmask: Tensor | None = None,  # [num_requests * n, ceil(vocab / 32)] int32: bit v % 32 of word v // 32 allows v
    said: Tensor | None = None,  # [num_requests, vocab] int32: how often the output says a token, and PROMPT
    penalties: Tensor | None = None,  # [num_requests, 3] float32: repetition, frequency, presence; 1, 0, 0: none
    ancestors: Tensor
    | None = None,  # [num_requests * n, depth] int64: drafts that a row's token follows; below 0: none
) -> Tensor:
    """[num_requests * n, vocab] float32, never in place; said comes with penalties, ancestors count where these do."""
    changed = logits.clone()
    num_rows, vocab_size = logits.shape
    if bias is not None:
        changed += _of_rows(bias, num_rows)
    if forbidden is not None:
        changed.masked_fill_(_counts(forbidden, vocab_size) > 0, float("-inf"))
    if bitmask is not None:
        changed.masked_fill_(~unpack_bitmask(bitmask, vocab_size=vocab_size), float("-inf"))
    if said is not None:
        assert penalties is not None, "what was said counts where it is penalised"
        own, of_rows = _of_rows(said, num_rows), _of_rows(penalties, num_rows)
        if ancestors is not None:
            own = own + _counts(ancestors, vocab_size)
        changed = apply_penalties(changed, own > 0, own % PROMPT, *of_rows.unbind(1))
    return changed


def _of_rows(values: Tensor, num_rows: int) -> Tensor:
    return values.repeat_interleave(num_rows // len(values), dim=0)


def _counts(token_ids: Tensor, vocab_size: int) -> Tensor:
    """How often each row has each token, [num_rows, vocab] int32."""
    counts = torch.zeros(len(token_ids), vocab_size, dtype=torch.int32, device=token_ids.device)
    return counts.scatter_add_(1, token_ids.clamp(min=0), (token_ids >= 0).to(torch.int32))
