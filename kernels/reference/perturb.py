"""Logits with each token's noise on top (the Gumbel top-k trick draws candidates by their order, arXiv 1903.06059)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.philox import gumbel, row_slabs


def perturb(logits: Tensor, seeds: Tensor, positions: Tensor, draft_steps: Tensor, *, stream: int) -> Tensor:
    """logits [num_rows, vocab] + gumbel(seed, position, stream, draft step) of each token; the others [num_rows]."""
    num_rows, vocab_size = logits.shape
    noise = [
        gumbel(seeds[slab], positions[slab], stream, draft_steps[slab], vocab_size=vocab_size)
        for slab in row_slabs(num_rows, vocab_size, logits.device)
    ]
    return logits + torch.cat(noise)
