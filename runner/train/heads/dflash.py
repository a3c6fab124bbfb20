"""DFlash (z-lab) in its published layout: one non-causal pass over a block guesses every token of the block.

The block is the pending token followed by mask tokens; row j guesses the token at its own position, j places behind
the pending one. In every layer keys and values come from two sides: the context, which is `hidden_norm(fc(taps))` of
the positions before the pending token and the same for all layers, and the block itself. Embeddings and head are the
target's and not in the checkpoint.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from runner.train.heads.block import DecoderBlock, concat_keys
from runner.train.heads.head import ANCHORS_AT_ONCE, START_NORM, Head, soft_label_loss
from runner.train.heads.llama_config import block_config, published_keys
from runner.train.heads.states import FrozenTarget, TargetStates


class DFlashHead(Head):
    num_silent_rows = 1  # of a block, which guess nothing: the pending token's

    def __init__(
        self,
        target: FrozenTarget,
        *,
        tap_layers: tuple[int, ...],
        mask_token_id: int,
        num_layers: int,
        intermediate_size: int,
        block_size: int,
        num_anchors: int,
        place_scale: float,
    ) -> None:
        super().__init__(target)
        self.config = block_config(target.config, intermediate_size=intermediate_size)
        self.tap_layers, self.mask_token_id, self.block_size = tap_layers, mask_token_id, block_size
        self.num_anchors, self.place_scale = num_anchors, place_scale
        hidden, eps = self.config.hidden_size, self.config.rms_norm_eps
        self.fc = nn.Linear(len(tap_layers) * hidden, hidden, bias=False)
        self.hidden_norm = LlamaRMSNorm(hidden, eps)
        self.layers = nn.ModuleList([DFlashLayer(self.config) for _ in range(num_layers)])
        self.norm = LlamaRMSNorm(hidden, eps)
        nn.init.constant_(self.norm.weight, START_NORM)

    @property
    def num_guesses(self) -> int:
        return self.block_size - self.num_silent_rows

    def loss(self, states: TargetStates, generator: torch.Generator) -> Tensor:
        anchors = self.drawn_anchors(states, generator)
        logits, probs = self.logits(states, anchors, self.num_guesses), self.target.probs(states.normed)
        total = torch.zeros((), device=probs.device)
        for place in range(self.num_guesses):
            labels = probs[:, anchors + place]
            total = total + self.weight(place) * soft_label_loss(logits[:, :, place], labels)
        return total

    def weight(self, place: int) -> float:
        """Of a guess in the loss."""
        return math.exp(-place / self.place_scale)

    def drawn_anchors(self, states: TargetStates, generator: torch.Generator) -> Tensor:
        """[num_anchors] int64: where the blocks of one loss begin."""
        usable = states.length - self.num_guesses
        anchors = 1 + torch.randperm(usable, generator=generator)[: self.num_anchors].sort().values
        return anchors.to(states.token_ids.device)

    def logits(self, states: TargetStates, anchors: Tensor, num_guesses: int) -> Tensor:
        """[num_texts, num_anchors, num_guesses, vocab], of the blocks that begin with the tokens at `anchors`."""
        return self.target.logits(self.hidden(states, anchors, num_guesses))

    def hidden(self, states: TargetStates, anchors: Tensor, num_guesses: int) -> Tensor:
        """[num_texts, num_anchors, num_guesses, hidden], normed: what the target's head makes guesses of."""
        block_size = num_guesses + self.num_silent_rows
        num_texts, num_anchors = len(states.token_ids), len(anchors)
        context_positions = torch.arange(states.length, device=anchors.device)
        blocks = torch.arange(num_anchors, device=anchors.device).repeat_interleave(block_size)
        positions = (anchors.unsqueeze(1) + torch.arange(block_size, device=anchors.device)).flatten()
        mask = torch.cat([context_positions < anchors[blocks].unsqueeze(1), blocks == blocks.unsqueeze(1)], dim=1)
        tokens = states.token_ids.new_full((num_texts, num_anchors, block_size), self.mask_token_id)
        tokens[:, :, 0] = states.token_ids[:, anchors]
        context = self.hidden_norm(self.fc(states.taps))
        hidden = self.target.embed(tokens.flatten(1))
        for layer in self.layers:
            assert isinstance(layer, DFlashLayer)
            attention, inputs = layer.self_attn, layer.input_layernorm(hidden)
            keys = concat_keys(
                attention.keys_values(context, context_positions), attention.keys_values(inputs, positions)
            )
            hidden = layer(inputs, hidden, positions, keys, mask)
        guesses = hidden.view(num_texts, num_anchors, block_size, -1)[:, :, self.num_silent_rows :]
        normed: Tensor = self.norm(guesses)
        return normed

    @torch.no_grad()
    def draft(self, states: TargetStates, num_speculative_tokens: int) -> Tensor:
        num_texts, length = states.token_ids.shape
        drafts = states.token_ids.new_zeros(num_texts, length, num_speculative_tokens)
        for anchors in torch.split(torch.arange(length, device=states.token_ids.device), ANCHORS_AT_ONCE):
            drafts[:, anchors] = self.guesses(states, anchors, num_speculative_tokens)
        return drafts

    def guesses(self, states: TargetStates, anchors: Tensor, num_guesses: int) -> Tensor:
        """[num_texts, num_anchors, num_guesses] int64, the likeliest behind the tokens at `anchors`."""
        return self.logits(states, anchors, num_guesses).argmax(dim=-1)

    def published_config(self) -> dict[str, Any]:
        num_layers = len(self.layers)
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": num_layers,
            "layer_types": ["full_attention"] * num_layers,
            "num_target_layers": self.target.config.num_hidden_layers,
            "block_size": self.block_size,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": [layer - 1 for layer in self.tap_layers],  # of the layers that write the taps
            },
            **published_keys(self.config, self.target.config),
        }


class DFlashLayer(DecoderBlock):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, qk_norm=True)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
