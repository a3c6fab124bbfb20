"""activation(gate) * up over the two halves of a fused projection.

"clamped_swiglu" is gpt-oss's (its release of August 2025): the gate is cut off above LIMIT and the other half on both
sides, which then has 1 added; g sigmoid(ALPHA g) stands for silu, and is silu(ALPHA g) / ALPHA.

torch's CPU activations give other bits in the scalar tail of a loop than in its vectorised body (measured). Rows are
therefore given to them in pieces too small for torch to split among threads: every row is then walked from its own
start, and its bits do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
ALPHA, LIMIT = 1.702, 7.0  # of clamped_swiglu
ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "clamped_swiglu": F.silu,  # of ALPHA times the gate
}
_SERIAL_ELEMENTS = 16383  # torch splits a loop of gelu among threads from 16384 elements on, others from 32768


def act_and_mul(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """[num_rows, 2 * intermediate] (gate first) -> [num_rows, intermediate]."""
    activate = ACTIVATIONS[activation]
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        # Halves of one tensor again: rows that lie apart are walked one by one.
        halves = (gate.clamp(max=LIMIT) * ALPHA, (up.clamp(-LIMIT, LIMIT) + 1.0) / ALPHA)
        gate, up = torch.cat(halves, dim=-1).chunk(2, dim=-1)
    if gate_up.is_cuda or gate.numel() <= _SERIAL_ELEMENTS:
        return activate(gate).mul_(up)
    rows = max(1, _SERIAL_ELEMENTS // gate.shape[-1])
    pieces = gate.tensor_split(list(range(rows, len(gate), rows)))
    return torch.cat([activate(piece) for piece in pieces]).mul_(up)
