"""Processes with an emulated GPU each (tests/emulated_cuda.py), which hold one model together."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from kernels.cpu.exchange import SharedMemory
from runner.engine import start_check
from runner.engine.shard import Shard
from runner.ranks.ranks import SeveralRanks
from tests.conftest import Engines, complete
from tests.emulated_device import EmulatedDevice, plainly
from tests.interpreted_calls import interpret_quickly

Value = TypeVar("Value")


class EmulatedExchange:
    """Queued on the device's stream, so that a capture records it and every replay makes it anew."""

    device = torch.device("cuda")

    def __init__(self, gpu: EmulatedDevice, memory: SharedMemory, size: int) -> None:
        self._gpu, self._memory, self._size = gpu, memory, size
        self.num_captured = 0

    def gather(self, own: Tensor) -> Tensor:
        assert self._gpu.holds(own)
        own = own.contiguous()
        gathered = torch.empty(self._size, *own.shape, dtype=own.dtype, device="cuda")
        if self._gpu.recording is not None:
            self._gpu.recording.add(self._exchange, (own, gathered), {})
            self.num_captured += 1
        else:
            with plainly():
                self._exchange(own, gathered)
        return gathered

    def _exchange(self, own: Tensor, gathered: Tensor) -> None:
        gathered.copy_(self._memory.gather(own))

    @property
    def has_parted(self) -> bool:
        return self._memory.has_parted

    def give_up(self) -> None:
        self._memory.give_up()


class ProcessRanks(SeveralRanks):
    """One rank of a process; each makes all calls itself."""

    def __init__(self, shard: Shard, connection: Connection) -> None:
        self.shard, self._connection = shard, connection

    def pass_on(self, value: Value) -> Value:
        if self.shard.rank:
            said: Value = self._connection.recv()
            return said
        self._connection.send(value)
        return value


def complete_in_rank(
    rank: int,
    memory: Tensor,
    connection: Connection,
    results: Any,
    methods: list[dict[str, Any] | None],
    prompts: Any,
    params: Any,
    engine_args: dict[str, Any],
) -> None:
    """Puts (rank, texts by method, exchanges in captured graphs, replays) into results."""
    from tests.emulated_cuda import emulated_cuda

    torch.set_num_threads(1)
    with emulated_cuda() as gpu, pytest.MonkeyPatch.context() as patch:
        interpret_quickly(patch)
        exchange = EmulatedExchange(gpu, SharedMemory(memory, rank=rank, num_ranks=2), 2)
        ranks = ProcessRanks(Shard(rank=rank, size=2, exchange=exchange), connection)
        patch.setattr("runner.llm.start_ranks", lambda config: ranks)
        patch.setattr(start_check, "_kernels_keep_bits", lambda *_: True)  # a machine of one GPU is asked elsewhere
        engines, texts = Engines(), list[list[list[int]]]()
        for method in methods:
            llm = engines(method, **engine_args, tensor_parallel_size=2)
            texts.append([request.output_token_ids for request in complete(llm, prompts, params)[0]])
        results.put((rank, texts, exchange.num_captured, gpu.num_replays))
