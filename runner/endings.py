"""Ends that come from outside while something is being finished: an interrupt, a reader that leaves, a full disk."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO

PATIENCE_S = 1.0  # of whoever asks twice: launchers hand an interrupt on to a process that has it already
LOST_OUTPUT_STATUS = 1
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
        _print_to_nobody(sys.stdout.fileno())


def printing(work: Callable[[], int]) -> int:
    """Does the work of a program and returns its status, whatever becomes of stdout.

    A reader that leaves ends the work; what is saved is saved inside a reader_may_leave of its own. Where stdout is
    closed or full the work goes on: it would otherwise lose its results for want of a place to show them.
    """
    before, guarded, failure = sys.stdout, _guarded(sys.stdout), None
    sys.stdout = guarded
    raises, logging.raiseExceptions = logging.raiseExceptions, False  # it would print them, and Hydra logs to stdout
    status = BROKEN_PIPE_STATUS
    try:
        with reader_may_leave():
            status = work()
    finally:
        sys.stdout, logging.raiseExceptions = before, raises
        if isinstance(guarded, _Stdout):
            failure = guarded.failure
            guarded.detach()  # its end would close what it shares with the one before
        if failure is not None:
            print(f"error: stdout cannot be written to ({failure}): what was printed is lost", file=sys.stderr)
    return status if failure is None else status or LOST_OUTPUT_STATUS


def never_raising(errors: str | None) -> str | None:
    """What a stream does about characters that its encoding lacks, made harmless: names of files may hold any."""
    return "backslashreplace" if errors in ("strict", "surrogateescape") else errors


class _Stdout(io.TextIOWrapper):
    """What it cannot write goes to nobody, but for a reader that left (BrokenPipeError)."""

    failure: str | None = None

    def write(self, text: str, /) -> int:
        with self._noting_failure():
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._noting_failure():
            super().flush()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            self.failure = error.strerror
            _print_to_nobody(self.fileno())


def _guarded(stream: TextIO | None) -> TextIO:
    """The process's own stdout as a _Stdout, or one that stands in for it where it was closed from the start."""
    if stream is None:
        closed = _Stdout(io.BufferedWriter(io.FileIO(os.devnull, "w")), encoding="utf-8")
        closed.failure = "it is closed"
        return closed
    if stream is not sys.__stdout__ or not isinstance(stream, io.TextIOWrapper):
        return stream  # a caller's
    options: Any = {name: getattr(stream, name) for name in ("encoding", "line_buffering", "write_through")}
    return _Stdout(stream.buffer, errors=never_raising(stream.errors), **options)


def _print_to_nobody(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
