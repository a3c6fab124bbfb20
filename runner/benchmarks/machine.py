"""What a measurement has to say about where it was made."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import version
from typing import Any

from runner.tiny.manifest import processor_name
from runner.tracking.git_sha import git_sha


def describe_machine(*packages: str) -> dict[str, Any]:
    """CPU, GPU (None where torch can use none), versions of Python and of the packages, and the commit."""
    return {
        "cpu": processor_name(),
        "gpu": _describe_gpu(),
        "versions": {"python": platform.python_version(), **{package: version(package) for package in packages}},
        "commit": git_sha(),
    }


def _describe_gpu() -> dict[str, Any] | None:
    import torch

    if not torch.cuda.is_available():
        return None
    return {
        "name": torch.cuda.get_device_name(),
        "memory_bytes": torch.cuda.get_device_properties().total_memory,
        "driver": _driver_version(),
        "cuda": torch.version.cuda,
    }


def _driver_version() -> str | None:
    """None where nvidia-smi does not say."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (FileNotFoundError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0].strip()
