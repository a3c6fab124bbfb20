"""Rows times a function of others, computed in float32 and rounded once."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.reference.act_and_mul import act_and_mul

GateFunction = Literal["sigmoid", "softplus", "gelu_tanh", "relu", "identity"]


def gate(x: Tensor, by: Tensor, function: GateFunction) -> Tensor:
    """x: [num_rows, width], by: [num_rows, gates] -> [num_rows, width].

    A gate is for as many columns side by side as there are for each: one, a head, or all. by is of x's dtype, or of
    float32.
    """
    num_columns = x.shape[1] // by.shape[1]  # of a gate
    if function == "gelu_tanh":  # as halves, of which rows are walked one by one
        gates = by.float().repeat_interleave(num_columns, dim=1)
        return act_and_mul(torch.cat((gates, x.float()), dim=1), "gelu_tanh").to(x.dtype)
    return (x.float() * _factor(by.float(), function).repeat_interleave(num_columns, dim=1)).to(x.dtype)


def _factor(by: Tensor, function: GateFunction) -> Tensor:
    if function == "softplus":
        return F.softplus(by)
    if function == "sigmoid":
        return torch.sigmoid(by)
    return by.relu() if function == "relu" else by
