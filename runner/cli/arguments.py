"""Types of options that several programs have."""

from __future__ import annotations

import argparse
import os
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


def new_directory(text: str) -> Path:
    """An argparse type: a directory that is not there yet, or empty, where one can be made."""
    path = Path(text)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise argparse.ArgumentTypeError(
            f"must be a new or empty directory, got {text!r}; choose another, or remove it"
        )
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"must be a directory that can be made, got {text!r}; see {existing}")
    return path
