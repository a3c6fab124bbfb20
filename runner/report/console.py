"""The terminal, or what stands in for it."""

from __future__ import annotations

import io
import sys

from rich.console import Console

MIN_WIDTH = 80  # a narrower terminal wraps our lines itself; cutting numbers short would misstate them


def open_console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr that never fails on a character its encoding lacks (a path, a run's name)."""
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
        stream.reconfigure(errors="replace")
    return Console(stderr=stderr)


def open_wide_console() -> Console:
    """The same on stdout, for tables."""
    console = open_console()
    console.width = max(console.width, MIN_WIDTH)
    return console
