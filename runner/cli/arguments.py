"""Types of options that several programs have, and whether a directory can be filled."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory


def at_least(minimum: int) -> Callable[[str], int]:
    """An argparse type: integers from the minimum on."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"must be an integer >= {minimum}, got {text!r}")
        return int(text)

    return parse


def file_to_write(text: str) -> Path:
    """An argparse type: a file that can be written, so that hours of work do not end in an error."""
    path = Path(text)
    if not os.path.isdir(path.parent):  # Path.is_dir raises where a name is too long
        raise argparse.ArgumentTypeError(f"must lie in a directory that exists, got {text!r}; make {path.parent} first")
    reason = "it is a directory" if os.path.isdir(path) else None
    try:
        NamedTemporaryFile(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent).close()  # as it will be written
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise argparse.ArgumentTypeError(f"must be a file that can be written, got {text!r}: {reason}; choose another")
    return path


def directory_to_fill(text: str) -> Path:
    """An argparse type: a directory that files can be written to, there or yet to be made."""
    if (reason := obstacle(text)) is not None:
        rule = "must be a directory that can be made"
        raise argparse.ArgumentTypeError(f"{rule}, got {text!r}: {reason}; choose another")
    return Path(text)


def new_directory(text: str) -> Path:
    """An argparse type: a directory that is not there yet, or empty, where one can be made."""
    path = Path(text)
    if os.path.isfile(path) or (text and os.path.isdir(path) and any(path.iterdir())):
        raise argparse.ArgumentTypeError(
            f"must be a new or empty directory, got {text!r}; choose another, or remove it"
        )
    return directory_to_fill(text)


def obstacle(text: str) -> str | None:
    """Why no files can be written to a directory, there or yet to be made; None where they can.

    It is tried, for root may do all that os.access asks for. Beside what is there, so that programs that start at the
    same time do not remove each other's.
    """
    if not text:
        return "it is empty"  # it would be the current one
    path = Path(os.path.abspath(text))
    existing = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not os.path.isdir(existing):
        return f"{existing} is no directory"
    try:
        with TemporaryDirectory(prefix=".", dir=existing) as probe:
            (Path(probe) / path.relative_to(existing)).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"writing to {existing} fails: {error.strerror}"
    return None
