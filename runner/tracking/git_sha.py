"""The commit that a run was made with."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path


@cache  # what was imported stays the same, whatever is committed while it runs
def git_sha() -> str | None:
    """The full hash of this package's commit, with "-dirty" when files differ from it; None outside a git checkout."""
    here = Path(__file__)
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None  # installed into some other repository's tree: its commit says nothing about us
    return _git(here.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(directory: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (FileNotFoundError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip()
