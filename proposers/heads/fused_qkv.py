"""Heads' checkpoints with a layer's projections to queries, keys and values in one tensor, as poolside's have them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from runner.engine.architecture import Architecture
from runner.engine.head_checkpoint import HeadTensor
from runner.engine.quantized_tensors import QuantizedTensor

FUSED = "self_attn.qkv_proj"


def split_qkv(tensors: Mapping[str, HeadTensor], arch: Architecture) -> dict[str, HeadTensor]:
    """Named tensors of a head of these layers, which are alike; one of other rows comes as it is, and is not known."""
    rows, found = arch.heads[0].qkv_rows, dict[str, HeadTensor]()
    for name, tensor in tensors.items():
        layer, fused, kind = name.partition(f"{FUSED}.")
        if fused and tensor.shape[0] == sum(rows.values()):
            parts = torch.arange(tensor.shape[0]).split_with_sizes(list(rows.values()))
            found |= {f"{layer}{part}.{kind}": _rows(tensor, own) for part, own in zip(rows, parts, strict=True)}
        else:
            found[name] = tensor
    return found


def _rows(tensor: HeadTensor, index: torch.Tensor) -> HeadTensor:
    return tensor.rows(index) if isinstance(tensor, QuantizedTensor) else tensor[index]
