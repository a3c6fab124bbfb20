"""The first rank: it starts the others, tells them which calls are made, and notices when one of them fails."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TypeVar

import torch

from runner.config import HardwareConfig
from runner.engine.errors import UserError
from runner.engine.shard import Exchange, Shard
from runner.ranks.follower import shared_memory
from runner.ranks.others import Others
from runner.ranks.ranks import Call, SeveralRanks

Value = TypeVar("Value")
MEMORY_FOLDER = "/dev/shm"  # of files that are memory, where there is one
GONE = "the engine's other processes have ended: it was closed, or a call was interrupted or failed; build a new LLM"


class Leader(SeveralRanks):
    def __init__(self, hardware: HardwareConfig, device: torch.device) -> None:
        """Start the other ranks.

        Raises:
            UserError: there are too few GPUs or too little memory, or one of them ended before all had met.
        """
        self._others = Others(hardware.tensor_parallel_size)
        self._end = weakref.finalize(self, self._others.end)  # also at the end of this process
        try:
            exchange = self._join_on_gpus() if device.type == "cuda" else self._join_on_cpu(hardware.num_threads)
        except BaseException:
            self.close()
            raise
        self.shard = Shard(rank=0, size=self._others.size, exchange=exchange)

    def _join_on_gpus(self) -> Exchange:
        from runner.engine.nccl import NcclExchange, unique_id

        size = self._others.size
        if (count := torch.cuda.device_count()) < size:
            rule = f"hardware.tensor_parallel_size must be <= {count}, the GPUs that torch can use"
            raise UserError(f"{rule}, got {size}; lower it, or make more GPUs visible")
        torch.cuda.set_device(0)
        meeting = unique_id()
        self._others.start(unique_id=meeting, num_threads=torch.get_num_threads())

        def join() -> Exchange:
            torch.cuda.set_device(0)  # in this thread
            return NcclExchange(meeting, rank=0, size=size)

        return self._others.join(join)

    def _join_on_cpu(self, num_threads: int | None) -> Exchange:
        from kernels.cpu.exchange import num_bytes

        size = self._others.size
        threads = num_threads or max(1, self._others.threads_of_process() // size)
        folder = MEMORY_FOLDER if Path(MEMORY_FOLDER).is_dir() else None
        with tempfile.TemporaryFile(dir=folder) as file:  # it has no name; whoever has mapped it keeps it
            _reserve(file.fileno(), num_bytes(size), folder or tempfile.gettempdir())
            path = f"/dev/fd/{file.fileno()}"
            self._others.start(pass_fds=[file.fileno()], memory=path, num_threads=threads)
            exchange = self._others.join(lambda: shared_memory(path, rank=0, size=size))
        self._others.share_threads(threads)
        return exchange

    @property
    def is_open(self) -> bool:
        return self._end.alive

    @contextmanager
    def together(self, call: Call) -> Iterator[None]:
        if not self.is_open:
            raise UserError(GONE)
        message = ForkingPickler.dumps(call)
        with self._or_end():
            self._others.tell(message)
            yield

    def pass_on(self, value: Value) -> Value:
        self._others.check()
        self._others.tell(ForkingPickler.dumps(value))
        return value

    def close(self) -> None:
        self._end()

    @contextmanager
    def _or_end(self) -> Iterator[None]:
        """Ranks that have not done the same to the end are of no use any more."""
        try:
            yield
            self._others.check()
        except BaseException as error:
            reason = self._others.failure  # before they are ended
            self.close()
            if reason and not isinstance(error, KeyboardInterrupt):
                raise UserError(reason) from error  # whatever came of it here
            raise


def _reserve(file: int, size: int, folder: str) -> None:
    """Memory that is not there would end a process when it is first written to."""
    reserve: Callable[[int, int, int], None] = getattr(os, "posix_fallocate", lambda of, _, end: os.truncate(of, end))
    try:
        reserve(file, 0, size)
    except OSError as error:
        raise UserError(
            f"hardware.tensor_parallel_size needs {size / 2**20:.0f} MiB in {folder} ({error.strerror}); "
            "make room there (docker run --shm-size)"
        ) from error
