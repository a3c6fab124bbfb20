"""The recording that is under way in this thread (kernels/cpu/recording.py), for those who must know of it.

Without numba, which an engine loads no sooner than it compiles.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.cpu.recording import Recording

_state = threading.local()


class NotRecordableError(Exception):
    """What would be recorded depends on values, is torch's own where that is not allowed, or comes from the host."""


def current() -> Recording | None:
    return getattr(_state, "recording", None)


def begin(recording: Recording) -> None:
    assert current() is None, "a recording is under way"
    _state.recording = recording


def end() -> None:
    _state.recording = None
