"""Weights that benchmarks multiply by, dense or quantized: random ones, their bytes, and copies of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernels.benchmarks.case import Setting
from kernels.quantized_weight import QuantizedWeight, block_columns, num_groups
from kernels.words import Kind

Weight = Tensor | QuantizedWeight
NEAR_ONE = (232, 248)  # block scales from 1/2 to below 2


def random_codes(like: Tensor, kind: Kind, group_size: int) -> QuantizedWeight:
    """In place of a dense weight, on its device; all codes are as likely, and an int4 has zero points."""
    out_features, in_features = like.shape
    generator = torch.Generator(like.device).manual_seed(2)
    drawn: dict[str, Any] = {"generator": generator, "device": like.device}
    groups = (out_features, num_groups(in_features, group_size) if kind == "int4" else 1)
    blocks = (out_features, block_columns(in_features))
    return QuantizedWeight(
        kind=kind,
        in_features=in_features,
        numbers=torch.randint(0, 256, (out_features, in_features // 2), dtype=torch.uint8, **drawn).view(torch.int32),
        scales=torch.full(groups, 0.2 / in_features**0.5, device=like.device),
        group_size=group_size,
        dtype=like.dtype,
        zeros=torch.randint(6, 11, groups, dtype=torch.int8, **drawn) if kind == "int4" else None,
        block_scales=torch.randint(*NEAR_ONE, blocks, dtype=torch.uint8, **drawn) if kind == "fp4" else None,
        is_in_words=True,
    )


def num_bytes_of(weight: Weight) -> int:
    return sum(part.nbytes for part in _parts(weight).values())


def copies_of(setting: Setting, weight: Weight, num_bytes: int) -> list[Any]:
    """As Setting.copies. num_bytes: of the weight, what a call touches."""
    parts = _parts(weight)
    copies = setting.copies(num_bytes, *parts.values())
    if isinstance(weight, Tensor):
        return [own for (own,) in copies]
    changes: list[dict[str, Any]] = [dict(zip(parts, own, strict=True)) for own in copies]
    return [replace(weight, **own) for own in changes]


def _parts(weight: Weight) -> dict[str, Tensor]:
    return {"weight": weight} if isinstance(weight, Tensor) else weight.tensors
