"""Threads that stand for the processes of a tensor-parallel group: shared memory is theirs anyway."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any, TypeVar

import torch

from kernels.cpu.exchange import SharedMemory, num_bytes
from runner.engine.shard import Shard
from runner.ranks.ranks import SeveralRanks

PLACE_BYTES = 64  # so that most exchanges need several pieces
SECONDS = 60.0  # that a rank waits for the first one's word
Found = TypeVar("Found")


class ThreadRanks(SeveralRanks):
    """One rank of those of a process; each makes all calls itself."""

    def __init__(self, shard: Shard, words: list[Queue[Any]]) -> None:
        self.shard, self._words = shard, words

    def pass_on(self, value: Found) -> Found:
        if self.shard.rank:
            said: Found = self._words[self.shard.rank].get(timeout=SECONDS)
            return said
        for words in self._words[1:]:
            words.put(value)
        return value


def in_ranks(size: int, work: Callable[[ThreadRanks], Found], *, place_bytes: int = PLACE_BYTES) -> list[Found]:
    """What work returns in each rank. They end together where one of them fails."""
    memory = torch.zeros(num_bytes(size, place_bytes), dtype=torch.uint8)
    words = [Queue[Any]() for _ in range(size)]

    def run(rank: int) -> Found:
        exchange = SharedMemory(memory, rank=rank, num_ranks=size, place_bytes=place_bytes)
        try:
            return work(ThreadRanks(Shard(rank=rank, size=size, exchange=exchange), words))
        except BaseException:
            exchange.give_up()
            raise

    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(run, range(size)))
