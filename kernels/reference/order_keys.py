"""Integers that keep the order of float32 values and tell equal ones apart."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_WORD = 0xFFFFFFFF


def order_keys(values: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """int64 keys, no two of a row alike, in the order of the float32 values; of equal values the lower id is larger.

    values: [num_rows, number]. token_ids: [number] int64, below 2**32, all different; None: 0, 1, ...
    """
    bits = (values + 0.0).view(torch.int32).to(torch.int64)  # + 0.0: -0 and 0 are equal
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    if token_ids is None:
        token_ids = torch.arange(values.shape[-1], device=values.device)
    return (ordered << 32) | (_LOW_WORD - token_ids)


def token_ids_of(keys: Tensor) -> Tensor:
    return _LOW_WORD - (keys & _LOW_WORD)
