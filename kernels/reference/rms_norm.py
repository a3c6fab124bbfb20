"""Root mean square norm, with the residual add that comes before it in a pre-norm decoder.

Sums run over the hidden dimension alone, whose length is fixed, so a row's bits depend on that row only.
Follows Zhang and Sennrich (arXiv 1910.07467); computed in float32 and rounded once, as Llama does.
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """x: [..., hidden], weight: [hidden], eps: [] float32 -> [..., hidden] in x's dtype.

    weight is of x's dtype, or of float32; one of float32 multiplies rows of 16 bits before they are rounded (Gemma).
    """
    # Through the vector norm: on the CPU a mean along rows costs three times as much.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.addcmul(eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    normed = x * scale
    if weight.dtype != x.dtype:
        return (normed * weight).to(x.dtype)
    return (normed if normed.dtype == x.dtype else normed.to(x.dtype)) * weight


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: torch.Tensor,
    x_weight: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    x_eps: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual), all [num_rows, hidden]; with x_weight [hidden] x is normed first.

    scale: [] float32, by which the sum is multiplied once it is rounded, before all else is done with it (Gemma 4).
    x_eps: [] float32, of the norm of x (Muse Glimmer); None: eps.
    """
    normed = x if x_weight is None else rms_norm(x, x_weight, eps if x_eps is None else x_eps)
    residual = _scaled(residual + normed, scale)
    return rms_norm(residual, weight, eps), residual


def add_normed(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """norm(x) + residual, all [num_rows, hidden] (OLMo 2); scale as above."""
    return _scaled(residual + rms_norm(x, weight, eps), scale)


def _scaled(total: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return total if scale is None else (total.float() * scale).to(total.dtype)


def sum_beside_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: torch.Tensor,
    x_weight: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    x_eps: torch.Tensor | None = None,
) -> torch.Tensor:
    """[x + residual, norm(x + residual)] side by side, [num_rows, 2 * hidden]; the rest as add_rms_norm's."""
    normed, total = add_rms_norm(x, residual, weight, eps, x_weight, scale, x_eps)
    return torch.cat((total, normed), dim=1)


def rms_norm_pair(
    embeddings: torch.Tensor,  # [vocab, hidden]; [num_rows, hidden] without token_ids
    token_ids: torch.Tensor | None,  # [num_rows] int64
    states: torch.Tensor,  # [num_rows, hidden]
    embedding_weight: torch.Tensor,  # [hidden]
    state_weight: torch.Tensor,  # [hidden]
    eps: torch.Tensor,  # [] float32
    *,
    states_first: bool = False,
) -> torch.Tensor:  # [num_rows, 2 * hidden]
    """The norm of each token's embedding, and behind it that of its state, or the other way round."""
    rows = embeddings if token_ids is None else embeddings.index_select(0, token_ids)
    pair = (rms_norm(rows, embedding_weight, eps), rms_norm(states, state_weight, eps))
    return torch.cat(pair[::-1] if states_first else pair, dim=1)
