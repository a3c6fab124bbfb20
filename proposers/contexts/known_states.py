"""What a head's proposer keeps of a request."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(kw_only=True)
class KnownStates:
    """How far the head has come with one request."""

    next_position: int  # of the first token whose row is not computed; x_0 has none, for lack of a state before it
    states: list[torch.Tensor]  # of the positions next_position - 1 up to the last computed one, rows in pieces

    def advance(self, end: int) -> torch.Tensor:
        """The head is done with the tokens before position `end`; the states [num_tokens, ...] that their rows take."""
        states = torch.cat(self.states)
        num_tokens = max(0, end - self.next_position)
        self.next_position += num_tokens
        self.states = [states[num_tokens:].clone()]  # a view would keep the whole chunk
        return states[:num_tokens]
