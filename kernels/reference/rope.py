"""Rotary position embedding in the half-split layout of Hugging Face checkpoints (Su et al., arXiv 2104.09864)."""

from __future__ import annotations

import torch


def apply_rope(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [num_rows, heads, dim] by cos, signed_sin [num_rows, 1, dim].

    signed_sin holds -sin in its first half, so that rotate_half(x) * sin == roll(x, dim / 2) * signed_sin
    without a concatenation; sign changes are exact, so the bits are those of the usual form.
    """
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * signed_sin
