"""A process that is told to stop ends as one that is interrupted: its run marked so, its results kept."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPT_STATUS = 130  # 128 + SIGINT, as shells have it


@contextmanager
def ends_without_a_word() -> Iterator[None]:
    """Inside, Ctrl-C ends the process at once: for imports, which have nothing to save and a traceback to show.

    Where SIGINT is ignored, as in a shell's background, it stays ignored.
    """
    is_mine = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_mine or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda signum, frame: os._exit(INTERRUPT_STATUS))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupt_on_termination() -> None:
    """From now on SIGTERM raises KeyboardInterrupt, as Ctrl-C does, and so does the end of the terminal (SIGHUP).

    Under nohup, which ignores SIGHUP, it stays ignored. Only the main thread may ask for this.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _interrupt_without_terminal)


if sys.platform != "win32":

    def _interrupt_without_terminal(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # shell and kernel both send one: the second would end the saving
        for descriptor in (1, 2):
            # What is printed to a terminal that is gone raises OSError, in place of what is still to be saved. It may
            # be there yet for a moment, so nothing asks whether it is.
            with suppress(OSError):  # it may have been closed from the start
                if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                    null = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(null, descriptor)
                    os.close(null)
        signal.default_int_handler(signum, frame)
