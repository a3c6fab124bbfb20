"""The processes of the ranks that the first one has started, and a thread that listens to them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from runner.engine.errors import UserError
from runner.engine.shard import Exchange
from runner.ranks.follower import Welcome

Value = TypeVar("Value")
# Not a module that is run: where modules are found may have changed since this process began, by pytest or a script.
PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from multiprocessing.connection import Connection; "
    "from runner.ranks.follow import follow; sys.exit(follow(Connection({connection})))"
)
ROOT = str(Path(__file__).parents[2])  # where this package was found, whatever the current directory is by now
SECONDS_TO_END = 5.0
LOOKS_EVERY = 0.1  # s


@dataclass(kw_only=True, eq=False)
class Other:
    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection

    def hear(self) -> str:
        """Waits for why it ends."""
        try:
            return str(self.connection.recv())
        except (EOFError, OSError):
            try:
                status = str(self.process.wait(SECONDS_TO_END))
            except subprocess.TimeoutExpired:
                status = "that is not known yet"
            return f"ended with status {status}, and did not say why (-9: killed, as where memory runs out)"


class Others:
    """Nothing here keeps the Leader alive, not even the thread."""

    _sharing: ClassVar[list[Others]] = []  # those in whose time torch has fewer threads here
    _threads: ClassVar[int] = 0  # of torch in this process, before

    def __init__(self, size: int) -> None:
        self.size, self.failure = size, ""  # which rank has failed, and why
        self.running: list[Other] = []
        self._process = os.getpid()
        self._exchange: Exchange | None = None
        self._has_failed = threading.Event()
        self._listening = threading.RLock()  # in the thread that holds it Python may collect what ends all this

    def start(self, *, pass_fds: Sequence[int] = (), **welcome: Any) -> None:
        """Their processes, which take a while to come."""
        path = [ROOT, *(os.path.abspath(entry) for entry in sys.path)]
        for rank in range(1, self.size):
            own, theirs = Pipe()
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM.format(path=path, connection=theirs.fileno())],
                pass_fds=[theirs.fileno(), *pass_fds],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is for this process to handle
            )
            theirs.close()
            self.running.append(Other(rank=rank, process=process, connection=own))
            own.send(Welcome(rank=rank, size=self.size, **welcome))
        threading.Thread(target=self._watch, daemon=True).start()

    def join(self, meet: Callable[[], Exchange]) -> Exchange:
        """The exchange with them. Raises UserError where one of them fails meanwhile: nothing else ends the waiting."""
        met, errors = list[Exchange](), list[BaseException]()

        def run() -> None:
            try:
                met.append(meet())
            except BaseException as error:
                errors.append(error)

        joining = threading.Thread(target=run, daemon=True)
        joining.start()
        while joining.is_alive():
            joining.join(LOOKS_EVERY)
            self.check()
        if errors:
            raise errors[0]
        self._exchange = met[0]
        self.check()  # whoever failed before the exchange was there has nobody stop waiting in it
        return self._exchange

    def tell(self, message: Any) -> None:
        """message: pickled."""
        for other in self.running:
            try:
                other.connection.send_bytes(message)
            except OSError:  # it has ended, as is noticed elsewhere
                self._has_failed.wait(SECONDS_TO_END)
                self.check()
                raise

    def check(self) -> None:
        """Raises UserError where one of them has failed."""
        if self.failure:
            raise UserError(self.failure)

    def threads_of_process(self) -> int:
        """Of torch, if no ranks shared them."""
        return self._threads if self._sharing else torch.get_num_threads()

    def share_threads(self, number: int) -> None:
        """Give torch so many until all that did so have ended."""
        Others._threads = self.threads_of_process()
        self._sharing.append(self)
        torch.set_num_threads(number)

    def end(self) -> None:
        if self._process != os.getpid():
            return  # a fork, whose parent goes on with them
        self.failure = self.failure or "the engine was closed in the middle of a call"
        for other in self.running:
            other.process.kill()  # it has nothing to leave behind
        if self._exchange is not None:
            self._exchange.give_up()
        for other in self.running:
            other.process.wait()
        with self._listening:  # which ends with the first of them
            for other in self.running:
                other.connection.close()
        if self in self._sharing:
            self._sharing.remove(self)
            if not self._sharing:
                torch.set_num_threads(self._threads)

    def _watch(self) -> None:
        """Until one of them says something: nobody does who goes on."""
        try:
            with self._listening:
                by_connection = {other.connection: other for other in self.running}
                heard = wait(list(by_connection))[0]
                assert isinstance(heard, Connection)
                other = by_connection[heard]
                reason = other.hear()
                rank = f"rank {other.rank} of hardware.tensor_parallel_size={self.size}"
                self.failure = self.failure or f"{rank}: {reason}"
                self._has_failed.set()
        finally:
            if self._exchange is not None:
                self._exchange.give_up()
