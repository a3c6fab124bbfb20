"""Heads that draft token by token, as proposers take them."""

from __future__ import annotations

from typing import Protocol

import torch

from proposers.heads.quantized import ProjectsByTarget
from proposers.vocabularies.partial import KnownTokens
from runner.engine.head_runner import DraftHead


class AutoregressiveHead(DraftHead, ProjectsByTarget, Protocol):
    """A head whose output is its own next input.

    A row of its output begins with the state that is fed back, [width]. Where its logits come of something else, that
    stands behind it, as rows are gathered together: the same state normed where it is fed back without, [2 * width], as
    the norm has added the two up; or what the state was projected from. Of a row that is fed, what stands behind the
    state is not read.

    A head without keys and values of its own sees those of the target. All its rows of a step stand at the place of the
    last committed token, and only this token's is computed of those that are committed.
    """

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """The target's hidden states that it reads."""

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states [num_rows, num_taps * hidden] as the head takes them, [num_rows, width]."""

    @property
    def known_tokens(self) -> KnownTokens | None:
        """Of the logits' columns; None: all of the target's."""

    def logits(self, output: torch.Tensor, tile: int | None) -> torch.Tensor:
        """Rows of its output, as many as a multiple of tile -> [num_rows, known tokens] float32."""
