"""torch's own OpenMP threads for compiled kernels: whoever is free does the next part of the kernel under way.

A second pool of threads would stand in the way of torch's, which go on looking for work a while after each operation.
OpenMP's way, a share for each thread and a barrier behind every kernel, has all of them wait for one whose core has
gone to another process, kernel after kernel. Here the thread that calls goes on as long as there are parts: it waits
for those that others have begun, and once behind the last kernel. Where one of them had lost its core it then goes on
alone for a while.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import binding
from numba import carray, types  # type: ignore[attr-defined]

from kernels.cpu.atomics import compare_and_swap, fetch_add, load, pause, store
from kernels.cpu.compiled import compiled, compiled_for_c
from kernels.cpu.native import call, pointer

PATIENCE = 1_000  # looks for what another thread does, before others get the core
LATE = 200_000  # nanoseconds that the caller may wait for a thread that has lost its core
# The caller goes on alone for as long as it has waited; if that is so soon after, for twice as many times as before.
AGAIN, MAX_TIMES, MAX_ALONE = 50_000_000, 32, 100_000_000  # the first and the last in nanoseconds
LONG, MAX_ROUNDS = 32, 8  # grains of a part where a thread has several; how many it has at most

LINE = 128  # bytes: of a cache, and the one that is fetched with it
OPENED, CLAIMED, DONE, CALLER, LOST, THREADS = (LINE * index for index in range(6))  # of a team's state
FUNCTION, ARGUMENTS, FIRST, PARTS = (OPENED + 8 * index for index in range(1, 5))
WAITED, ENDED = CALLER, CALLER + 8
SECONDS, NANOSECONDS, USAGE = 0, 8, 16  # of a thread's two lines; the last is a struct rusage, of which:
VOLUNTARY, INVOLUNTARY = USAGE + 16 * 8, USAGE + 17 * 8
NO_MORE = -1  # of OPENED
ALONE_UNTIL, TIMES = 0, 8  # of what all teams share

Calls = np.dtype([(name, np.int64) for name in ("state", "busy", "share", "calls", "count", "threads")])

SYSTEM = ("omp_get_thread_num", "GOMP_parallel", "sched_yield", "clock_gettime", "getrusage", "usleep")
thread_num: Any = types.ExternalFunction(SYSTEM[0], types.int32())
parallel: Any = types.ExternalFunction(SYSTEM[1], types.void(types.voidptr, types.voidptr, types.uint32, types.uint32))
sched_yield: Any = types.ExternalFunction(SYSTEM[2], types.int32())
clock_gettime: Any = types.ExternalFunction(SYSTEM[3], types.int32(types.int32, types.voidptr))
getrusage: Any = types.ExternalFunction(SYSTEM[4], types.int32(types.int32, types.voidptr))
usleep: Any = types.ExternalFunction(SYSTEM[5], types.int32(types.uint32))
MONOTONIC, OF_THREAD = np.int32(getattr(time, "CLOCK_MONOTONIC", 1)), np.int32(1)


@cache
def has_openmp() -> bool:
    """Whether torch computes with an OpenMP library that runs a function as GNU's does; it is linked."""
    # What is loaded, in the order in which torch finds it: a preloaded library comes first.
    library = None if sys.platform == "win32" else ctypes.CDLL(None)
    for name in SYSTEM:
        binding.add_symbol(name, ctypes.cast(getattr(library, name, _nothing), ctypes.c_void_p).value)
    return all(hasattr(library, name) for name in SYSTEM)


_nothing = ctypes.CFUNCTYPE(None)(lambda: None)  # stands for what one thread alone does not call


