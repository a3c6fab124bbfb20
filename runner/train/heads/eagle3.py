"""EAGLE-3 (arXiv 2503.01840) in the layout of its own repository: three depths of the target, a vocabulary of its own.

A step is `midlayer(embedding, hidden)`: the layer normes both, attends over their concatenation, and its residual is
the hidden state before that norm. Hidden is `fc` of the target's taps, later the layer's own output; `lm_head(norm(.))`
guesses among the `draft_vocab_size` tokens that the training texts use most, and `d2t` is what to add to a draft id
to get the target's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from runner.train.heads.block import DecoderBlock
from runner.train.heads.head import START_NORM
from runner.train.heads.llama_config import block_config, published_keys
from runner.train.heads.states import FrozenTarget, TargetStates
from runner.train.heads.unrolled import UnrolledHead


class Eagle3Head(UnrolledHead):
    vocabulary_names = ("lm_head.weight",)

    def __init__(
        self,
        target: FrozenTarget,
        *,
        tap_layers: tuple[int, ...],
        tap_scale: float,  # a power of two near the size of the taps, so that `fc` learns at the others' rate
        frequent_tokens: Tensor,  # [draft_vocab_size] int64, ascending
        num_steps: int,
        num_anchors: int,
        step_decay: float,
    ) -> None:
        super().__init__(target, num_steps=num_steps, num_anchors=num_anchors, step_decay=step_decay)
        self.config = block_config(target.config)
        self.tap_layers, self.tap_scale = tap_layers, tap_scale
        hidden = self.config.hidden_size
        self.fc = nn.Linear(len(tap_layers) * hidden, hidden, bias=False)
        self.midlayer = Eagle3Block(self.config)
        self.norm = LlamaRMSNorm(hidden, self.config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, len(frequent_tokens), bias=False)
        used = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        used[frequent_tokens] = True
        self.register_buffer("d2t", frequent_tokens - torch.arange(len(frequent_tokens)))
        self.register_buffer("t2d", used)
        with torch.no_grad():
            self.lm_head.weight.copy_(target.lm_head[frequent_tokens])
            self.norm.weight.fill_(START_NORM)

    @property
    def block(self) -> DecoderBlock:
        return self.midlayer

    @property
    def frequent_tokens(self) -> Tensor:
        """[draft_vocab_size] target ids of the draft ids."""
        offsets = self.get_buffer("d2t")
        return offsets + torch.arange(len(offsets), device=offsets.device)

    def features(self, states: TargetStates) -> Tensor:
        fused: Tensor = self.fc(states.taps / self.tap_scale)
        return fused

    def block_inputs(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.midlayer
        return torch.cat([layer.input_layernorm(embeddings), layer.hidden_norm(hidden)], dim=-1), hidden

    def block_output(self, residual: Tensor) -> Tensor:
        return residual

    def logits(self, output: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(output))
        return logits

    def target_probs(self, normed: Tensor) -> Tensor:
        return self.target.probs(normed, self.frequent_tokens)

    def token_ids(self, draft_ids: Tensor) -> Tensor:
        return self.frequent_tokens[draft_ids]

    def published_config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": len(self.frequent_tokens),
            "target_hidden_size": self.target.config.hidden_size,
            "eagle_aux_hidden_state_layer_ids": list(self.tap_layers),
            **published_keys(self.config, self.target.config),
        }

    def published_tensors(self) -> dict[str, Tensor]:
        tensors = super().published_tensors()
        return {**tensors, "fc.weight": tensors["fc.weight"] / self.tap_scale}  # exact: it is a power of two


class Eagle3Block(DecoderBlock):
    """`midlayer`: reads an embedding and a hidden state side by side."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, input_size=2 * config.hidden_size)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
