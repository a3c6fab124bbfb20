"""Root mean square norm, with the residual add that comes before it in a pre-norm decoder.

Sums run over the hidden dimension alone, whose length is fixed, so a row's bits depend on that row only.
Follows Zhang and Sennrich (arXiv 1910.07467); computed in float32 and rounded once, as Llama does.
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [..., hidden], weight: [hidden] -> [..., hidden] in x's dtype."""
    x32 = x.float()
    normed = x32 * torch.rsqrt((x32 * x32).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual), all [num_rows, hidden]."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual
