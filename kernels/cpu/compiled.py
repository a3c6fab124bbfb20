"""numba's compiler, with a cache on disk that notices when any file of a function's folder has changed.

numba's own cache looks only at the file that a function is written in, so a function that calls one of another file
would keep running that one's old code.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from numba import njit, types
from numba.core.ccallback import CFunc

from kernels.cpu.compiled_files import CompiledFiles
from kernels.garbage import uncollected

logger = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])


@cache
def digest_of_sources(folder: Path) -> str:
    """Of what is written in a folder, and of how it is compiled."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cached_on_disk(dispatcher: Any, function: Callable[..., Any]) -> None:
    """Have numba's cache of a function go by its folder's sources."""
    its_cache = dispatcher._cache
    digest = digest_of_sources(Path(function.__code__.co_filename).parent)
    its_cache._cache_file = CompiledFiles(its_cache.cache_path, its_cache._impl.filename_base, digest)


def compiled(function: Function, **options: Any) -> Function:
    """`function`, compiled at its first call; typed for numbers and contiguous numpy arrays. options: of numba."""
    try:
        dispatcher: Any = njit(cache=True, **options)(function)
    except RuntimeError:  # no directory that can be written to (NUMBA_CACHE_DIR names one): compiled in every process
        dispatcher = njit(**options)(function)
    else:
        cached_on_disk(dispatcher, function)
    typed: Function = dispatcher
    return typed


# Sums may be added up in vector lanes: in one order for every length, and no other at another call.
VECTORIZED: dict[str, Any] = {"fastmath": {"contract", "reassoc", "nsz"}, "error_model": "numpy"}


def vectorized(function: Function) -> Function:
    """`compiled`, and free to use vector lanes.

    Loops go over slices from 0: of a place further on (`row[first + index]`) numba does not know that it is not
    negative, and what it does about that leaves few lanes.
    """
    return compiled(function, **VECTORIZED)


def inlined(function: Function) -> Function:
    """`vectorized`, and written out wherever it is called: where a call would take as long as what it does."""
    return compiled(function, forceinline=True, **VECTORIZED)


def exact(function: Function) -> Function:
    """`compiled`, with every operation in its place, whatever it is a part of."""
    return compiled(function, fastmath=False, error_model="numpy")  # unsaid, numba would take the caller's


def compiled_for_c(function: Callable[..., None], argument_types: tuple[Any, ...]) -> Any:
    """`function`, `vectorized`, as C calls it: its `address`. As numba.cfunc, which has no place for our cache."""
    callback = CFunc(function, (argument_types, types.void), locals={}, options=dict(VECTORIZED))
    try:
        callback.enable_caching()
    except RuntimeError:
        after = "no folder keeps them: set NUMBA_CACHE_DIR to one that can be written to"
    else:
        after = "later starts find them compiled"
        cached_on_disk(callback, function)
    with uncollected():  # a fifth of the time, of so many objects that nearly all stay
        callback.compile()
    if callback.cache_hits == 0:
        _say_once(after)
    return callback


@cache
def _say_once(after: str) -> None:
    logger.info("compiling kernels for this CPU; %s", after)
