"""Where operations are Triton kernels, where they are compiled for the CPU, and where they are plain torch."""

from __future__ import annotations

import torch

from kernels.cpu.panels import Weight, multiplies_and_adds

COMPILED = (torch.float32, torch.bfloat16, torch.float16)
interprets_kernels = False  # tests set it: kernels on the CPU too, under Triton's interpreter


def runs_kernels(where: torch.Tensor | torch.device) -> bool:
    """Whether operations on this tensor, or on this device, are kernels."""
    if isinstance(where, torch.device):
        return where.type == "cuda" or interprets_kernels
    return where.is_cuda or interprets_kernels


def multiplies_quantized(device: torch.device) -> bool:
    """Whether there are kernels for weights held so (kernels/quantized_weight.py)."""
    return runs_kernels(device) or multiplies_and_adds()


def is_compiled(where: Weight) -> bool:
    """Whether operations on this tensor, or beside these panels, have kernels in kernels/cpu, without gradients."""
    has_gradient = isinstance(where, torch.Tensor) and where.requires_grad and torch.is_grad_enabled()
    return where.dtype in COMPILED and where.device.type == "cpu" and not interprets_kernels and not has_gradient
