"""A process that is told to stop ends as one that is interrupted: its run marked so, its results kept."""

from __future__ import annotations

import signal
import threading


def interrupt_on_termination() -> None:
    """From now on SIGTERM raises KeyboardInterrupt, as Ctrl-C does; only the main thread may ask for it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
