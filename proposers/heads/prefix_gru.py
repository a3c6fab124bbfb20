"""Domino's sequential head: a GRU over the tokens of a path, which corrects the logits of the place behind them.

Names and arithmetic are those of SpecForge's checkpoints. The GRU reads embeddings, those of the pending token first;
the first places of a block may go without a correction, and still move it on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from kernels.cpu.panels import Change, Weight, unpacked
from proposers.heads.sequential import SequentialHead
from runner.engine.linear import WeightTarget
from runner.engine.operations import head_logits, linear


class PrefixGru(SequentialHead):
    has_state = True

    def __init__(
        self,
        embed: Callable[[torch.Tensor], torch.Tensor],  # [num_rows] int64 -> [num_rows, hidden]
        *,
        num_uncorrected: int,  # places of a block
        state_size: int,
        rank: int,  # of what is added to the logits
        hidden_size: int,
        vocab_size: int,
        dtype: torch.dtype,
    ) -> None:
        self.embed, self.num_uncorrected, self.state_size = embed, num_uncorrected, state_size
        self.of_tokens: Weight = torch.empty(3 * state_size, hidden_size, dtype=dtype)
        self.of_state: Weight = torch.empty(3 * state_size, state_size, dtype=dtype)
        self.mixer: Weight = torch.empty(rank, hidden_size + state_size, dtype=dtype)
        self.projection: Weight = torch.empty(vocab_size, rank, dtype=dtype)
        self._dtype = dtype

    def first_state(self, silent: torch.Tensor | None, token_ids: torch.Tensor, tile: int | None) -> torch.Tensor:
        return torch.zeros(len(token_ids), self.state_size, dtype=self._dtype, device=token_ids.device)

    def places(self, hidden: torch.Tensor, logits: torch.Tensor, tile: int | None) -> tuple[torch.Tensor, ...]:
        return logits, hidden

    def guess(
        self,
        place: int,
        places: tuple[torch.Tensor, ...],
        state: torch.Tensor | None,
        token_ids: torch.Tensor,
        tile: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert state is not None
        (logits, hidden), num_rows = places, len(token_ids)
        num_each = num_rows // len(logits)
        state = self._behind(state, token_ids, tile)
        if place < self.num_uncorrected:
            return logits if num_each == 1 else logits.repeat_interleave(num_each, dim=0, output_size=num_rows), state
        of_rows = hidden.repeat_interleave(num_each, dim=0, output_size=num_rows)
        latent = F.silu(linear(torch.cat((of_rows, state), dim=1), self.mixer, None, tile))
        added = head_logits(latent, self.projection, tile).view(len(logits), num_each, -1)
        return (added + logits.unsqueeze(1)).flatten(0, 1), state

    def _behind(self, state: torch.Tensor, token_ids: torch.Tensor, tile: int | None) -> torch.Tensor:
        """The state [num_rows, state_size] moved on by a token of each row (Cho et al., arXiv 1406.1078)."""
        size = self.state_size
        told = linear(self.embed(token_ids.contiguous()), self.of_tokens, None, tile)
        held = linear(state, self.of_state, None, tile)
        reset, keep = (told[:, : 2 * size] + held[:, : 2 * size]).sigmoid().chunk(2, dim=1)
        fresh = (told[:, 2 * size :] + reset * held[:, 2 * size :]).tanh()
        return keep * state + (1 - keep) * fresh

    def convert(self, change: Change) -> None:
        self.of_tokens, self.of_state = change(self.of_tokens), change(self.of_state)
        self.mixer, self.projection = change(self.mixer), change(self.projection)

    def weight_targets(self) -> dict[str, WeightTarget]:
        weights = {
            "prefix_gru.weight_ih_l0": self.of_tokens,
            "prefix_gru.weight_hh_l0": self.of_state,
            "embed_proj.0.weight": self.mixer,
            "embed_proj.2.weight": self.projection,
        }
        return {name: WeightTarget(view=unpacked(weight)) for name, weight in weights.items()}
