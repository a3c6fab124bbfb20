"""Norm, rotations and the cache's rows of latent attention, at GLM-4.7-Flash's and DeepSeek-V3's heads."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import latent_rows as kernel
from kernels.benchmarks.case import Case, Setting, Work, check_error, name_of
from kernels.benchmarks.rope import BLOCK_SIZE, MAX_MODEL_LEN, angles
from kernels.reference.latent_rows import rotate_latents
from kernels.reference.rope import RopeTable, apply_rope

SHAPES = {"GLM-4.7-Flash": (20, 192, 64, 512), "DeepSeek-V3": (128, 128, 64, 512)}
SMALL_SHAPES = {"small": (3, 8, 16, 40)}
EPS = 1e-6


def cases(setting: Setting) -> list[Case]:
    shapes, sizes = (SMALL_SHAPES, (3,)) if setting.is_small else (SHAPES, (1, 8, 64, 512))
    return [
        Case(
            op="latent_rows",
            label=f"{name}, {num_rows} rows",
            dtype=name_of(setting.dtype),
            prepare=partial(_prepare, setting, num_rows, *shape),
        )
        for name, shape in shapes.items()
        for num_rows in sizes
    ]


def _prepare(setting: Setting, num_rows: int, num_heads: int, unturned: int, width: int, rank: int) -> Work:
    queries = setting.normal(num_rows, num_heads, unturned + width, seed=0)
    latents = setting.normal(num_rows, rank + width, seed=1)
    weights: dict[str, Any] = {"norm": setting.normal(rank, seed=2), "eps": torch.tensor(EPS, device=setting.device)}
    positions = setting.integers(0, MAX_MODEL_LEN, num_rows, seed=3)
    cache = latents.new_zeros(num_rows // BLOCK_SIZE + 2, BLOCK_SIZE, rank + width)
    slots = BLOCK_SIZE + torch.arange(num_rows, device=setting.device)  # behind the null block
    turned = queries.new_full((num_rows, num_heads, rank + width), torch.nan)[:, :, rank:]
    cos, signed_sin = angles(width, setting.device)
    compact = RopeTable(cos, signed_sin, 1, 0).compact

    def rotations(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        table = RopeTable(cos.to(dtype), signed_sin.to(dtype), num_heads + 1, 0)
        return (*table.rows(positions), table.partner)

    def exactly() -> Tensor:
        """In float64, which the reference's norm does not know."""
        latent = latents[:, :rank].double()
        normed = latent * (latent.square().mean(dim=1, keepdim=True) + EPS).rsqrt() * weights["norm"].double()
        apart = torch.cat((queries[:, :, unturned:].flatten(1), latents[:, rank:]), dim=1).double()
        rotated = apply_rope(apart, *rotations(torch.float64))
        return torch.cat((rotated[:, :-width], normed, rotated[:, -width:]), dim=1)

    def check() -> list[str]:
        held = cache.clone()
        kernel.rotate_and_store_latents(queries, latents, compact, positions, slots, held, turned, **weights)
        found = torch.cat((turned.flatten(1), held.flatten(0, 1)[slots]), dim=1)
        heads, rows = rotate_latents(queries, latents, weights["norm"], weights["eps"], *rotations(setting.dtype))
        return [check_error(found, torch.cat((heads.flatten(1), rows), dim=1), exactly())]

    in_bytes = num_rows * (num_heads * width + rank + width) * setting.dtype.itemsize
    return Work(
        check=check,
        calls=[
            partial(kernel.rotate_and_store_latents, rows, own, compact, positions, slots, cache, turned, **weights)
            for rows, own in setting.copies(in_bytes, queries, latents)
        ],
        num_bytes=2 * in_bytes + num_rows * (width * 4 + 16),
        comes_from=setting.comes_from(in_bytes),
    )
