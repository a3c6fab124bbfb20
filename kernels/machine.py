"""What a measurement was made on and with. Imports the standard library alone, so that everything may import it."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from pathlib import Path


def processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def driver_version() -> str | None:
    """Of NVIDIA's driver; None where nvidia-smi does not say."""
    said = _said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return said.splitlines()[0].strip() if said else None


@cache  # what was imported stays the same, whatever is committed while it runs
def git_sha() -> str | None:
    """The full hash of these packages' commit, with "-dirty" when files differ from it; None outside a git checkout."""
    here = Path(__file__)
    git = ("git", "-C", str(here.parent))
    if _said_by(*git, "ls-files", "--error-unmatch", here.name) is None:
        return None  # installed into some other repository's tree: its commit says nothing about us
    return _said_by(*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _said_by(*command: str) -> str | None:
    """What a program prints; None where it is not there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (FileNotFoundError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip()
