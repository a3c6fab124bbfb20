"""DSpark (arXiv 2607.05147) in the layout of speculators: DFlash's block, and a head that goes through it.

Every row of the block guesses, the pending token's too. The block's logits know of no guess; the sequential head adds
to them what the guess before says, by a table of low rank. A second head says how likely each guess is to be accepted.
Embeddings and head are the target's and not in the checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.train.heads.dflash import DFlashHead
from runner.train.heads.head import soft_label_loss
from runner.train.heads.llama_config import published_keys
from runner.train.heads.states import FrozenTarget, TargetStates


class DSparkHead(DFlashHead):
    num_silent_rows = 0
    vocabulary_names = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")

    def __init__(self, target: FrozenTarget, *, markov_rank: int, **block: Any) -> None:
        super().__init__(target, **block)
        hidden = self.config.hidden_size
        self.markov_head = MarkovHead(self.config.vocab_size, markov_rank)
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(hidden + markov_rank, 1)})

    def loss(self, states: TargetStates, generator: torch.Generator) -> Tensor:
        anchors, device = self.drawn_anchors(states, generator), states.token_ids.device
        hidden = self.hidden(states, anchors, self.num_guesses)
        before = states.token_ids[:, anchors.unsqueeze(1) + torch.arange(self.num_guesses, device=device)]
        logits = self.target.logits(hidden) + self.markov_head(before)
        confidence = self._confidence(hidden, before)
        probs = self.target.probs(states.normed)
        total = torch.zeros((), device=device)
        for place in range(self.num_guesses):
            guess, labels = logits[:, :, place], probs[:, anchors + place]
            with torch.no_grad():
                accepted = 1 - 0.5 * (guess.softmax(dim=-1) - labels).abs().sum(dim=-1)
            doubt = F.binary_cross_entropy_with_logits(confidence[:, :, place], accepted.clamp(0, 1))
            total = total + self.weight(place) * (soft_label_loss(guess, labels) + doubt)
        return total

    def guesses(self, states: TargetStates, anchors: Tensor, num_guesses: int) -> Tensor:
        logits, guessed = self.logits(states, anchors, num_guesses), [states.token_ids[:, anchors]]
        for place in range(num_guesses):
            guessed.append((logits[:, :, place] + self.markov_head(guessed[-1])).argmax(dim=-1))
        return torch.stack(guessed[1:], dim=-1)

    def published_config(self) -> dict[str, Any]:
        num_layers = len(self.layers)
        return {
            "architectures": ["DSparkSpeculator"],
            "speculators_model_type": "dspark",
            "speculators_config": {
                "algorithm": "dspark",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": self.num_guesses}],
                "default_proposal_method": "greedy",
                "verifier": {"name_or_path": None, "architectures": self.target.config.architectures},
            },
            "block_size": self.block_size,
            "sample_from_anchor": True,
            "mask_token_id": self.mask_token_id,
            "aux_hidden_state_layer_ids": list(self.tap_layers),
            "draft_vocab_size": self.config.vocab_size,
            "markov_rank": self.markov_head.markov_w2.in_features,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "transformer_layer_config": {
                "model_type": "qwen3",
                "num_hidden_layers": num_layers,
                "layer_types": ["full_attention"] * num_layers,
                **published_keys(self.config, self.target.config),
            },
        }

    def _confidence(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Logits of each guess's acceptance. What it learns changes no guess: nothing flows back from it."""
        seen = torch.cat([hidden, self.markov_head.markov_w1(before)], dim=-1).detach()
        scores: Tensor = self.confidence_head["proj"](seen)
        return scores.squeeze(-1)


class MarkovHead(nn.Module):
    """What a token adds to the logits of the next one; nothing, before it is trained."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, before: Tensor) -> Tensor:
        """[...] int64 -> [..., vocab]."""
        bias: Tensor = self.markov_w2(self.markov_w1(before))
        return bias
