"""EAGLE (arXiv 2401.15077) in the layout of its own repository: the target's feature and the next token, one layer.

A step is `layer(fc(cat(embedding, feature)))`; the feature is the target's last hidden state after the final norm,
later the layer's own output, and the target's head reads either. The layer has no `input_layernorm`; embeddings and
head are the target's and not in the checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from runner.train.heads.block import DecoderBlock
from runner.train.heads.llama_config import block_config, published_keys
from runner.train.heads.states import FrozenTarget, TargetStates
from runner.train.heads.unrolled import UnrolledHead


class EagleHead(UnrolledHead):
    def __init__(self, target: FrozenTarget, *, num_steps: int, num_anchors: int, step_decay: float) -> None:
        super().__init__(target, num_steps=num_steps, num_anchors=num_anchors, step_decay=step_decay)
        self.config = block_config(target.config)
        hidden = self.config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([DecoderBlock(self.config)])

    @property
    def block(self) -> DecoderBlock:
        block = self.layers[0]
        assert isinstance(block, DecoderBlock)
        return block

    def features(self, states: TargetStates) -> Tensor:
        return states.normed

    def block_inputs(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        fused = self.fc(torch.cat([embeddings, hidden], dim=-1))
        return fused, fused

    def block_output(self, residual: Tensor) -> Tensor:
        return residual

    def logits(self, output: Tensor) -> Tensor:
        return self.target.logits(output)

    def published_config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "bias": False,
            **published_keys(self.config, self.target.config),
        }
