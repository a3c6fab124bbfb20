"""Ends that come from outside while something is being finished: an interrupt, and a reader that leaves."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

PATIENCE_S = 1.0  # of whoever asks twice: launchers hand an interrupt on to a process that has it already
BROKEN_PIPE_STATUS = 141  # 128 + SIGPIPE, as shells have it
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def postponed_interrupts() -> Iterator[None]:
    """An interrupt inside is raised behind the block: for what is short, and broken when it ends half done.

    One that comes PATIENCE_S later than another is raised at once.
    """
    if threading.current_thread() is not threading.main_thread():  # interrupts are the main thread's
        yield
        return
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    held: list[tuple[int, float]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held and time.monotonic() - held[0][1] >= PATIENCE_S:
            _raise(number, frame)
        held.append((number, time.monotonic()))

    def _raise(number: int, frame: FrameType | None) -> None:
        handler = handlers[number]
        assert callable(handler)
        handler(number, frame)

    for number in handlers:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if held:
            _raise(held[0][0], None)


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Whoever reads what is printed may have seen enough (`| head`): then the rest is printed to nobody."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
