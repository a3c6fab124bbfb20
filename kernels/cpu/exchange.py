"""What the processes that hold a model together tell each other on one machine: by memory that all of them have mapped.

Each rank has two places there, used in turn. One that writes to a place has met all others since it wrote there last,
and so they have read what it was: one meeting an exchange is enough. All of it are kernels like others, so exchanges
are recorded (recording.py) and replayed in one call with what is computed before and behind them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.atomics import load, pause, store
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import pointer
from kernels.cpu.recording import empty
from kernels.cpu.threads import LINE, PATIENCE, has_openmp, parts_of, sched_yield, usleep

PLACE_BYTES = 1 << 20  # of a place; what is larger goes piece by piece
PART_BYTES = 1 << 15  # copied in some microseconds
# Looks for another rank, some 50 ms of them, before this one naps in between: that one starts, or loads its weights.
LONG_WAIT, NAP = 100_000, np.uint32(200)  # NAP in microseconds
# In the memory: not 0 once nobody waits any more, and why; of each rank, a line each: how often it came, and with how
# many bytes to the last two meetings.
GIVEN_UP, MEETINGS, BYTES = 0, LINE, LINE + 8
GONE, PARTED = 1, 2  # a rank is; ranks have come with unlike numbers of bytes
Copying = arguments_of("memory", "numbers", "rank", "num_ranks", "place_bytes", "count", "stride")  # in bytes
Meeting = arguments_of("memory", "rank", "num_ranks", "count")


def num_bytes(num_ranks: int, place_bytes: int = PLACE_BYTES) -> int:
    """Of the memory, which begins as zeros."""
    return MEETINGS + num_ranks * (LINE + 2 * place_bytes)


@cache
def copying_in() -> Kernel:
    def copy_in(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        """To the place of the meeting to come."""
        a = carray(arguments, 1, Copying)[0]
        turn = (load(a.memory + MEETINGS + LINE * a.rank) + 1) % 2
        places = a.memory + MEETINGS + LINE * a.num_ranks
        to = carray(pointer(places + (2 * a.rank + turn) * a.place_bytes), (a.count,), np.uint8)
        own = carray(pointer(a.numbers), (a.count,), np.uint8)
        first, end = a.count * part // num_parts, a.count * (part + 1) // num_parts
        to[first:end] = own[first:end]

    return Kernel(copy_in, Copying)


@cache
def meeting() -> Kernel:
    def meet(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        """What a rank wrote before it came, all others see once they have met it."""
        a = carray(arguments, 1, Meeting)[0]
        own = a.memory + MEETINGS + LINE * a.rank
        times = load(own) + 1
        count = a.memory + BYTES + 8 * (times % 2)
        store(count + LINE * a.rank, a.count)
        store(own, times)
        for rank in range(a.num_ranks):
            looks = 0
            while load(a.memory + MEETINGS + LINE * rank) < times and load(a.memory + GIVEN_UP) == 0:
                looks += 1
                if looks < PATIENCE:
                    pause()
                elif looks < LONG_WAIT:
                    sched_yield()
                else:
                    usleep(NAP)
            if load(a.memory + GIVEN_UP) == 0 and load(count + LINE * rank) != a.count:
                store(a.memory + GIVEN_UP, PARTED)

    return Kernel(meet, Meeting)


@cache
def copying_out() -> Kernel:
    def copy_out(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        """From all places of the meeting that was, rank by rank `stride` bytes apart."""
        a = carray(arguments, 1, Copying)[0]
        turn = load(a.memory + MEETINGS + LINE * a.rank) % 2
        places = a.memory + MEETINGS + LINE * a.num_ranks
        first, end = a.count * part // num_parts, a.count * (part + 1) // num_parts
        for rank in range(a.num_ranks):
            place = carray(pointer(places + (2 * rank + turn) * a.place_bytes), (a.count,), np.uint8)
            to = carray(pointer(a.numbers + rank * a.stride), (a.count,), np.uint8)
            to[first:end] = place[first:end]

    return Kernel(copy_out, Copying)


class SharedMemory:
    """One rank's side of it. Every rank makes the same exchanges in the same order."""

    device = torch.device("cpu")

    def __init__(self, memory: Tensor, *, rank: int, num_ranks: int, place_bytes: int = PLACE_BYTES) -> None:
        """memory: num_bytes(...) uint8, the very same of all ranks."""
        assert memory.dtype == torch.uint8 and memory.numel() == num_bytes(num_ranks, place_bytes)
        self._memory, self._rank, self._num_ranks, self._place_bytes = memory, rank, num_ranks, place_bytes
        has_openmp()  # links what meetings call

    def gather(self, own: Tensor) -> Tensor:
        """[...] of every rank, of one shape and dtype -> [num_ranks, ...]."""
        own = own.contiguous()
        gathered = empty(self._num_ranks, *own.shape, dtype=own.dtype)
        shared, ranks = self._memory.data_ptr(), (self._rank, self._num_ranks)
        for first in range(0, own.nbytes, self._place_bytes):
            count = min(self._place_bytes, own.nbytes - first)
            shape, parts = (*ranks, self._place_bytes, count, own.nbytes), parts_of(count, PART_BYTES, count)
            copying_in()(shared, own.data_ptr() + first, *shape, parts=parts)
            meeting()(shared, *ranks, own.nbytes)
            copying_out()(shared, gathered.data_ptr() + first, *shape, parts=parts)
        return gathered

    @property
    def has_parted(self) -> bool:
        """Whether ranks came to one meeting with unlike numbers of bytes; nobody waits since."""
        return int(self._memory[GIVEN_UP]) == PARTED

    def give_up(self) -> None:
        """Have nobody wait any more, here or elsewhere: a rank is gone, and what is gathered means nothing."""
        with torch.inference_mode():  # where the memory may have been mapped, in another thread
            self._memory[GIVEN_UP] = GONE
