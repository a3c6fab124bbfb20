"""A short causal convolution within each request's rows, whose taps have a part of a row's own (DFlash 2).

A row's part of a tap is one number for a group of columns; rows in front of a segment's first one are zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.recurrent_segments import RecurrentSegments
from kernels.reference.partial_sums import PartialSums


def block_conv(
    x: Tensor | PartialSums,  # [num_rows, width]
    deltas: Tensor,  # [num_rows, taps * num_groups], of x's dtype; rows may be strided
    base: Tensor,  # [taps, width], of x's dtype; tap j is of the row j before
    segments: RecurrentSegments,  # whose rows are whose; rows behind the last segment's are its own
) -> Tensor:  # [num_rows, width]
    """Computed in float32 and rounded once; num_groups divides width, columns of a group lie side by side."""
    rows = x.total() if isinstance(x, PartialSums) else x
    (num_rows, width), taps = rows.shape, len(base)
    first_rows, _ = segments.rows()
    index = torch.arange(num_rows, device=rows.device)
    first = torch.where(first_rows <= index.unsqueeze(1), first_rows, 0).amax(dim=1)
    num_groups = deltas.shape[1] // taps
    own = deltas.float().reshape(num_rows, taps, num_groups, 1).expand(-1, -1, -1, width // num_groups).flatten(2)
    total = torch.zeros(num_rows, width, device=rows.device)
    for tap in range(taps):
        is_own = (index - first >= tap).unsqueeze(1)
        seen = torch.where(is_own, rows.float().roll(tap, dims=0), 0.0)
        total += (base[tap].float() + own[:, tap]) * seen
    return total.to(rows.dtype)
