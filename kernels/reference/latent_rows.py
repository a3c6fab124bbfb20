"""What latent attention does to rows between its projections and the cache (DeepSeek-V2, arXiv 2405.04434).

A token's keys and values, of all heads, are read from one latent; beside it a key that all heads share says where the
token stands. The cache holds the latent behind its norm and that key behind its rotation, one behind the other. Queries
are turned likewise: the last elements of each head.
"""

from __future__ import annotations

import torch

from kernels.reference.rms_norm import rms_norm
from kernels.reference.rope import apply_rope


def rotate_latents(
    queries: torch.Tensor,  # [num_rows, num_heads, unturned + turned]
    latents: torch.Tensor,  # [num_rows, rank + turned]
    weight: torch.Tensor,  # [rank], of the norm, of the dtype of latents
    eps: torch.Tensor,  # [] float32
    cos: torch.Tensor,  # [num_rows, (num_heads + 1) * turned]
    signed_sin: torch.Tensor,
    partner: torch.Tensor,  # [(num_heads + 1) * turned] int64, as apply_rope has it
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what is turned of the queries [num_rows, num_heads, turned], the cache's rows [num_rows, rank + turned])."""
    num_rows, num_heads, _ = queries.shape
    rank = len(weight)
    turned = latents.shape[1] - rank
    apart = torch.cat((queries[:, :, -turned:].flatten(1), latents[:, rank:]), dim=1)
    heads, key = apply_rope(apart, cos, signed_sin, partner).split_with_sizes((num_heads * turned, turned), dim=1)
    normed = rms_norm(latents[:, :rank], weight, eps)
    return heads.reshape(num_rows, num_heads, turned), torch.cat((normed, key), dim=1)
