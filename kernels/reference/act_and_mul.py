"""activation(gate) * up over the two halves of a fused projection.

"clamped_swiglu" is gpt-oss's (its release of August 2025): the gate is cut off above LIMIT and the other half on both
sides, which then has 1 added; g sigmoid(ALPHA g) stands for silu, and is silu(ALPHA g) / ALPHA. Ling 3's last layers
cut off silu(gate) instead, each layer by a limit of its own, and the other half by the same on both sides.

torch's CPU activations give other bits in the scalar tail of a loop than in its vectorised body (measured). Rows are
therefore given to them in pieces too small for torch to split among threads: every row is then walked from its own
start, and its bits do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F

ActivationName = Literal["silu", "gelu_tanh", "clamped_swiglu"]


@dataclass(frozen=True)
class LimitedSilu:
    """Of Ling 3: min(silu(gate), limit), times the other half cut off to [-limit, limit]."""

    limit: float


Activation = ActivationName | LimitedSilu
ALPHA, LIMIT = 1.702, 7.0  # of clamped_swiglu
ACTIVATIONS: Mapping[ActivationName, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "clamped_swiglu": F.silu,  # of ALPHA times the gate
}
_SERIAL_ELEMENTS = 16383  # torch splits a loop of gelu among threads from 16384 elements on, others from 32768


def name_and_limit(activation: Activation) -> tuple[ActivationName, float | None]:
    """How kernels are told it."""
    return ("silu", activation.limit) if isinstance(activation, LimitedSilu) else (activation, None)


def act_and_mul(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """[num_rows, 2 * intermediate] (gate first) -> [num_rows, intermediate]."""
    name, limit = name_and_limit(activation)
    activate = ACTIVATIONS[name]
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        # Halves of one tensor again: rows that lie apart are walked one by one.
        halves = (gate.clamp(max=LIMIT) * ALPHA, (up.clamp(-LIMIT, LIMIT) + 1.0) / ALPHA)
        gate, up = torch.cat(halves, dim=-1).chunk(2, dim=-1)
    pieces: tuple[torch.Tensor, ...] = (gate,)
    if not gate_up.is_cuda and gate.numel() > _SERIAL_ELEMENTS:
        rows = max(1, _SERIAL_ELEMENTS // gate.shape[-1])
        pieces = gate.tensor_split(list(range(rows, len(gate), rows)))
    gated = torch.cat([activate(piece) for piece in pieces])
    return gated.mul_(up) if limit is None else gated.clamp_(max=limit).mul_(up.clamp(-limit, limit))
