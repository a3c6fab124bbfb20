"""Describes where a measurement was made."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch

from kernels.machine import driver_version, git_sha


def conditions(device: torch.device) -> dict[str, Any]:
    """Hardware, driver and CUDA, versions of torch and Triton, and the commit; None for what is not there."""
    is_gpu = device.type == "cuda"
    return {
        "hardware": torch.cuda.get_device_name(device) if is_gpu else "CPU (Triton's interpreter)",
        "driver": driver_version() if is_gpu else None,
        "cuda": torch.version.cuda if is_gpu else None,
        "torch": torch.__version__,
        "triton": version("triton"),
        "commit": git_sha(),
    }
