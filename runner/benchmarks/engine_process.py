"""An engine in a process of its own, which answers one batch at a time and is idle in between.

Engines that are compared cannot share a process: vLLM binds its threads and memory, and replaces
`torch.set_num_threads`. What the process prints goes to a file. An error while the engine is built is a refusal, which
a comparison may show; any later one ends the comparison.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from runner.benchmarks.offline_engine import Answer, Batch, OfflineEngine
from runner.engine.errors import UserError

END_SECONDS = 30  # for a process to end in peace


@dataclass(frozen=True, kw_only=True)
class Start:
    """What the process says of a ready engine."""

    seconds: float  # from construction to ready, with what the engine imports then
    num_threads: int
    device: str


class EngineRefusedError(Exception):
    """The engine could not be built; the message is its own error, on one line."""


class EngineProcess:
    def __init__(
        self,
        build: Callable[..., OfflineEngine],
        arguments: Mapping[str, Any],
        *,
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        """Returns when the engine is ready.

        Args:
            build: a function of a module, called in the new process with the arguments.
            environment: variables that the process starts with, beside those of this one.
            log: where its output goes.

        Raises:
            EngineRefusedError: it cannot be built so.
        """
        context = get_context("spawn")
        self._log = log
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, build, dict(arguments), log))
        with _environment(environment):
            self._process.start()
        theirs.close()
        try:
            self.start: Start = self._receive()
        except (EOFError, OSError):
            self.close()
            raise EngineRefusedError(self._end()) from None
        except BaseException:
            self.close()
            raise

    def complete(self, batch: Batch) -> Answer:
        """
        Raises:
            UserError: the process has ended; why, as far as its output says.
        """
        try:
            self._connection.send(batch)
            answer: Answer = self._receive()
        except (EOFError, OSError):
            self._process.join(END_SECONDS)
            raise UserError(f"an engine must go on to the end of the comparison, got {self._end()}") from None
        return answer

    def close(self) -> None:
        self._connection.close()
        self._process.join(END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _end(self) -> str:
        """How the process ended, on one line."""
        said = self._log.read_text(errors="replace").split() if self._log.exists() else []
        return f"its process ended with status {self._process.exitcode}, having said: {' '.join(said)[-600:]}"

    def _receive(self) -> Any:
        found = self._connection.recv()
        if isinstance(found, EngineRefusedError):
            raise found
        return found


def _serve(connection: Connection, build: Callable[..., OfflineEngine], arguments: dict[str, Any], log: Path) -> None:
    with log.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    started = time.perf_counter()
    try:
        engine = build(**arguments)
    except (Exception, SystemExit) as error:  # whatever keeps an engine from starting is the answer
        connection.send(EngineRefusedError(" ".join(f"{type(error).__name__}: {error}".split())))
        raise
    seconds = time.perf_counter() - started
    connection.send(Start(seconds=seconds, num_threads=torch.get_num_threads(), device=engine.device))
    while True:
        try:
            batch = connection.recv()
        except (EOFError, KeyboardInterrupt):  # closed from the other side, or interrupted with it
            return
        connection.send(engine.complete(batch))


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
