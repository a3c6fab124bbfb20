"""The operations of latent attention, computed where their arguments are, as runner.engine.operations says."""

from __future__ import annotations

import torch

from kernels.cpu.panels import unpack
from kernels.reference.heads_linear import linear_of_heads as linear_of_heads_in_torch
from kernels.reference.latent_rows import rotate_latents
from runner.engine.backend import is_compiled, runs_kernels
from runner.engine.expert_operations import ExpertWeights
from runner.engine.kv_cache import PagedKVCache
from runner.engine.operations import NormWeights
from runner.engine.rope import RopeRows


def room_for_heads(like: torch.Tensor, num_heads: int, width: int) -> torch.Tensor:
    """[num_rows, num_heads, width] to be written, for as many rows as `like` has."""
    if not is_compiled(like):
        return like.new_empty(len(like), num_heads, width)
    from kernels.cpu.recording import empty

    return empty(len(like), num_heads, width, dtype=like.dtype)


def linear_of_heads(x: torch.Tensor, weights: ExpertWeights, out: torch.Tensor, tile: int | None) -> None:
    """[num_rows, num_heads, in_features], of each head [out_features, in_features].

    out: [num_rows, num_heads, out_features], written. Rows and heads of both may lie further apart.
    """
    if weights.panels is not None:
        from kernels.cpu.heads_linear import linear_of_heads as on_cpu

        on_cpu(x, weights.panels, out)
    elif runs_kernels(x):  # whatever the tile: as many products by a BLAS would be as many launches
        from kernels.heads_linear import linear_of_heads as kernel

        kernel(x, weights.whole, out)
    else:
        out.copy_(linear_of_heads_in_torch(x, list(map(unpack, weights)), tile))


def rotate_and_store_latents(
    queries: torch.Tensor,  # [num_rows, num_heads, unturned + dim]
    latents: torch.Tensor,  # [num_rows, rank + dim], rows may be strided
    norm: NormWeights,  # of the latents
    rope: RopeRows,
    slot_mapping: torch.Tensor,  # [num_rows] int64
    cache: PagedKVCache,
    layer: int,
    turned: torch.Tensor,  # [num_rows, num_heads, dim], strided: written
) -> None:
    """Turn the last elements of queries, norm latents, turn the key beside each, and store both."""
    weight, eps = norm
    if not (runs_kernels(queries) or is_compiled(queries)):
        width = (queries.shape[1] + 1) * turned.shape[2]  # without the values that other attention has beside them
        heads, rows = rotate_latents(queries, latents, weight, eps, *rope.up_to(width))
        cache.write(layer, slot_mapping, rows)
        turned.copy_(heads)
        return
    if runs_kernels(queries):
        from kernels.latent_rows import rotate_and_store_latents as store
    else:
        from kernels.cpu.latent_rows import rotate_and_store_latents as store
    store(
        queries,
        latents,
        rope.table.compact,
        rope.positions,
        slot_mapping,
        cache.layers[layer],
        turned,
        norm=weight,
        eps=eps,
        kv_scale=cache.scales[layer][0],
    )
