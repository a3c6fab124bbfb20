"""Describes where a measurement was made, without which its numbers mean nothing."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from runner.assembly import Assembly
from runner.tiny.manifest import processor_name
from runner.tracking.git_sha import git_sha


def describe_machine(*packages: str) -> dict[str, Any]:
    """CPU, GPU (None where torch can use none), versions of Python and of the packages, and the commit."""
    return {
        "cpu": processor_name(),
        "gpu": _describe_gpu(),
        "versions": {"python": platform.python_version(), **{package: _version(package) for package in packages}},
        "commit": git_sha(),
    }


def describe_run(engine: Assembly) -> dict[str, Any]:
    """Where an engine computes and by which versions, flat: names and numbers, None for what is not known."""
    machine = describe_machine("torch", "triton", "transformers")
    gpu = machine["gpu"] if engine.device.type == "cuda" else None
    return {
        "device": str(engine.device),
        "device_name": machine["cpu"] if gpu is None else gpu["name"],
        "dtype": str(engine.dtype).removeprefix("torch."),
        "num_threads": torch.get_num_threads(),
        **({} if gpu is None else {"driver": gpu["driver"], "cuda": gpu["cuda"]}),
        **machine["versions"],
        "commit": machine["commit"],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # triton, where there is none for the platform
        return None


def _describe_gpu() -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    return {
        "name": torch.cuda.get_device_name(),
        "memory_bytes": torch.cuda.get_device_properties().total_memory,
        "driver": _driver_version(),
        "cuda": torch.version.cuda,
    }


@cache
def _driver_version() -> str | None:
    """None where nvidia-smi does not say."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (FileNotFoundError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0].strip()
