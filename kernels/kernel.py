"""A Triton kernel that can be asked for without being launched, so that many are compiled at once.

Triton compiles a kernel when it is first launched, one after another. Most of that happens outside of Python's lock, so
threads share it: `compile_ahead` goes through what will be launched, and its threads compile what is not compiled yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any

import triton

MAX_THREADS = 16  # a sixth of the work is done under Python's lock
_asks_only: ContextVar[bool] = ContextVar("asks_only", default=False)
_kernels: list[Kernel] = []


class Kernel:
    """Decorates what triton.jit makes of a function that is launched."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        _kernels.append(self)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(self.fn.run, grid=grid, warmup=_asks_only.get())

    def forget_unfinished(self) -> None:
        """What an interrupt has left to be compiled: it will be asked for again."""
        for cache, *_ in getattr(self.fn, "device_caches", {}).values():  # none where kernels are interpreted
            for key in [key for key, held in list(cache.items()) if isinstance(held, triton.FutureKernel)]:
                del cache[key]


def compile_ahead(work: Callable[[], object], *, num_threads: int | None = None) -> None:
    """Compile what `work` launches, and launch nothing of it.

    So whatever kernels would write holds anything, and results mean nothing: torch may not take indices from it, nor
    may sizes or what is asked for next depend on it. All else that `work` does is done.

    Args:
        num_threads: that compile; None: one for each CPU that this process may use, MAX_THREADS at most.

    Raises:
        What `work` raises, and what Triton raises where a kernel does not compile.
    """
    num_threads = num_threads or min(len(os.sched_getaffinity(0)), MAX_THREADS)
    threads = ThreadPoolExecutor(num_threads, thread_name_prefix="compile")
    try:
        copy_context().run(_ask, work, threads)  # what it sets is over with it, however it ends
    finally:  # nobody waits here: a second interrupt would leave what the first one left
        for kernel in _kernels:
            kernel.forget_unfinished()
        threads.shutdown(wait=False, cancel_futures=True)


def _ask(work: Callable[[], object], threads: ThreadPoolExecutor) -> None:
    _asks_only.set(True)
    mode = triton.AsyncCompileMode(threads)
    mode.__enter__()
    work()
    mode.__exit__(None, None, None)  # waits for all; where `work` fails nobody shall
