"""What stands in place of attention and has states, computed where its arguments are (runner.engine.operations)."""

from __future__ import annotations

import torch

from kernels.recurrent_segments import RecurrentSegments
from kernels.reference.gated_delta import DeltaHeads, DeltaRows, DeltaStates, DeltaWeights
from kernels.reference.gated_delta import gated_delta as gated_delta_in_torch
from kernels.reference.short_conv import ConvStates, ConvWeights
from kernels.reference.short_conv import short_conv as short_conv_in_torch
from runner.engine.backend import is_compiled, runs_kernels


def gated_delta(
    rows: DeltaRows,
    segments: RecurrentSegments,
    states: DeltaStates,
    weights: DeltaWeights,
    heads: DeltaHeads,
) -> torch.Tensor:  # [num_rows, values]
    """Compute rows of a gated delta net and move its states on (kernels/reference/gated_delta.py)."""
    if is_compiled(rows.mixed):
        from kernels.cpu.gated_delta import gated_delta as on_cpu

        return on_cpu(rows, segments, states, weights, heads)
    if not runs_kernels(rows.mixed):
        return gated_delta_in_torch(rows, segments, states, weights, heads)
    from kernels.gated_delta import gated_delta as kernel

    return kernel(rows, segments, states, weights, heads)


def short_conv(
    mixed: torch.Tensor,  # [num_rows, 3 * width]
    segments: RecurrentSegments,
    states: ConvStates,
    weights: ConvWeights,
) -> torch.Tensor:  # [num_rows, width]
    """Compute rows of a short convolution and keep what later ones need (kernels/reference/short_conv.py)."""
    if is_compiled(mixed):
        from kernels.cpu.short_conv import short_conv as on_cpu

        return on_cpu(mixed, segments, states, weights)
    if not runs_kernels(mixed):
        return short_conv_in_torch(mixed, segments, states, weights)
    from kernels.short_conv import short_conv as kernel

    return kernel(mixed, segments, states, weights)
