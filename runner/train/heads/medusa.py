"""Medusa (arXiv 2401.10774) in the layout of FasterDecoding: heads on the target's last hidden state, no attention.

Head i reads the hidden state of position p after the final norm and guesses token p + 2 + i: residual blocks
`x + SiLU(linear(x))`, then a projection to the vocabulary of its own. The weights are a state dict of plain tensors
in `medusa_lm_head.pt`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.train.heads.head import Head, soft_label_loss
from runner.train.heads.states import FrozenTarget, TargetStates


class MedusaHead(Head):
    def __init__(self, target: FrozenTarget, *, num_heads: int, num_layers: int, head_decay: float) -> None:
        super().__init__(target)
        self.num_heads, self.num_layers, self.head_decay = num_heads, num_layers, head_decay
        hidden, vocab = target.config.hidden_size, target.config.vocab_size
        self.heads = nn.ModuleList(
            [
                nn.Sequential(*(ResBlock(hidden) for _ in range(num_layers)), nn.Linear(hidden, vocab, bias=False))
                for _ in range(num_heads)
            ]
        )
        self.vocabulary_names = tuple(f"heads.{head}.{num_layers}.weight" for head in range(num_heads))
        with torch.no_grad():
            for name in self.vocabulary_names:
                self.get_parameter(name).copy_(target.lm_head)

    def loss(self, states: TargetStates, generator: torch.Generator) -> Tensor:
        probs = self.target.probs(states.normed)
        total = torch.zeros((), device=probs.device)
        for index, head in enumerate(self.heads):
            guesses = head(states.normed[:, : -index - 1])
            total = total + self.head_decay**index * soft_label_loss(guesses, probs[:, index + 1 :])
        return total

    @torch.no_grad()
    def draft(self, states: TargetStates, num_speculative_tokens: int) -> Tensor:
        num_texts, length = states.token_ids.shape
        drafts = states.token_ids.new_zeros(num_texts, length, num_speculative_tokens)
        for index, head in enumerate(self.heads[:num_speculative_tokens]):
            drafts[:, 1:, index] = head(states.normed[:, :-1]).argmax(dim=-1)
        return drafts

    def published_config(self) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "medusa_num_heads": self.num_heads,
            "medusa_num_layers": self.num_layers,
            "hidden_size": self.target.config.hidden_size,
            "vocab_size": self.target.config.vocab_size,
            "base_model_name_or_path": None,
        }

    def published_tensors(self) -> dict[str, Tensor]:
        return {name.removeprefix("heads."): tensor for name, tensor in super().published_tensors().items()}

    def save_tensors(self, directory: Path) -> None:
        # Cloned: torch.save writes the whole storage behind a view.
        torch.save({name: t.clone() for name, t in self.published_tensors().items()}, directory / "medusa_lm_head.pt")


class ResBlock(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        return states + F.silu(self.linear(states))
