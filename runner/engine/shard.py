"""This process's part of a model that several hold together: tensor parallelism (Shoeybi et al., arXiv 1909.08053).

Every rank runs the whole engine over the same requests: what it draws is a function of the logits, which all ranks have
to the bit, so nobody has to be told the tokens. Only products are shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from runner.engine.errors import UserError
from runner.engine.operations import beside, sum_of_ranks


class Exchange(Protocol):
    """Between the ranks, each of which makes the same exchanges in the same order."""

    device: torch.device  # whose tensors it takes

    @property
    def has_parted(self) -> bool:
        """Whether ranks are known to have given it unlike sizes; then what is gathered means nothing."""

    def gather(self, own: Tensor) -> Tensor:
        """[...] of every rank, of one shape and dtype -> [size, ...]; can be captured and recorded."""

    def give_up(self) -> None:
        """Have no rank wait for another any more: one is gone, and what is gathered means nothing. From any thread."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    rank: int = 0
    size: int = 1
    exchange: Exchange | None = None  # None: there is one rank, or it loads weights and computes nothing

    def split(self, length: int, what: str) -> int:
        """Raises UserError unless every rank gets as many."""
        if length % self.size:
            rule = f"{what} must be divisible by hardware.tensor_parallel_size ({self.size})"
            raise UserError(f"{rule}, got {length}; choose another tensor_parallel_size")
        return length // self.size

    def sum(self, part: Tensor) -> Tensor:
        """[num_rows, width] of each rank, added up in the order of the ranks: a row's bits depend on no other row."""
        return part if self.size == 1 else sum_of_ranks(self._gather(part))

    def beside(self, part: Tensor) -> Tensor:
        """[num_rows, width] of each rank -> [num_rows, size * width]."""
        return part if self.size == 1 else beside(*self.of_all(part))

    def of_all(self, part: Tensor) -> Sequence[Tensor]:
        """[...] of each rank, in the order of the ranks."""
        return [part] if self.size == 1 else self._gather(part).unbind()

    def stack(self, part: Tensor) -> Tensor:
        """[num_rows, width] of each rank -> [size * num_rows, width]."""
        return part if self.size == 1 else self._gather(part).flatten(0, 1)

    def least(self, number: int) -> int:
        """Of the numbers that the ranks have; not while anything is captured."""
        if self.size == 1:
            return number
        assert self.exchange is not None
        return int(self._gather(torch.tensor([number], device=self.exchange.device)).min())

    def num_beside(self, device: torch.device) -> int:
        """Ranks that take from one memory: on a CPU all of them, where a GPU has its own."""
        return self.size if device.type == "cpu" else 1

    def all(self, holds: bool) -> bool:
        """Whether it holds in every rank."""
        return bool(self.least(int(holds)))

    def _gather(self, part: Tensor) -> Tensor:
        assert self.exchange is not None, "a shard of several needs an exchange to compute"
        return self.exchange.gather(part)
