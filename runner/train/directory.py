"""A checkpoint's directory arrives whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced_directory(directory: Path) -> Iterator[Path]:
    """Yields an empty staging directory that takes the place of `directory` when the block ends without an error."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=directory.parent))
    try:
        new = staging / "new"
        new.mkdir()
        yield new
        if directory.exists():
            os.replace(directory, staging / "old")
        os.replace(new, directory)
    finally:
        shutil.rmtree(staging)
