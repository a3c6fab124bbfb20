"""Describes where a measurement was made."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

DRIVER = Path("/proc/driver/nvidia/version")


def conditions(device: torch.device) -> dict[str, Any]:
    """Hardware, driver and CUDA, versions of torch and Triton, and the commit; None for what is not there."""
    is_gpu = device.type == "cuda"
    return {
        "hardware": torch.cuda.get_device_name(device) if is_gpu else "CPU (Triton's interpreter)",
        "driver": _driver() if is_gpu else None,
        "cuda": torch.version.cuda if is_gpu else None,
        "torch": torch.__version__,
        "triton": version("triton"),
        "commit": _commit(),
    }


def _driver() -> str | None:
    """As in "NVRM version: NVIDIA UNIX ... Kernel Module  550.54.15  ..."."""
    found = re.search(r"\s(\d+\.[\d.]+)\s", DRIVER.read_text()) if DRIVER.exists() else None
    return found[1] if found else None


def _commit() -> str | None:
    here = Path(__file__)
    if _git(here, "ls-files", "--error-unmatch", here.name) is None:
        return None  # installed into some other repository's tree: its commit says nothing about us
    return _git(here, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(here: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(here.parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (FileNotFoundError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip()
