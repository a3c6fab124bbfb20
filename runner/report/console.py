"""The terminal, or what stands in for it."""

from __future__ import annotations

import io
import sys

from rich.console import Console, RenderableType

from runner.endings import never_raising

MIN_WIDTH = 80  # a narrower terminal wraps our lines itself; cutting numbers short would misstate them
MAX_WIDTH = 1000  # columns of a table that nothing bounds


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the process; who prints decides (runner/endings.py)."""
        raise  # what is being handled


def open_console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr that never fails on a character its encoding lacks (a path, a run's name)."""
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper) and (errors := never_raising(stream.errors)) != stream.errors:
        stream.reconfigure(errors=errors)
    return _Console(stderr=stderr)


def open_wide_console() -> Console:
    """The same on stdout, for tables."""
    console = open_console()
    console.width = max(console.width, MIN_WIDTH)
    return console


def make_room(console: Console, table: RenderableType) -> None:
    """Widen the console to what the table takes: its numbers are never cut."""
    unbounded = console.options.update(width=MAX_WIDTH)
    console.width = max(console.width, console.measure(table, options=unbounded).maximum)
