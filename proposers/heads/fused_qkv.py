"""Heads' checkpoints with a layer's projections to queries, keys and values in one tensor, as poolside's have them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from runner.engine.architecture import Architecture

FUSED = "self_attn.qkv_proj"


def split_qkv(tensors: Mapping[str, Tensor], arch: Architecture) -> dict[str, Tensor]:
    """Named tensors of a head of these layers, which are alike; one of other rows comes as it is, and is not known."""
    rows, found = arch.heads[0].qkv_rows, dict[str, Tensor]()
    for name, tensor in tensors.items():
        layer, fused, kind = name.partition(f"{FUSED}.")
        if fused and len(tensor) == sum(rows.values()):
            parts = tensor.split_with_sizes(list(rows.values()))
            found |= {f"{layer}{part}.{kind}": own for part, own in zip(rows, parts, strict=True)}
        else:
            found[name] = tensor
    return found
