"""Rows times the sigmoid of others, computed in float32 and rounded once."""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x: [num_rows, width], gate: [num_rows, width], or [num_rows, 1] for all columns -> [num_rows, width]."""
    return (x.float() * torch.sigmoid(gate.float())).to(x.dtype)
