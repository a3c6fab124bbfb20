"""One multi-token-prediction layer in the `speculators` layout (MTPDraftModel), run again for every further token.

A step norms the embedding and the hidden state apart, projects their concatenation, runs a Qwen3 decoder layer and a
final norm. The hidden state is the target's last one after its final norm, later that step's own output, which the
target's head reads (FastMTP, arXiv 2509.18362). Embeddings and head are the target's and not in the checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from runner.train.heads.block import DecoderBlock, start_silent
from runner.train.heads.head import START_NORM
from runner.train.heads.llama_config import block_config, published_keys
from runner.train.heads.states import FrozenTarget, TargetStates
from runner.train.heads.unrolled import UnrolledHead


class MTPHead(UnrolledHead):
    def __init__(
        self,
        target: FrozenTarget,
        *,
        num_speculative_tokens: int,  # stated in the checkpoint as its default
        num_steps: int,
        num_anchors: int,
        step_decay: float,
    ) -> None:
        super().__init__(target, num_steps=num_steps, num_anchors=num_anchors, step_decay=step_decay)
        self.num_speculative_tokens = num_speculative_tokens
        self.config = block_config(target.config)
        self.mtp_layers = nn.ModuleList([MTPLayer(self.config)])
        start_silent(self.mtp_layers[0], target.last_layer)
        nn.init.constant_(self.block.final_layernorm.weight, START_NORM)

    @property
    def block(self) -> MTPLayer:
        block = self.mtp_layers[0]
        assert isinstance(block, MTPLayer)
        return block

    def features(self, states: TargetStates) -> Tensor:
        return states.normed

    def block_inputs(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.block
        both = torch.cat([layer.token_layernorm(embeddings), layer.hidden_layernorm(hidden)], dim=-1)
        residual = layer.input_proj(both)
        return layer.input_layernorm(residual), residual

    def block_output(self, residual: Tensor) -> Tensor:
        output: Tensor = self.block.final_layernorm(residual)
        return output

    def logits(self, output: Tensor) -> Tensor:
        return self.target.logits(output)

    def published_config(self) -> dict[str, Any]:
        keys = published_keys(self.config, self.target.config)
        layers = self.target.config.num_hidden_layers
        return {
            "architectures": ["MTPDraftModel"],
            "model_type": "speculator_model",
            "speculators_model_type": "mtp",
            "speculators_version": "0.5.0",
            "num_nextn_predict_layers": 1,
            "speculators_config": {
                "algorithm": "mtp",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": self.num_speculative_tokens,
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "verifier": {"name_or_path": None, "architectures": self.target.config.architectures},
            },
            "transformer_layer_config": {"model_type": "qwen3", "num_hidden_layers": layers, **keys},
            "dtype": "bfloat16",
        }


class MTPLayer(DecoderBlock):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, qk_norm=True)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(hidden, eps)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.hidden_layernorm = LlamaRMSNorm(hidden, eps)
        self.token_layernorm = LlamaRMSNorm(hidden, eps)
        self.final_layernorm = LlamaRMSNorm(hidden, eps)
