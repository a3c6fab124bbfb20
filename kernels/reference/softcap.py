"""Soft caps of logits (Gemma 2): what they come near to and never pass."""

from __future__ import annotations

import torch


def softcap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(logits / cap), [num_rows, width] float32.

    Row by row on a CPU: torch's tanh gives other bits in the scalar tail of a loop, whose place depends on all rows.
    """
    if logits.is_cuda or len(logits) == 0:
        return (logits / cap).tanh_().mul_(cap)
    return torch.stack([(row / cap).tanh_().mul_(cap) for row in logits.unbind()])
