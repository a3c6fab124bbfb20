"""silu(gate) * up over the two halves of a fused projection.

Written with exp because torch's CPU silu gives other bits in its scalar tail than in its vectorised body, so
that a row's bits would depend on where thread boundaries fall; exp gives the same bits everywhere.
"""

from __future__ import annotations

import torch


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[num_rows, 2 * intermediate] (gate first) -> [num_rows, intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate32 = gate.float()
    return (gate32 / gate32.neg().exp_().add_(1.0)).to(up.dtype) * up
