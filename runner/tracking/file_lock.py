"""A lock between processes of one machine, kept in a file beside the file it protects."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Holds `<path>.lock` while the block runs; the system lets go of it when a process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":  # no flock there: start sweeps with one job at a time
        yield
        return
    import fcntl

    with path.with_name(path.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
