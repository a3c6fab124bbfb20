"""DSpark's sequential head: what the guess before a place adds to the logits of that place (arXiv 2607.05147).

A table of low rank, W2 W1[token before]; `gated` weighs its parts by the place's hidden state, `rnn` keeps a state
along the block. Names and arithmetic are those of DeepSpec's checkpoints, which speculators write too.
"""

from __future__ import annotations

import torch

from kernels.cpu.panels import Change, Weight
from proposers.heads.sequential import SequentialHead
from runner.engine.linear import WeightTarget, empty_weight, weight_target
from runner.engine.operations import head_logits, linear
from runner.engine.quantization import Quantization

KINDS = ("vanilla", "gated", "rnn")


class MarkovHead(SequentialHead):
    def __init__(
        self,
        kind: str,
        *,
        rank: int,
        hidden_size: int,
        vocab_size: int,
        draft_vocab_size: int,
        dtype: torch.dtype,
        quantization: Quantization,  # of its products, by their modules
    ) -> None:
        """kind: of KINDS. The token before is one of vocab_size, what is guessed one of draft_vocab_size."""
        self.kind, self.rank = kind, rank
        self.has_state = kind == "rnn"
        self.table = torch.empty(vocab_size, rank, dtype=dtype)
        self.projection: Weight = empty_weight(draft_vocab_size, rank, dtype, quantization.get("markov_w2"))
        num_mixed = {"vanilla": 0, "gated": 1, "rnn": 3}[kind]
        width = hidden_size + (2 if kind == "rnn" else 1) * rank
        self._mixer_name = "joint_proj" if kind == "rnn" else "gate_proj"
        self.mixer: Weight | None = (
            empty_weight(num_mixed * rank, width, dtype, quantization.get(self._mixer_name)) if num_mixed else None
        )
        self.mixer_bias = torch.empty(num_mixed * rank, dtype=dtype) if num_mixed else None

    def first_state(
        self, silent: torch.Tensor | None, token_ids: torch.Tensor, tile: int | None
    ) -> torch.Tensor | None:
        """[num_blocks, rank] of an `rnn`. In training it goes over silent rows too, as if a pending token stood before
        itself."""
        if not self.has_state:
            return None
        state = self.table.new_zeros(len(token_ids), self.rank)
        return state if silent is None else self._step(state, silent, token_ids=token_ids, tile=tile)[1]

    def places(self, hidden: torch.Tensor, logits: torch.Tensor, tile: int | None) -> tuple[torch.Tensor, ...]:
        return (logits,) if self.mixer is None else (logits, hidden)

    def guess(
        self,
        place: int,
        places: tuple[torch.Tensor, ...],
        state: torch.Tensor | None,
        token_ids: torch.Tensor,
        tile: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits, *hidden = places
        num_each = len(token_ids) // len(logits)
        of_rows = [own.repeat_interleave(num_each, dim=0, output_size=len(token_ids)) for own in hidden]
        latent, state = self._step(state, *of_rows, token_ids=token_ids, tile=tile)
        added = head_logits(latent, self.projection, tile).view(len(logits), num_each, -1)
        return (added + logits.unsqueeze(1)).flatten(0, 1), state

    def _step(
        self,
        state: torch.Tensor | None,
        hidden: torch.Tensor | None = None,  # [num_rows, hidden], of the place that is guessed, for those that read it
        *,
        token_ids: torch.Tensor,
        tile: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the projection reads of each row, [num_rows, rank], and the state behind it."""
        latent = self.table.index_select(0, token_ids)
        if self.mixer is not None:
            assert hidden is not None
            seen = (hidden, latent) if state is None else (state, latent, hidden)
            mixed = linear(torch.cat(seen, dim=1), self.mixer, self.mixer_bias, tile)
            if state is not None:
                keep, fresh, told = mixed.chunk(3, dim=1)
                keep = keep.sigmoid()
                state, latent = keep * state + (1 - keep) * fresh.tanh(), told.tanh()
            else:
                latent = mixed.sigmoid() * latent
        return latent, state

    def convert(self, change: Change) -> None:
        self.projection = change(self.projection)
        if self.mixer is not None:
            self.mixer = change(self.mixer)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        targets = {
            f"{prefix}markov_w1.weight": WeightTarget(view=self.table),
            f"{prefix}markov_w2.weight": weight_target(self.projection),
        }
        if self.mixer is not None:
            assert self.mixer_bias is not None
            targets[f"{prefix}{self._mixer_name}.weight"] = weight_target(self.mixer)
            targets[f"{prefix}{self._mixer_name}.bias"] = WeightTarget(view=self.mixer_bias)
        return targets
