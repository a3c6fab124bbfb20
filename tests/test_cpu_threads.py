"""How a CPU's threads share kernels: every part once, kernel after kernel, and alone where others are kept away."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llvmlite import binding
from numba import carray, types  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu import threads
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import integers
from kernels.cpu.recording import Pool, Program, recording
from kernels.cpu.threads import parts_of

NUM_PARTS = 24
SLEEP = 50_000  # microseconds of a part: far more than what is late
TRIES = 100  # until another thread than the caller takes a part: on a busy machine it may come too late

binding.add_symbol("usleep", ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value)
usleep: Any = types.ExternalFunction("usleep", types.int32(types.uint32))
Counting, Telling = arguments_of("counts"), arguments_of("counts", "told")


def count_part(arguments: Any, part: int, num_parts: int, thread: int) -> None:
    a = carray(arguments, 1, Counting)[0]
    integers(a.counts, num_parts)[part] += 1


def tell_sum(arguments: Any, part: int, num_parts: int, thread: int) -> None:
    """Of what the kernel before has counted."""
    a = carray(arguments, 1, Telling)[0]
    total = 0
    for count in integers(a.counts, num_parts):
        total += count
    integers(a.told, num_parts)[part] = total


def sleep_elsewhere(arguments: Any, part: int, num_parts: int, thread: int) -> None:
    """As a thread that has lost its core; the caller gives others the time to come."""
    a = carray(arguments, 1, Counting)[0]
    integers(a.counts, num_parts)[part] = thread
    usleep(SLEEP if thread else 500)


COUNT, TELL, LATE = Kernel(count_part, Counting), Kernel(tell_sum, Telling), Kernel(sleep_elsewhere, Counting)


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """What teams know of the machine: until when one goes on alone, and how many times longer than it has waited."""
    own = torch.tensor([0, 1])
    monkeypatch.setattr(threads, "_busy", own)
    return own


def counting(counts: Tensor, told: Tensor) -> Program:
    with recording(Pool()) as recorded:
        COUNT(counts.data_ptr(), parts=NUM_PARTS)
        TELL(counts.data_ptr(), told.data_ptr(), parts=NUM_PARTS)
    return recorded.program()


def wait_once(program: Program, busy: Tensor) -> int:
    """Nanoseconds that a team goes on alone after others kept it waiting."""
    before = int(busy[0])
    for _ in range(TRIES):
        program()
        if busy[0] != before:
            return int(busy[0]) - time.monotonic_ns()
    raise AssertionError("no other thread has taken a part")


def test_every_part_is_done_once_and_before_the_next_kernel() -> None:
    counts, told = torch.zeros(2, NUM_PARTS, dtype=torch.int64)
    program = counting(counts, told)
    for call in range(1, 201):
        program()
        assert counts.tolist() == [call] * NUM_PARTS
        assert told.tolist() == [call * NUM_PARTS] * NUM_PARTS


def test_a_kernel_on_its_own_is_shared_too() -> None:
    counts = torch.zeros(NUM_PARTS, dtype=torch.int64)
    for call in range(1, 51):
        COUNT(counts.data_ptr(), parts=NUM_PARTS)
        assert counts.tolist() == [call] * NUM_PARTS


def test_teams_of_two_callers_do_not_mix() -> None:
    def call(failures: list[int]) -> None:
        counts, told = torch.zeros(2, NUM_PARTS, dtype=torch.int64)
        program = counting(counts, told)
        for calls in range(1, 101):
            program()
            if told.tolist() != [calls * NUM_PARTS] * NUM_PARTS:
                failures.append(calls)

    failures: list[int] = []
    callers = [threading.Thread(target=call, args=(failures,)) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failures


def test_who_was_kept_waiting_goes_on_alone_for_as_long(busy: Tensor) -> None:
    took = torch.zeros(NUM_PARTS, dtype=torch.int64)
    with recording(Pool()) as recorded:
        LATE(took.data_ptr(), parts=NUM_PARTS)
    program = recorded.program()
    alone = [0]
    while alone[-1] <= SLEEP // 2 * 1000:  # on a busy machine one may be late that has taken nothing
        assert len(alone) < TRIES
        busy[0] = 0
        alone.append(wait_once(program, busy))
    assert took.any(), "another thread has taken a part"
    counts, told = torch.zeros(2, NUM_PARTS, dtype=torch.int64)
    busy[0] = time.monotonic_ns() + 10**10
    program()
    assert not took.any(), "and is not waited for again"
    counting(counts, told)()
    assert told.tolist() == [NUM_PARTS] * NUM_PARTS


def test_who_is_kept_waiting_soon_again_goes_on_alone_for_longer(busy: Tensor) -> None:
    took = torch.zeros(NUM_PARTS, dtype=torch.int64)
    with recording(Pool()) as recorded:
        LATE(took.data_ptr(), parts=NUM_PARTS)
    program, times = recorded.program(), [1]
    while times[-2:] != [threads.MAX_TIMES] * 2:
        assert len(times) < TRIES
        busy[0] = time.monotonic_ns()
        assert wait_once(program, busy) <= threads.MAX_ALONE
        times.append(int(busy[1]))
        # On a busy machine the caller itself may have been away, so long that the last time is forgotten.
        assert times[-1] in (1, min(2 * times[-2], threads.MAX_TIMES))
    busy[0] = 1  # long ago
    wait_once(program, busy)
    assert busy[1] == 1


@given(st.integers(0, 10**9), st.integers(1, 10**6), st.integers(1, 100), st.integers(1, 64))
def test_parts_are_no_smaller_than_a_grain_and_as_many_for_each_thread(
    work: int, grain: int, most: int, num_threads: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: num_threads)
        parts = parts_of(work, grain, most)
    assert 1 <= parts <= most
    assert parts == 1 or work // parts >= grain
    assert parts == most or parts % min(num_threads, max(work // grain, 1)) == 0
