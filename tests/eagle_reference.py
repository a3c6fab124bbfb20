"""EAGLE's and EAGLE-3's heads rewritten from SafeAILab's and speculators' code: one sequence, no cache, any dtype.

Also random checkpoints in the published layouts. Nothing here knows our engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tests.gemma4_head_reference import Gemma4Layers

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class ReferenceHead:
    """config: of the layers (Llama keys). options: flags of EAGLE-3; None: an EAGLE head."""

    config: Mapping[str, Any]
    weights: Weights  # layers.<i>.*, whatever the checkpoint calls them
    options: Mapping[str, Any] | None
    target_embedding: torch.Tensor  # [vocab, H_target]
    target_lm_head: torch.Tensor  # [vocab, H_target]

    def to(self, dtype: torch.dtype) -> ReferenceHead:
        weights = {n: t.to(dtype) if t.is_floating_point() else t for n, t in self.weights.items()}
        target_embedding, target_lm_head = self.target_embedding.to(dtype), self.target_lm_head.to(dtype)
        return replace(self, weights=weights, target_embedding=target_embedding, target_lm_head=target_lm_head)

    def draft_logits(self, token_ids: list[int], states: torch.Tensor, drafts: list[int]) -> list[torch.Tensor]:
        """Logits [vocab] after the last of token_ids, then after each of drafts, a whole recompute for each.

        states: the target's at the positions of all of token_ids but the last, [len(token_ids) - 1, taps * H_target].
        """
        fed, known = token_ids[1:], self.project(states)
        if "mask_hidden" in self.weights:  # P-EAGLE: all in one pass, whatever the drafts are
            assert self.options is not None
            masks = self.project(self.weights["mask_hidden"].flatten().expand(len(drafts), -1))
            output = self.forward(fed + [self.options["mask_token_id"]] * len(drafts), torch.cat((known, masks)))
            return [self.logits(row) for row in output[-1 - len(drafts) :]]
        logits = []
        for draft in (*drafts, None):
            output = self.forward(fed, known)
            logits.append(self.logits(output[-1]))
            if draft is not None:
                fed, known = [*fed, draft], torch.cat((known, output[-1:]))
        return logits

    def project(self, states: torch.Tensor) -> torch.Tensor:
        if self.options is None:
            return states
        if "input_norm.weight" in self.weights:
            states = self.norm(states, "input_norm")
        if "fc_norm.0.weight" in self.weights:
            states = torch.cat(
                [self.norm(tap, f"fc_norm.{i}") for i, tap in enumerate(states.chunk(3, dim=-1))], dim=-1
            )
        return states @ self.weights["fc.weight"].T

    def forward(self, token_ids: list[int], states: torch.Tensor) -> torch.Tensor:
        """[len, H]: what is fed back at each position."""
        embedding = self.weights.get("embed_tokens.weight", self.target_embedding)
        embeds = embedding[torch.tensor(token_ids)]
        if self.options is None:
            x = F.linear(torch.cat((embeds, states), -1), self.weights["fc.weight"], self.weights.get("fc.bias"))
        else:
            x = states
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"layers.{layer}."
            residual = x
            if self.options is not None and layer == 0:
                normed = self.norm(x, prefix + "hidden_norm")
                residual = normed if self.options.get("norm_before_residual") else x
                x = torch.cat((self.norm(embeds, prefix + "input_layernorm"), normed), dim=-1)
            elif layer > 0:
                x = self.norm(x, prefix + "input_layernorm")
            x = residual + self.attend(x, prefix + "self_attn.")
            normed = self.norm(x, prefix + "post_attention_layernorm")
            gate, up = self.linear(normed, prefix + "mlp.gate_proj"), self.linear(normed, prefix + "mlp.up_proj")
            x = x + self.linear(F.silu(gate) * up, prefix + "mlp.down_proj")
        return self.norm(x, "norm") if self.options and self.options.get("norm_output") else x

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """[H] -> [vocab of the target]; -inf where the head knows no token."""
        if self.options is not None and not self.options.get("norm_output"):
            output = self.norm(output, "norm")
        logits = output @ self.weights.get("lm_head.weight", self.target_lm_head).T
        if "d2t" not in self.weights:
            return logits
        scattered = torch.full((len(self.target_lm_head),), -torch.inf, dtype=logits.dtype)
        for draft_id, offset in enumerate(self.weights["d2t"].tolist()):
            scattered[draft_id + offset] = logits[draft_id]
        return scattered

    def attend(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        length, dim = len(x), self.config["head_dim"]
        q, k, v = (self.linear(x, f"{prefix}{name}_proj").view(length, -1, dim) for name in "qkv")
        if f"{prefix}q_norm.weight" in self.weights:
            q, k = self.norm(q, prefix + "q_norm"), self.norm(k, prefix + "k_norm")
        angles = torch.arange(length)[:, None] * self.config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)

        def rotate(value: torch.Tensor) -> torch.Tensor:
            first, second = value.chunk(2, dim=-1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

        groups = q.shape[1] // k.shape[1]
        q, k, v = rotate(q), rotate(k).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= self.config.get("window", length))
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        return self.linear(out.flatten(1), prefix + "o_proj")

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return (
            x
            * (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
            * self.weights[f"{name}.weight"]
        )


@dataclass(frozen=True, kw_only=True)
class Gemma4ReferenceHead(ReferenceHead):
    """DeepSpec's EAGLE-3 head for Gemma 4; config: of Gemma 4's layers."""

    def forward(self, token_ids: list[int], states: torch.Tensor) -> torch.Tensor:
        layer, positions = Gemma4Layers(self.config, self.weights), torch.arange(len(token_ids))
        embeds = layer.norm(layer.embed(token_ids), "layers.0.input_layernorm")
        x = torch.cat((embeds, layer.norm(states, "layers.0.hidden_norm")), dim=-1)
        keys, values = layer.keys_and_values(x, 0, positions)
        return layer(0, states, x, positions, keys, values, positions[:, None] >= positions)

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        head = Gemma4Layers(self.config, self.weights)
        return head.logits(head.norm(output, "norm"))


def random_weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """float32, of a scale at which attention is sharp and logits are of order one to ten."""
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator)
        # A wide input adds up no more than a narrow one: EAGLE's states are fed back without a norm, and what grows
        # from draft to draft makes of two roundings a matter of luck.
        scale = 0.2 * min(1.0, (32 / shape[-1]) ** 0.5)
        weights[name] = 1 + 0.2 * value if len(shape) == 1 and name.endswith("weight") else scale * value
    return weights


def layer_shapes(
    config: Mapping[str, Any], *, prefix: str, is_first_of: str | None = None
) -> dict[str, tuple[int, ...]]:
    """Of one decoder layer; is_first_of: "eagle" (no input norm), "eagle3" (twice the input, a norm of the state)."""
    size, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    width = 2 * size if is_first_of == "eagle3" else size
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q, width),
        "self_attn.k_proj.weight": (kv, width),
        "self_attn.v_proj.weight": (kv, width),
        "self_attn.o_proj.weight": (size, q),
        "mlp.gate_proj.weight": (inner, size),
        "mlp.up_proj.weight": (inner, size),
        "mlp.down_proj.weight": (size, inner),
        "post_attention_layernorm.weight": (size,),
    }
    if is_first_of != "eagle":
        shapes["input_layernorm.weight"] = (size,)
    if is_first_of == "eagle3":
        shapes["hidden_norm.weight"] = (size,)
    if config.get("model_type") == "qwen3":
        shapes |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    if config.get("attention_bias") or config.get("qkv_bias"):
        shapes |= {f"self_attn.{name}_proj.bias": (rows,) for name, rows in (("q", q), ("k", kv), ("v", kv))}
    if config.get("attention_bias"):
        shapes["self_attn.o_proj.bias"] = (size,)
    return {prefix + name: shape for name, shape in shapes.items()}


def vocabulary_map(vocab_size: int, draft_vocab_size: int) -> dict[str, torch.Tensor]:
    """d2t and t2d of a draft vocabulary that is spread over the target's."""
    ids = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(6))[:draft_vocab_size].sort().values
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(draft_vocab_size), "t2d": t2d}


def save_head(directory: Path, config: Mapping[str, Any], tensors: Weights, *, is_pickled: bool = False) -> Path:
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if is_pickled:
        torch.save(dict(tensors), directory / "pytorch_model.bin")
    else:
        save_file(dict(tensors), directory / "model.safetensors")
    return directory
