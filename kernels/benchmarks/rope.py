"""Rotation of a fused projection's rows, and their way into the cache, at Llama-3-8B's heads."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import rope as kernel
from kernels.benchmarks.case import Case, Setting, Work, check_equal, check_error, name_of
from kernels.reference.rope import RopeTable, apply_rope

BLOCK_SIZE, MAX_MODEL_LEN, THETA = 16, 8192, 500_000.0


def cases(setting: Setting) -> list[Case]:
    heads, sizes = ((4, 2, 16), (3,)) if setting.is_small else ((32, 8, 128), (1, 8, 64, 512))
    return [
        Case(
            op="rope",
            label=f"{num_rows} rows",
            dtype=name_of(setting.dtype),
            prepare=partial(_prepare, setting, num_rows, *heads),
        )
        for num_rows in sizes
    ]


def angles(head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and signed sin [MAX_MODEL_LEN, head_dim] float32."""
    frequencies = THETA ** -(torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(MAX_MODEL_LEN, device=device, dtype=torch.float64), frequencies)
    sin = angles.sin()
    return torch.cat((angles.cos(),) * 2, dim=1).float(), torch.cat((-sin, sin), dim=1).float()


def _prepare(setting: Setting, num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int) -> Work:
    queries, values = num_heads * head_dim, num_kv_heads * head_dim
    qkv = setting.normal(num_rows, queries + 2 * values, seed=0)
    positions = setting.integers(0, MAX_MODEL_LEN, num_rows, seed=1)
    cache = qkv.new_zeros(num_rows // BLOCK_SIZE + 2, BLOCK_SIZE, 2 * values)
    num_slots = cache.shape[0] * BLOCK_SIZE
    generator = torch.Generator(setting.device).manual_seed(2)
    slots = torch.randperm(num_slots - BLOCK_SIZE, generator=generator, device=setting.device)[:num_rows]
    slots += BLOCK_SIZE  # behind the null block
    cos, signed_sin = angles(head_dim, setting.device)
    compact = RopeTable(cos, signed_sin, 1, 0).compact
    sizes: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}

    def by_definition(dtype: torch.dtype) -> Tensor:
        table = RopeTable(cos.to(dtype), signed_sin.to(dtype), num_heads + num_kv_heads, values)
        return apply_rope(qkv.to(dtype), *table.rows(positions), table.partner)

    def check() -> list[str]:
        turned, held = qkv.clone(), cache.clone()
        kernel.rope_and_write(turned, compact, positions, slots, held, **sizes)
        written = held.flatten(0, 1)[slots]
        found = torch.cat((turned[:, :queries], written), dim=1)
        check_equal("values", written[:, values:], qkv[:, queries + values :])
        check_equal("the row's own keys and values", turned[:, queries:], qkv[:, queries:])
        return [check_error(found, by_definition(setting.dtype), by_definition(torch.float64))]

    row_bytes = qkv.shape[1] * setting.dtype.itemsize
    return Work(
        check=check,
        # In place: a call turns on what the one before on its copy has turned, which keeps lengths.
        calls=[
            partial(kernel.rope_and_write, own, compact, positions, slots, cache, **sizes)
            for (own,) in setting.copies(num_rows * row_bytes, qkv)
        ],
        num_bytes=num_rows * (2 * row_bytes + head_dim * 4 + 16),
        comes_from=setting.comes_from(num_rows * row_bytes),
    )
