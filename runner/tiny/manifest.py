"""The record beside the checkpoints: how they were made, how good they are as stored, and the hash of every file.

The recipe writes the keys `recipe`, `stages`, `models`, `corpus`, `environment` and `files` afresh with every run;
whoever measures more about the checkpoints (acceptance) adds a key. Files and directories arrive whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernels.machine import processor_name
from kernels.whole_file import replacing


def read_manifest(path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return manifest


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    with replacing(path) as file:
        file.write(json.dumps(manifest, indent=2).encode() + b"\n")


def file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def file_records(root: Path, directories: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """{"target/config.json": {"sha256": ..., "bytes": ...}}, for every file of `directories` under `root`."""
    return {
        path.relative_to(root).as_posix(): {"sha256": file_sha256(path), "bytes": path.stat().st_size}
        for directory in directories
        for path in sorted((root / directory).glob("*"))
    }


def without(entries: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The entries of other models than `names`; an entry is called after its model or a file of it."""
    return {name: entry for name, entry in entries.items() if name.partition("/")[0] not in names}


@contextmanager
def stage_clock(record: dict[str, Any]) -> Iterator[None]:
    """Adds `wall_seconds` and the process's `cpu_seconds` (all threads) to `record` when the block ends."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    record["wall_seconds"] = round(time.perf_counter() - wall, 1)
    record["cpu_seconds"] = round(time.process_time() - cpu, 1)


def environment(device: str, num_threads: int) -> dict[str, Any]:
    """Where a run took place: processor, threads and the versions that decide its numbers."""
    import safetensors
    import tokenizers
    import torch
    import transformers

    return {
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else processor_name(),
        "num_threads": num_threads,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "safetensors": safetensors.__version__,
    }
