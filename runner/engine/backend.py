"""Where operations are Triton kernels, and where they are plain torch."""

from __future__ import annotations

import torch

KERNEL_DEVICES = {"cuda"}  # tests add the CPU, where kernels are interpreted


def runs_kernels(device: torch.device) -> bool:
    return device.type in KERNEL_DEVICES
