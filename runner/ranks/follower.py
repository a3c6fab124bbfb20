"""A rank that another process has started: it hears which calls are made, and ends when that process does."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeVar, cast

import torch

from runner.engine.shard import Exchange, Shard
from runner.ranks.ranks import Call, SeveralRanks

Value = TypeVar("Value")
LOOKS_EVERY = 1.0  # s, whether the first rank is still there


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """What a rank is told first."""

    rank: int
    size: int
    num_threads: int  # of torch
    memory: str | None = None  # the file that all ranks map, on a CPU
    unique_id: bytes | None = None  # of NCCL's group, on GPUs


class Follower(SeveralRanks):
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        welcome = connection.recv()
        assert isinstance(welcome, Welcome)
        torch.set_num_threads(welcome.num_threads)
        exchange: Exchange
        if welcome.unique_id is not None:
            from runner.engine.nccl import NcclExchange

            torch.cuda.set_device(welcome.rank)
            exchange = NcclExchange(welcome.unique_id, rank=welcome.rank, size=welcome.size)
        else:
            assert welcome.memory is not None
            exchange = shared_memory(welcome.memory, rank=welcome.rank, size=welcome.size)
        self.shard = Shard(rank=welcome.rank, size=welcome.size, exchange=exchange)

    def calls(self) -> Iterator[Call]:
        """As they are made, as long as the first rank makes any."""
        while True:
            try:
                call = self._connection.recv()
            except (EOFError, OSError):
                return
            yield call

    def pass_on(self, value: Value) -> Value:
        try:
            return cast(Value, self._connection.recv())
        except (EOFError, OSError):
            raise SystemExit from None


def fail(connection: Connection, reason: str) -> None:
    """Tell the first rank why this one ends, if it is still there."""
    with suppress(OSError):
        connection.send(reason)


def shared_memory(path: str, *, rank: int, size: int) -> Exchange:
    from kernels.cpu.exchange import SharedMemory, num_bytes

    memory = torch.from_file(path, shared=True, size=num_bytes(size), dtype=torch.uint8)
    return SharedMemory(memory, rank=rank, num_ranks=size)


def _end_with(parent: int) -> None:
    """The process, also from the middle of a computation that waits for ranks that are gone."""
    while os.getppid() == parent:
        time.sleep(LOOKS_EVERY)
    os._exit(1)
