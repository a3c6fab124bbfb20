"""IBM's MLP speculator (arXiv 2404.19124): a small recurrence over the target's last hidden state and its own tokens.

The state starts as the normed hidden state of position p; step i adds the embedding of token p + 1 + i and guesses
token p + 2 + i. With tied weights all steps share embedding, norm and head, and all but the first the projection; the
checkpoint then holds each of them once, under the name of the first step that uses it, as safetensors stores shared
tensors.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.train.heads.head import Head, soft_label_loss
from runner.train.heads.states import FrozenTarget, TargetStates

TOP_K_TOKENS_PER_HEAD = (4, 3, 2, 2, 2, 2, 2, 2)  # of IBM's trees; chains do not use them
EPS = 1e-6


class MLPSpeculatorHead(Head):
    tensor_prefix = "speculator."
    vocabulary_names = ("emb.0.weight", "head.0.weight")

    def __init__(self, target: FrozenTarget, *, inner_dim: int, n_predict: int, step_decay: float) -> None:
        super().__init__(target)
        self.inner_dim, self.n_predict, self.step_decay = inner_dim, n_predict, step_decay
        hidden, vocab = target.config.hidden_size, target.config.vocab_size
        emb, head = nn.Embedding(vocab, inner_dim), nn.Linear(inner_dim, vocab, bias=False)
        norm, again = ScaleAndShiftNorm(inner_dim), nn.Linear(inner_dim, inner_dim, bias=False)
        self.emb = nn.ModuleList([emb] * n_predict)
        self.proj = nn.ModuleList([nn.Linear(hidden, inner_dim, bias=False), *[again] * (n_predict - 1)])
        self.head = nn.ModuleList([head] * n_predict)
        self.ln = nn.ModuleList([norm] * n_predict)
        for weight in (emb.weight, head.weight, again.weight, self.proj[0].weight):
            assert isinstance(weight, Tensor)
            nn.init.normal_(weight, std=1 / math.sqrt(inner_dim))
        # The first state is half of the state's magnitude by the last step, in expectation.
        self.state_weight = 0.5 ** (0.5 / n_predict)
        self.emb_weight = math.sqrt((1 - self.state_weight**2) * (inner_dim / 2))

    def initial_state(self, states: TargetStates) -> Tensor:
        return rms_normed(states.normed) / math.sqrt(2)

    def step(self, index: int, state: Tensor, tokens: Tensor) -> Tensor:
        mixed = self.proj[index](state) + self.emb[index](tokens) * (self.emb_weight / self.state_weight)
        return F.gelu(self.ln[index](mixed))

    def loss(self, states: TargetStates, generator: torch.Generator) -> Tensor:
        rows = states.length - self.n_predict
        state = self.initial_state(states)[:, :rows]
        probs = self.target.probs(states.normed)
        total = torch.zeros((), device=probs.device)
        for index in range(self.n_predict):
            state = self.step(index, state, states.token_ids[:, index + 1 : index + 1 + rows])
            labels = probs[:, index + 1 : index + 1 + rows]
            total = total + self.step_decay**index * soft_label_loss(self.head[index](state), labels)
        return total

    @torch.no_grad()
    def draft(self, states: TargetStates, num_speculative_tokens: int) -> Tensor:
        num_texts, length = states.token_ids.shape
        drafts = states.token_ids.new_zeros(num_texts, length, num_speculative_tokens)
        state, tokens = self.initial_state(states)[:, :-1], states.token_ids[:, 1:]
        for index in range(min(num_speculative_tokens, self.n_predict)):
            state = self.step(index, state, tokens)
            tokens = self.head[index](state).argmax(dim=-1)
            drafts[:, 1:, index] = tokens
        return drafts

    def published_config(self) -> dict[str, Any]:
        return {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "emb_dim": self.target.config.hidden_size,
            "inner_dim": self.inner_dim,
            "n_predict": self.n_predict,
            "n_candidates": 5,
            "top_k_tokens_per_head": list(TOP_K_TOKENS_PER_HEAD[: self.n_predict]),
            "vocab_size": self.target.config.vocab_size,
            "tie_weights": True,
            "scale_input": True,
            "base_model_name_or_path": None,
            "torch_dtype": "bfloat16",
        }


class ScaleAndShiftNorm(nn.Module):
    """IBM's LayerNormParameterized: no mean is subtracted, but there is a bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, states: Tensor) -> Tensor:
        return rms_normed(states) * self.weight + self.bias


def rms_normed(states: Tensor) -> Tensor:
    return states * torch.rsqrt(states.square().mean(dim=-1, keepdim=True) + EPS)
