"""Calls of kernels that are written down instead of made, to be made later, many of them in one call from Python.

What a kernel takes microseconds to compute, Python takes as long to call. Recorded kernels that follow one another run
in one team of threads (kernels/cpu/threads.py); they read and write where the recorded computation would have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from kernels.cpu import under_way
from kernels.cpu.threads import Team

ALIGNMENT = 64  # bytes: a vector of AVX-512, and a line of every cache


class Block:
    """Memory that recorded computations share, one after another."""

    def __init__(self, size: int) -> None:
        with _disable_current_modes():  # which may forbid what is not a kernel's
            self.tensor = torch.empty(size, dtype=torch.uint8)
            self._unseen = torch.from_numpy(self.tensor.numpy())  # the same memory, of which nobody keeps count
        assert self.tensor.data_ptr() % ALIGNMENT == 0
        self._storage = self.tensor.untyped_storage()
        self.key = self._storage._cdata
        self._typed = dict[torch.dtype, Tensor]()
        self._uses = self._count()  # by itself alone

    @property
    def is_free(self) -> bool:
        return self._count() == self._uses

    def typed(self, dtype: torch.dtype) -> Tensor:
        """All of it, as a vector."""
        if dtype not in self._typed:
            self._typed[dtype] = self.tensor.view(dtype)
            self._uses += 1
        return self._typed[dtype]

    def unseen(self, tensor: Tensor) -> Tensor:
        """A tensor of this memory, as another that does not keep the memory from being free."""
        typed = self._unseen.view(tensor.dtype)
        return typed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _count(self) -> int:
        count: int = torch._C._storage_Use_Count(self._storage._cdata)
        return count


class Pool:
    """The blocks of computations that are never under way together; a block lives as long as a program that uses it."""

    def __init__(self) -> None:
        self._blocks = defaultdict[int, WeakSet[Block]](WeakSet)  # by their size

    def of_size(self, size: int) -> list[Block]:
        return list(self._blocks[size])  # of a generator that is left half-way Python loses a Ctrl-C

    def grow(self, size: int) -> Block:
        block = Block(size)
        self._blocks[size].add(block)
        return block


def _rounded(size: int) -> int:
    """Bytes of the block that holds so many: beyond the smallest at most a quarter more."""
    size = max(size, 8 * ALIGNMENT)
    step = 1 << (size - 1).bit_length() - 3
    return -(-size // step) * step


class Recording:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._blocks = dict[int, Block]()  # by their storage
        self._at_hand = dict[int, list[Block]]()  # the pool's, by their size
        self._calls: list[tuple[int, Any, int]] = []  # as Team has them; since the last of:
        self._parts: list[Callable[[], None]] = []
        self._threads = torch.get_num_threads()  # for which kernels make room
        self._kept = dict[int, Any]()  # storages that are not the pool's

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        block = self._free_block(_rounded(prod(shape) * dtype.itemsize))
        self._blocks[block.key] = block
        strides = [prod(shape[place + 1 :]) for place in range(len(shape))]
        unseen_by_modes = torch._C._DisableTorchDispatch()  # while it lives; half of all that one would be asked about
        try:
            return block.typed(dtype).as_strided(shape, strides)
        finally:
            del unseen_by_modes

    def _free_block(self, size: int) -> Block:
        """To which nothing refers that is still to be read."""
        if size not in self._at_hand:
            self._at_hand[size] = self._pool.of_size(size)
        for block in self._at_hand[size]:
            if block.is_free:
                return block
        self._at_hand[size].append(self._pool.grow(size))
        return self._at_hand[size][-1]

    def unseen(self, tensor: Tensor) -> Tensor:
        """The tensor for a part to keep: where its memory is the pool's, that may be used again behind the part."""
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        return tensor if block is None else block.unseen(tensor)

    def keep(self, tensor: Tensor) -> None:
        """Have the program hold what is not the pool's, for those who write down kernels of somebody else's tensors."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._blocks:
            self._kept[storage._cdata] = storage

    def add_kernel(self, address: int, arguments: Any, parts: int) -> None:
        self._calls.append((address, arguments, parts))

    def add_part(self, part: Callable[[], None]) -> None:
        """What is no kernel, to be called between those before and those behind."""
        self._end_team()
        self._parts.append(part)

    def program(self) -> Program:
        self._end_team()
        return Program(self._parts, [*self._blocks.values(), *self._kept.values()])

    def _end_team(self) -> None:
        if self._calls:
            self._parts.append(Team(self._calls, self._threads))
        self._calls = []


class Program:
    """What a recording has written down. Whatever it reads must be where it was; it keeps what the recording says."""

    def __init__(self, parts: Sequence[Callable[[], None]], keeps: Sequence[Any]) -> None:
        self._parts, self._keeps = parts, keeps

    def __call__(self) -> None:
        """In the mode that it was recorded in: torch keeps what inference mode has made from being written outside."""
        for part in self._parts:
            part()


@contextmanager
def recording(pool: Pool) -> Iterator[Recording]:
    """Until the end of it this thread's kernels are written down, and not run."""
    own = Recording(pool)
    under_way.begin(own)
    try:
        yield own
    finally:
        under_way.end()


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Room for a kernel's results."""
    own = under_way.current()
    return torch.empty(shape, dtype=dtype) if own is None else own.empty(shape, dtype)
