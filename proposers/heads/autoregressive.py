"""Heads that draft token by token, as proposers take them."""

from __future__ import annotations

from typing import Protocol

import torch

from proposers.heads.quantized import ProjectsByTarget
from proposers.vocabularies.partial import KnownTokens
from runner.engine.head_runner import DraftHead


class AutoregressiveHead(DraftHead, ProjectsByTarget, Protocol):
    """A head whose output is its own next input.

    A row of its output begins with the state that is fed back, [width]. Where the head norms that state for its logits
    and feeds it back without, the normed one stands behind it, [2 * width]: the norm has added the two up, and rows are
    gathered together. Of a row that is fed, what stands behind the state is not read.
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
