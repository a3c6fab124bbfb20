"""activation(gate) * up over the two halves of a fused projection.

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

Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
_SERIAL_ELEMENTS = 16383  # torch splits a loop of gelu among threads from 16384 elements on, others from 32768


def act_and_mul(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """[num_rows, 2 * intermediate] (gate first) -> [num_rows, intermediate]."""
    activate = ACTIVATIONS[activation]
    gate, up = gate_up.chunk(2, dim=-1)
    if gate_up.is_cuda or gate.numel() <= _SERIAL_ELEMENTS:
        return activate(gate).mul_(up)
    rows = max(1, _SERIAL_ELEMENTS // gate.shape[-1])
    pieces = gate.tensor_split(list(range(rows, len(gate), rows)))
    return torch.cat([activate(piece) for piece in pieces]).mul_(up)
