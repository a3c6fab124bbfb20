"""When Python looks for garbage: not while something is under way that it would disturb, or hold up."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_under_way = 0  # contexts, of all threads
_collects = False  # once none is


@contextmanager
def uncollected() -> Iterator[None]:
    """In all threads; what was the case before the first of them came is so again when the last one leaves."""
    global _under_way, _collects
    with _lock:
        if _under_way == 0:
            _collects = gc.isenabled()
            gc.disable()
        _under_way += 1
    try:
        yield
    finally:
        with _lock:
            _under_way -= 1
            if _under_way == 0 and _collects:
                gc.enable()
