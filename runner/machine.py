"""Describes where a measurement was made, without which its numbers mean nothing."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from kernels.machine import driver_version, git_sha, processor_name
from kernels.reference.fp8_rows import FP8
from runner.assembly import Assembly


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
        "kv_cache": "fp8" if engine.target.kv_dtype == FP8 else str(engine.dtype).removeprefix("torch."),
        "weights": engine.target_info.held or str(engine.dtype).removeprefix("torch."),
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
        "driver": driver_version(),
        "cuda": torch.version.cuda,
    }
