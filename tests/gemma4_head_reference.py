"""Gemma 4's layers as DeepSpec's heads have them, rewritten from its code: one sequence, no cache, any dtype.

Also random targets, and what DeepSpec publishes heads of them in. Nothing here knows our engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.transformers_reference import random_model, save_tokenizer

SIZE, NUM_LAYERS, NUM_LIKELY = 32, 4, 6
# What a target's text_config and a head's config.json have in common.
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size": SIZE,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "attention_k_eq_v": True,
    "sliding_window": 12,
    "rms_norm_eps": 1e-3,  # so that what is not scaled before a norm shows
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "max_position_embeddings": 128,
    "final_logit_softcapping": 6.0,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
    "pad_token_id": 0,
    "eos_token_id": 2,
}


# What DeepSpec makes of it for a head of one layer.
OF_HEADS: dict[str, Any] = {
    **GEMMA4,
    "model_type": "gemma4_unified_text",
    "target_model_type": "gemma4_unified",
    "target_text_model_type": "gemma4_unified_text",
    "num_target_layers": NUM_LAYERS,
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "tie_word_embeddings": False,
}
TARGET_LAYER_IDS = [0, 1, 2]
EAGLE3: dict[str, Any] = {
    **OF_HEADS,
    "architectures": ["Gemma4Eagle3Model"],
    "target_layer_ids": TARGET_LAYER_IDS,
    "ttt_length": 7,
    "step_loss_decay": 0.8,
    "draft_num_hidden_layers": 1,
}


# A block's, of DeepSpec's DFlash; DSpark's has a sequential head.
BLOCK, MASK, RANK = 6, 5, 7
DFLASH: dict[str, Any] = {
    **OF_HEADS,
    "architectures": ["Gemma4DSparkModel"],
    "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2,
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "target_layer_ids": TARGET_LAYER_IDS,
    "num_anchors": 512,
    "enable_confidence_head": False,
    "markov_rank": 0,
}
DSPARK: dict[str, Any] = {
    **DFLASH,
    "attention_k_eq_v": False,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
}


def save_target(directory: Path, vocab_size: int) -> Any:
    """Saved beside a tokenizer: every other layer sees all, and has the keys for values. It says few tokens, mostly."""
    from transformers import AutoConfig

    kinds = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
    model = random_model(
        AutoConfig.for_model(**GEMMA4, vocab_size=vocab_size, num_hidden_layers=NUM_LAYERS, layer_types=kinds)
    )
    model.get_input_embeddings().weight.data[NUM_LIKELY:] *= 0.3
    model.save_pretrained(directory)
    save_tokenizer(directory, vocab_size)
    return model


def eagle3_shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    layer = {"layers.0.hidden_norm.weight": (SIZE,), **layer_shapes(EAGLE3, 0, width=2 * SIZE)}
    return _shapes_beside_layers(vocab_size) | layer


def block_shapes(config: Mapping[str, Any], vocab_size: int) -> dict[str, tuple[int, ...]]:
    shapes = _shapes_beside_layers(vocab_size) | {"hidden_norm.weight": (SIZE,)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= layer_shapes(config, layer)
    if rank := config["markov_rank"]:
        shapes |= {f"markov_head.markov_{name}.weight": (vocab_size, rank) for name in ("w1", "w2")}
        shapes |= {"confidence_head.proj.weight": (1, SIZE + rank), "confidence_head.proj.bias": (1,)}
    return shapes


def _shapes_beside_layers(vocab_size: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (SIZE, len(TARGET_LAYER_IDS) * SIZE), "norm.weight": (SIZE,)}
    return shapes | {f"{name}.weight": (vocab_size, SIZE) for name in ("embed_tokens", "lm_head")}


def kv_heads(config: Mapping[str, Any]) -> int:
    return int(config["num_global_key_value_heads" if config["attention_k_eq_v"] else "num_key_value_heads"])


def layer_shapes(config: Mapping[str, Any], layer: int, *, width: int = SIZE) -> dict[str, tuple[int, ...]]:
    """width: of what the attention reads."""
    inner, dim = config["intermediate_size"], config["global_head_dim"]
    rows = {"q": config["num_attention_heads"] * dim, "k": kv_heads(config) * dim}
    if not config["attention_k_eq_v"]:
        rows["v"] = rows["k"]
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj.weight": (rows[name], width) for name in rows}
    shapes |= {f"{name}_layernorm.weight": (SIZE,) for name in norms}
    shapes |= {f"self_attn.{name}_norm.weight": (dim,) for name in "qk"}
    shapes |= {"self_attn.o_proj.weight": (SIZE, rows["q"]), "layer_scalar": (1,)}
    shapes |= {f"mlp.{name}_proj.weight": (inner, SIZE) for name in ("gate", "up")}
    shapes |= {"mlp.down_proj.weight": (SIZE, inner)}
    return {f"layers.{layer}.{name}": shape for name, shape in shapes.items()}


class Gemma4Layers:
    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        self.config, self.weights = config, weights
        self.dim = config["global_head_dim"]

    def embed(self, token_ids: list[int]) -> Tensor:
        return self.weights["embed_tokens.weight"][torch.tensor(token_ids)] * SIZE**0.5

    def logits(self, normed: Tensor) -> Tensor:
        logits, cap = normed @ self.weights["lm_head.weight"].T, self.config["final_logit_softcapping"]
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def norm(self, x: Tensor, name: str | None) -> Tensor:
        """name None: without weights."""
        normed = x * (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return normed if name is None else normed * self.weights[f"{name}.weight"]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [len, heads, dim]; a quarter of the frequencies of a whole head turn."""
        rope, half = self.config["rope_parameters"]["full_attention"], self.dim // 2
        frequencies = torch.zeros(half)
        turning = int(rope["partial_rotary_factor"] * self.dim // 2)
        frequencies[:turning] = rope["rope_theta"] ** (-torch.arange(0, 2 * turning, 2) / self.dim)
        angles = positions[:, None] * frequencies
        cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def heads(self, x: Tensor, layer: int, name: str) -> Tensor:
        """[len, heads, dim]"""
        return F.linear(x, self.weights[f"layers.{layer}.self_attn.{name}_proj.weight"]).view(len(x), -1, self.dim)

    def keys_and_values(self, x: Tensor, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        keys = self.heads(x, layer, "k")
        values = keys if self.config["attention_k_eq_v"] else self.heads(x, layer, "v")
        keys = self.rotate(self.norm(keys, f"layers.{layer}.self_attn.k_norm"), positions)
        return keys, self.norm(values, None)

    def __call__(
        self,
        layer: int,
        residual: Tensor,
        x: Tensor,  # what the attention reads
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        is_seen: Tensor,  # [rows, keys]
    ) -> Tensor:
        """The residual stream behind the layer."""
        name = f"layers.{layer}"
        queries = self.rotate(self.norm(self.heads(x, layer, "q"), f"{name}.self_attn.q_norm"), positions)
        groups = queries.shape[1] // keys.shape[1]
        scores = torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(groups, 1))
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
        found = torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(groups, 1)).flatten(1)
        attended = F.linear(found, self.weights[f"{name}.self_attn.o_proj.weight"])
        residual = residual + self.norm(attended, f"{name}.post_attention_layernorm")
        normed = self.norm(residual, f"{name}.pre_feedforward_layernorm")
        gate, up, down = (self.weights[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        inner = F.gelu(normed @ gate.T, approximate="tanh") * (normed @ up.T)
        residual = residual + self.norm(inner @ down.T, f"{name}.post_feedforward_layernorm")
        return residual * self.weights[f"{name}.layer_scalar"]

    def block_logits(self, states: Tensor, token_ids: list[int]) -> Tensor:
        """[len(token_ids), vocab] of a block's rows, each behind the tokens of the block up to it.

        states: the target's, of the positions before the block, [len, taps * SIZE]. token_ids: the pending token, and
        what is guessed behind it but for the last guess: rows see masks in its place, a sequential head sees it.
        """
        context = self.norm(states @ self.weights["fc.weight"].T, "hidden_norm")
        hidden = self.embed([token_ids[0]] + [MASK] * (len(token_ids) - 1))
        positions = torch.arange(len(context) + len(hidden))
        places, is_seen = positions[len(context) :], torch.ones(len(hidden), len(positions), dtype=torch.bool)
        for layer in range(self.config["num_hidden_layers"]):
            normed = self.norm(hidden, f"layers.{layer}.input_layernorm")
            keys, values = self.keys_and_values(torch.cat((context, normed)), layer, positions)
            hidden = self(layer, hidden, normed, places, keys, values, is_seen)
        logits = self.logits(self.norm(hidden, "norm"))
        if not self.config["markov_rank"]:
            return logits
        first, second = (self.weights[f"markov_head.markov_{name}.weight"] for name in ("w1", "w2"))
        return logits + first[torch.tensor(token_ids)] @ second.T
