"""Types of options that several programs have."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def at_least(minimum: int) -> Callable[[str], int]:
    """An argparse type: integers from the minimum on."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"must be an integer >= {minimum}, got {text!r}")
        return int(text)

    return parse


def file_to_write(text: str) -> Path:
    """An argparse type: a file in a directory that exists, so that hours of work do not end in an error."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must lie in a directory that exists, got {text!r}; make {path.parent} first")
    return path
