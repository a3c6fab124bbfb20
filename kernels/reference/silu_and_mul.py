"""silu(gate) * up over the two halves of a fused projection.

torch's CPU silu gives other bits in the scalar tail of a loop than in its vectorised body (measured). Rows are
therefore given to it in pieces too small for torch to split among threads: every row is then walked from its own
start, and its bits do not depend on its neighbours.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_SERIAL_ELEMENTS = 32767  # torch splits an elementwise loop among threads from 32768 elements on


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[num_rows, 2 * intermediate] (gate first) -> [num_rows, intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if gate_up.is_cuda or gate.numel() <= _SERIAL_ELEMENTS:
        return F.silu(gate).mul_(up)
    rows = max(1, _SERIAL_ELEMENTS // gate.shape[-1])
    pieces = gate.tensor_split(list(range(rows, len(gate), rows)))
    return torch.cat([F.silu(piece) for piece in pieces]).mul_(up)
