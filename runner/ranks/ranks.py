"""The processes that run engines together, one at a time, as one of them sees them.

Every rank makes the same steps over the same requests and comes to the same tokens (runner/engine/shard.py). What
depends on a clock, on a user or on another thread is the first rank's to say: which call begins, and between its steps
who has arrived and who is told to stop.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar
from zlib import crc32

from runner.config import SpeculativeConfig
from runner.engine.request import Request
from runner.engine.schedule import CommittedTokens
from runner.engine.shard import Shard

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Build:
    """An engine, in place of the last one."""

    config: SpeculativeConfig
    shares_target: bool  # with the last one: its weights


@dataclass(frozen=True, kw_only=True)
class Forget:
    """What the KV cache knows of earlier prompts."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Requests brought to their end."""

    requests: Sequence[Request]
    is_plain: bool = False  # without drafts
    max_concurrency: int | None = None  # requests in flight at most; None: no bound
    max_draft_tokens: int | None = None  # of a request in a step, at most; None: as the configuration says
    arrivals: Sequence[float] | None = None  # s after the start, ascending; None: as soon as there is room
    keeps_cache: bool = False  # finds in the KV cache what earlier calls left there
    restarts: bool = False  # the proposer begins with what it knew when it was built


Call = Build | Forget | Run


class Ranks:
    """One process alone; a base for those of several."""

    shard = Shard()

    @property
    def is_open(self) -> bool:
        """Whether calls can follow."""
        return True

    @contextmanager
    def together(self, call: Call) -> Iterator[None]:
        """What is done inside, all ranks do.

        Raises:
            UserError: another rank has failed, or did in an earlier call.
        """
        yield

    def note(self, committed: Sequence[CommittedTokens]) -> None:
        """What a step has brought."""

    def share(self, value: Value) -> Value:
        """The first rank's value, in all of them.

        Raises:
            UserError: another rank has failed.
            RuntimeError: the ranks do not do the same, which is a bug of ours, or a proposer's.
        """
        return value

    def close(self) -> None:
        """End the other processes; no call can follow."""


class SeveralRanks(Ranks):
    """Those of which there are others; they notice where they part."""

    _said = 0  # a checksum of the drafts and tokens so far

    def note(self, committed: Sequence[CommittedTokens]) -> None:
        said = [(gain.num_draft_tokens, gain.num_accepted_tokens, gain.token_ids) for gain in committed]
        self._said = crc32(repr(said).encode(), self._said)

    def share(self, value: Value) -> Value:
        exchange = self.shard.exchange
        theirs, said = self.pass_on((value, self._said))
        if said != self._said or exchange is None or exchange.has_parted:
            raise RuntimeError("the ranks of hardware.tensor_parallel_size have come to do different things")
        return theirs

    @abstractmethod
    def pass_on(self, value: Value) -> Value:
        """The first rank's value, in all of them."""
