"""Where operations are Triton kernels, and where they are plain torch."""

from __future__ import annotations

import torch

interprets_kernels = False  # tests set it: kernels on the CPU too, under Triton's interpreter


def runs_kernels(where: torch.Tensor | torch.device) -> bool:
    """Whether operations on this tensor, or on this device, are kernels."""
    if isinstance(where, torch.device):
        return where.type == "cuda" or interprets_kernels
    return where.is_cuda or interprets_kernels
