"""What ranks tell each other by shared memory."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from kernels.cpu.recording import Pool, recording
from runner.engine.shard import Exchange
from runner.ranks.ranks import Ranks
from tests.rank_threads import in_ranks


def exchange_of(ranks: Ranks) -> Exchange:
    assert ranks.shard.exchange is not None
    return ranks.shard.exchange


def numbers(rank: int, turn: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + turn)
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_gets_what_each_of_them_has(num_ranks: int, dtype: torch.dtype) -> None:
    """Many exchanges one behind another, of sizes that need one piece, several, or none."""
    shapes = [(1,), (3, 5), (7, 40), (0, 4), (16,), (33,)] * 20

    def exchange(ranks: Ranks) -> list[Tensor]:
        gather = exchange_of(ranks).gather
        return [gather(numbers(ranks.shard.rank, turn, *shape, dtype=dtype)) for turn, shape in enumerate(shapes)]

    wanted = [
        torch.stack([numbers(rank, turn, *shape, dtype=dtype) for rank in range(num_ranks)])
        for turn, shape in enumerate(shapes)
    ]
    for found in in_ranks(num_ranks, exchange):
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_exchanges_are_recorded_and_replayed() -> None:
    """Which of a rank's two places is next is read when it is replayed: the exchange comes an odd number of times."""

    def exchange(ranks: Ranks) -> list[Tensor]:
        own, found = torch.empty(5), []
        with recording(Pool()) as recorded:
            gathered = exchange_of(ranks).gather(own)
        replay = recorded.program()
        for turn in range(7):
            own.copy_(numbers(ranks.shard.rank, turn, 5))
            replay()
            found.append(gathered.clone())
        return found

    wanted = [torch.stack([numbers(rank, turn, 5) for rank in range(2)]) for turn in range(7)]
    for found in in_ranks(2, exchange):
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_ranks_that_exchange_unlike_sizes_notice_and_wait_no_more() -> None:
    """What they gathered meant nothing, in all of them alike, so that they went on with it."""

    def exchange(ranks: Ranks) -> bool:
        own = exchange_of(ranks)
        own.gather(torch.zeros(7))
        own.gather(torch.zeros(6 if ranks.shard.rank else 7))
        own.gather(torch.zeros(200))  # in several pieces
        return own.has_parted

    assert in_ranks(3, exchange) == [True] * 3


def test_a_rank_that_waits_long_leaves_its_core_to_others() -> None:
    """The first one took a whole core for the seconds in which the others start."""

    def exchange(ranks: Ranks) -> float:
        gather = exchange_of(ranks).gather
        gather(torch.zeros(3))  # compiled by now
        if ranks.shard.rank:
            time.sleep(2.0)
        used = time.thread_time()
        gather(torch.zeros(3))
        return time.thread_time() - used

    assert in_ranks(2, exchange)[0] < 1.0  # 0.1, or 0.6 where other processes want the cores too


def test_nobody_waits_for_a_rank_that_is_gone() -> None:
    begun = threading.Event()

    def exchange(ranks: Ranks) -> bool:
        if ranks.shard.rank == 0:
            begun.set()
            exchange_of(ranks).gather(torch.zeros(3))  # rank 1 never comes
        else:
            begun.wait()
            exchange_of(ranks).give_up()
        return True

    assert in_ranks(2, exchange) == [True, True]
