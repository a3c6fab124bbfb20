"""A head that goes through a block's logits place by place: what each guess says of the place behind it.

The block's own pass knows of no guess. Such a head costs little beside that pass, so that chains go through it token by
token, and trees level by level.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kernels.cpu.panels import Change
from proposers.heads.dflash import DFlashHead


class SequentialHead(Protocol):
    has_state: bool  # a guess depends on more than the token before it

    def first_state(
        self, silent: torch.Tensor | None, token_ids: torch.Tensor, tile: int | None
    ) -> torch.Tensor | None:
        """Before the first place of blocks, [num_blocks, width]; None where has_state says so.

        Args:
            silent: [num_blocks, hidden], the rows of blocks that guess nothing; None: every row guesses.
            token_ids: [num_blocks] int64, the pending ones. num_blocks is a multiple of tile, as rows are everywhere.
        """

    def places(self, hidden: torch.Tensor, logits: torch.Tensor, tile: int | None) -> tuple[torch.Tensor, ...]:
        """What `guess` is to have of each place of blocks, [num_places, ...] each.

        hidden: the rows that guess [num_places, hidden]; logits: theirs [num_places, known] float32.
        """

    def guess(
        self,
        place: int,
        places: tuple[torch.Tensor, ...],
        state: torch.Tensor | None,
        token_ids: torch.Tensor,
        tile: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits of a place [num_rows, known] float32, and the state behind each row.

        Args:
            place: of the block, from 0.
            places: what `places` gave of this one, [num_owners, ...] each; rows are owner by owner, as many of each.
            state: [num_rows, width]; None where has_state says so.
            token_ids: [num_rows] int64, of the place before.
        """

    def convert(self, change: Change) -> None:
        """As Decoder.convert."""


class SequentialBlockHead(DFlashHead):
    """A block with such a head behind it."""

    sequel: SequentialHead

    def convert(self, change: Change) -> None:
        super().convert(change)
        self.sequel.convert(change)
