"""Rotation of a fused projection's rows, and their way into the cache, at Llama-3-8B's heads.

And what Gemma 4's layers do with heads of 512: all are normed first, and where a layer reads another's keys and values,
rows are queries alone. Hunyuan's queries and keys are normed once they are turned.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import rope as kernel
from kernels.benchmarks.case import Case, Setting, Work, check_equal, check_error, name_of
from kernels.benchmarks.rms_norm import EPS, exact_norm
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rope import RopeTable, apply_rope

BLOCK_SIZE, MAX_MODEL_LEN, THETA = 16, 8192, 500_000.0


def cases(setting: Setting) -> list[Case]:
    heads, sizes = ((4, 2, 16), (3,)) if setting.is_small else ((32, 8, 128), (1, 8, 64, 512))
    wide, wide_sizes = ((5, 1, 512), (3,)) if setting.is_small else ((32, 4, 512), (1, 64))
    return [
        Case(
            op="rope",
            label=f"{what}{num_rows} rows",
            dtype=name_of(setting.dtype),
            prepare=partial(_prepare, setting, num_rows, *own, normed_kinds, turns_first),
        )
        for what, own, normed_kinds, turns_first, own_sizes in (
            ("", heads, "", False, sizes),
            ("normed once turned, ", heads, "qk", True, wide_sizes),
            ("normed heads of 512, ", wide, "qkv", False, wide_sizes),
            ("queries of 512 alone, ", (wide[0], 0, wide[2]), "q", False, wide_sizes),
        )
        for num_rows in own_sizes
    ]


def angles(head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and signed sin [MAX_MODEL_LEN, head_dim] float32."""
    frequencies = THETA ** -(torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(MAX_MODEL_LEN, device=device, dtype=torch.float64), frequencies)
    sin = angles.sin()
    return torch.cat((angles.cos(),) * 2, dim=1).float(), torch.cat((-sin, sin), dim=1).float()


def _prepare(
    setting: Setting,
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    normed_kinds: str,
    turns_first: bool,
) -> Work:
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
    kinds = {"q_norm": num_heads, "k_norm": num_kv_heads, "v_norm": num_kv_heads}
    weights = {
        name: setting.normal(head_dim, seed=seed).float()
        for seed, name in enumerate(kinds, 3)
        if name[0] in normed_kinds
    }
    eps = torch.tensor(EPS, device=setting.device)
    norms: dict[str, Any] = {**weights, "eps": eps} if weights else {}
    norms |= {"turns_first": True} if turns_first else {}

    def op(rows: Tensor, held: Tensor) -> Tensor:
        if num_kv_heads == 0:
            return kernel.rotate(rows, compact, positions, num_heads=num_heads, head_dim=head_dim, **norms)
        sizes: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        return kernel.rope_and_write(rows, compact, positions, slots, held, **sizes, **norms)

    def by_definition(dtype: torch.dtype) -> Tensor:
        norm = exact_norm if dtype == torch.float64 else rms_norm
        table = RopeTable(cos.to(dtype), signed_sin.to(dtype), num_heads + num_kv_heads, values)

        def normed(rows: Tensor) -> Tensor:
            heads = rows.view(num_rows, -1, head_dim).split_with_sizes(tuple(kinds.values()), dim=1)
            parts = [
                norm(own, weights[name], eps) if name in weights else own
                for name, own in zip(kinds, heads, strict=True)
            ]
            return torch.cat(parts, dim=1).flatten(1)

        def turned(rows: Tensor) -> Tensor:
            return apply_rope(rows, *table.rows(positions), table.partner)

        rows = qkv.to(dtype)
        return normed(turned(rows)) if turns_first else turned(normed(rows))

    def check() -> list[str]:
        turned, held = qkv.clone(), cache.clone()
        op(turned, held)
        written = held.flatten(0, 1)[slots]
        found = torch.cat((turned[:, :queries], written), dim=1)
        if "v" not in normed_kinds:
            check_equal("values", written[:, values:], qkv[:, queries + values :])
        check_equal("the row's own keys and values", turned[:, queries:], qkv[:, queries:])
        return [check_error(found, by_definition(setting.dtype), by_definition(torch.float64))]

    row_bytes = qkv.shape[1] * setting.dtype.itemsize
    return Work(
        check=check,
        # In place: a call turns on what the one before on its copy has turned, which keeps lengths, or norms it again.
        calls=[partial(op, own, cache) for (own,) in setting.copies(num_rows * row_bytes, qkv)],
        num_bytes=num_rows * (2 * row_bytes + head_dim * 4 + 16) + sum(weight.nbytes for weight in weights.values()),
        comes_from=setting.comes_from(num_rows * row_bytes),
    )
