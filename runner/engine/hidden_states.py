"""Hidden states of the target that draft heads read: which ones, and a step's rows of them.

A tap i >= 0 is the residual stream after i layers (0 = embeddings, num_layers = before the final norm); NORMED is what
the target's head sees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

NORMED = -1


@dataclass(frozen=True, kw_only=True)
class HiddenStates:
    """Rows of every token that a step computed, request by request in the order of the schedule."""

    states: torch.Tensor  # [num_rows, num_taps * hidden], the taps side by side in the order they were asked for
    first_rows: list[int]  # of each scheduled request

    def of(self, index: int, num_tokens: int) -> torch.Tensor:
        """Of the first num_tokens tokens of scheduled request `index`, from its position `start` on.

        What was committed comes first: behind the tokens that entered the cache for good lie rejected drafts.
        """
        first = self.first_rows[index]
        return self.states[first : first + num_tokens]

    def reordered(self, rows: torch.Tensor) -> HiddenStates:
        """With row rows[i] in place i; [num_rows] int64."""
        return replace(self, states=self.states.index_select(0, rows))
