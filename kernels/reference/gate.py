"""Rows times a function of others, computed in float32 and rounded once."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kernels.reference.act_and_mul import act_and_mul

GateFunction = Literal["sigmoid", "gelu_tanh", "relu", "identity"]


def gate(x: Tensor, by: Tensor, function: GateFunction) -> Tensor:
    """x: [num_rows, width], by: [num_rows, width], or [num_rows, 1] for all columns -> [num_rows, width].

    by is of x's dtype, or of float32.
    """
    if function == "gelu_tanh":  # as halves, of which rows are walked one by one
        return act_and_mul(torch.cat((by.float().expand_as(x), x.float()), dim=1), "gelu_tanh").to(x.dtype)
    factor = by.float()
    if function != "identity":
        factor = factor.relu() if function == "relu" else torch.sigmoid(factor)
    return (x.float() * factor).to(x.dtype)