def parts_of(work: int, grain: int, most: int) -> int:
    """Of so much work: one for each thread, none smaller than a grain; of much work more of them, to end level."""
    threads = min(torch.get_num_threads(), work // grain)
    rounds = min(work // max(threads * grain * LONG, 1), MAX_ROUNDS)
    return max(min(threads * max(rounds, 1), most), 1)


@compiled
def now(own: Any) -> Any:
    """Nanoseconds. own: the lines of the thread that asks."""
    clock_gettime(MONOTONIC, pointer(own + SECONDS))
    return load(own + SECONDS) * 1_000_000_000 + load(own + NANOSECONDS)


@compiled
def times_switched(own: Any) -> Any:
    """How often another has got this thread's core."""
    getrusage(OF_THREAD, pointer(own + USAGE))
    return load(own + VOLUNTARY) + load(own + INVOLUNTARY)


@compiled
def do_part(state: Any, claimed: Any, thread: Any) -> None:
    """One that this thread has taken: its kernel stays the one under way until it is done."""
    part = claimed - load(state + FIRST)
    call(load(state + FUNCTION), load(state + ARGUMENTS), (part, load(state + PARTS), thread))


@compiled
def take_parts(state: Any, opened: Any) -> None:
    """The caller's, as long as any are left."""
    claimed = load(state + CLAIMED)
    while claimed < opened:
        if compare_and_swap(state + CLAIMED, claimed, claimed + 1):
            do_part(state, claimed, 0)
            fetch_add(state + DONE, 1)
        claimed = load(state + CLAIMED)


@compiled
def wait_for_others(state: Any, opened: Any) -> None:
    """Until every part is done."""
    looks, own = 0, state + THREADS
    while load(state + DONE) < opened and looks < PATIENCE:
        looks += 1
        pause()
    if load(state + DONE) < opened:
        since = now(own)
        while load(state + DONE) < opened:
            sched_yield()
        waited = now(own) - since
        if waited > LATE and load(state + LOST) != 0:  # not only for a part that is long
            store(state + WAITED, load(state + WAITED) + waited)
        store(state + LOST, 0)


@compiled
def help_caller(state: Any, thread: Any) -> None:
    """What the other threads do, until no kernel follows."""
    own = state + THREADS + 2 * LINE * thread
    opened, looks, switched = np.int64(0), 0, times_switched(own)
    while opened != NO_MORE:
        current, claimed = load(state + OPENED), load(state + CLAIMED)
        # Parts below a number that was opened are of the kernel under way, or taken: then the swap fails.
        if current != opened and claimed < current:
            if compare_and_swap(state + CLAIMED, claimed, claimed + 1):
                began = now(own)
                do_part(state, claimed, thread)
                if now(own) - began > LATE:
                    before, switched = switched, times_switched(own)
                    if switched != before:
                        store(state + LOST, 1)
                fetch_add(state + DONE, 1)
            looks = 0
        elif current != opened:
            opened = current
        elif looks < PATIENCE:
            looks += 1
            pause()
        else:
            sched_yield()


def share_calls(arguments: Any) -> None:
    """What every thread does: the first opens kernel after kernel, and all take parts."""
    a = carray(arguments, 1, Calls)[0]
    state, thread, opened = a.state, np.int64(thread_num()), np.int64(0)
    if thread != 0:
        help_caller(state, thread)
    else:
        calls = carray(pointer(a.calls), (a.count, 3), np.int64)
        for index in range(a.count):
            function, values, parts = calls[index, 0], calls[index, 1], calls[index, 2]
            if parts == 1:
                call(function, values, (0, 1, 0))
                continue
            store(state + FUNCTION, function)
            store(state + ARGUMENTS, values)
            store(state + FIRST, opened)
            store(state + PARTS, parts)
            opened += parts
            store(state + OPENED, opened)
            take_parts(state, opened)
            wait_for_others(state, opened)
        store(state + OPENED, NO_MORE)
        store(state + ENDED, now(state + THREADS))


def make_calls(arguments: Any) -> None:
    """Kernels one after another."""
    a = carray(arguments, 1, Calls)[0]
    state, busy = a.state, a.busy
    alone_until = load(busy + ALONE_UNTIL)
    if a.threads == 1 or (alone_until != 0 and now(state + THREADS) < alone_until):
        calls = carray(pointer(a.calls), (a.count, 3), np.int64)
        for index in range(a.count):
            for part in range(calls[index, 2]):
                call(calls[index, 0], calls[index, 1], (part, calls[index, 2], 0))
        return
    for place in (OPENED, CLAIMED, DONE, WAITED, LOST):
        store(state + place, 0)
    parallel(pointer(a.share), arguments, np.uint32(a.threads), np.uint32(0))
    ended, after = load(state + ENDED), now(state + THREADS)
    waited = load(state + WAITED) + (after - ended if after - ended > LATE else 0)
    if waited > 0:
        is_again = after - waited < alone_until + AGAIN
        times = min(2 * load(busy + TIMES), MAX_TIMES) if is_again else np.int64(1)
        store(busy + TIMES, times)
        store(busy + ALONE_UNTIL, after + min(waited * times, MAX_ALONE))


@cache
def _compiled(function: Any) -> Any:
    return compiled_for_c(function, (types.voidptr,))


_busy = torch.zeros(2, dtype=torch.int64, device="cpu")  # whatever is the default where this file is imported


class Team:
    """Kernels one after another, each shared by torch's threads."""

    def __init__(self, calls: Sequence[tuple[int, Any, int]], threads: int) -> None:
        """
        Args:
            calls: of each the function's address, its arguments, and the number of its parts.
            threads: at most, that its kernels have room for.
        """
        threads = threads if has_openmp() and any(parts > 1 for *_, parts in calls) else 1
        self._state = torch.zeros(THREADS + 2 * LINE * threads, dtype=torch.uint8)
        self._keeps = [arguments for _, arguments, _ in calls]
        flat = [value for own, arguments, parts in calls for value in (own, ctypes.addressof(arguments), parts)]
        self._calls = (ctypes.c_int64 * len(flat))(*flat)
        self._run = _compiled(make_calls).ctypes
        self._arguments = (ctypes.c_int64 * len(Calls.names or ()))(
            *(self._state.data_ptr(), _busy.data_ptr(), _compiled(share_calls).address),
            *(ctypes.addressof(self._calls), len(calls), threads),
        )
        self._address = ctypes.addressof(self._arguments)

    def __call__(self) -> None:
        self._run(self._address)
