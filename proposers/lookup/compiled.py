"""numba's compiler, with a cache on disk that notices when any file of this folder has changed.

numba's own cache looks only at the file that a function is written in, so a function that calls one of another file
would keep running that one's old code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def _digest_of_sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


SOURCES = _digest_of_sources()


def compiled(function: Function) -> Function:
    """`function`, compiled at its first call; typed for numbers and contiguous numpy arrays."""
    try:
        dispatcher: Any = njit(cache=True)(function)
    except RuntimeError:  # no directory that can be written to (NUMBA_CACHE_DIR names one): compiled in every process
        dispatcher = njit(function)
    else:
        dispatcher._cache._cache_file._source_stamp = SOURCES
    typed: Function = dispatcher
    return typed


@compiled
def wide(number: int) -> int:
    """An int64 of what an array or a constant gave: numba compiles a function once for every kind of integer."""
    return int(np.int64(number))
