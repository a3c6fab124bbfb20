"""The decoder block of the heads, in training form: dense texts, masks instead of a cache.

One block for all of them; what differs between the published heads is the width of the attention's input and whether
queries and keys are normed. Rotary embedding, MLP and norm are transformers' own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from runner.train.heads.head import copy_matching

KeysValues = tuple[Tensor, Tensor]  # each [num_texts, num_kv_heads, num_keys, head_dim]


class Attention(nn.Module):
    """Attention whose keys may come from elsewhere than its queries."""

    def __init__(self, config: LlamaConfig, *, input_size: int, qk_norm: bool) -> None:
        super().__init__()
        assert config.head_dim is not None and config.num_key_value_heads is not None
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * self.head_dim
        kv_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=False)
        self.k_proj = nn.Linear(input_size, kv_size, bias=False)
        self.v_proj = nn.Linear(input_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.q_norm = LlamaRMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else None
        self.k_norm = LlamaRMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else None
        self.rotary = LlamaRotaryEmbedding(config)

    def keys_values(self, states: Tensor, positions: Tensor) -> KeysValues:
        """Of states [num_texts, num_keys, input_size] at positions [num_keys]."""
        keys = self._heads(self.k_proj(states))
        if self.k_norm is not None:
            keys = self.k_norm(keys)
        return self._rotate(keys, positions), self._heads(self.v_proj(states))

    def forward(
        self,
        states: Tensor,  # [num_texts, num_queries, input_size]
        positions: Tensor,  # [num_queries]
        keys_values: KeysValues,
        mask: Tensor | None,  # [num_queries, num_keys] bool, True = sees; None = causal, a query per key
    ) -> Tensor:
        queries = self._heads(self.q_proj(states))
        if self.q_norm is not None:
            queries = self.q_norm(queries)
        keys, values = keys_values
        out = F.scaled_dot_product_attention(
            self._rotate(queries, positions), keys, values, mask, is_causal=mask is None, enable_gqa=True
        )
        merged: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return merged

    def _heads(self, flat: Tensor) -> Tensor:
        return flat.view(*flat.shape[:2], -1, self.head_dim).transpose(1, 2)

    def _rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.rotary(heads, positions.unsqueeze(0))
        rotated: Tensor = apply_rotary_pos_emb(heads, heads, cos, sin)[0]
        return rotated


class DecoderBlock(nn.Module):
    """Attention and MLP with their residuals; whoever owns the block norms the attention's input."""

    def __init__(self, config: LlamaConfig, *, input_size: int | None = None, qk_norm: bool = False) -> None:
        super().__init__()
        self.self_attn = Attention(config, input_size=input_size or config.hidden_size, qk_norm=qk_norm)
        self.mlp = LlamaMLP(config)  # type: ignore[no-untyped-call]
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, attention_input: Tensor, residual: Tensor, positions: Tensor, keys_values: KeysValues, mask: Tensor | None
    ) -> Tensor:
        """The residual stream after the block [num_texts, num_queries, hidden]."""
        hidden = residual + self.self_attn(attention_input, positions, keys_values, mask)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


def concat_keys(*parts: KeysValues) -> KeysValues:
    return torch.cat([keys for keys, _ in parts], dim=2), torch.cat([values for _, values in parts], dim=2)


def start_silent(block: nn.Module, source: nn.Module) -> None:
    """Starts a block where `source` looks and what it computes, but adds nothing to the residual stream yet."""
    copy_matching(block, source)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                parameter.zero_()
