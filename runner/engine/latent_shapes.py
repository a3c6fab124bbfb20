"""Shapes of latent attention, and which tensors of a checkpoint it reads otherwise than they lie there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.engine.errors import UserError
from runner.engine.family import Family
from runner.engine.fused_tensors import Fused
from runner.engine.rope import HeadLayout

QUERY, QUERY_DOWN, QUERY_UP = "self_attn.q_proj", "self_attn.q_a_proj", "self_attn.q_b_proj"
DOWN = "self_attn.kv_a_proj_with_mqa"
GATE = "self_attn.g_proj"
KEY_UP, VALUE_UP = "self_attn.k_b_proj", "self_attn.v_b_proj"  # of checkpoints' kv_b_proj


@dataclass(frozen=True, kw_only=True)
class LatentShapes:
    """By the names of configs."""

    num_heads: int
    q_lora_rank: int | None  # None: queries come from the hidden states at once
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def query_dim(self) -> int:
        """Of a head, as it is projected."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def row_width(self) -> int:
        """Of what the cache holds of a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def fused_tensors(self) -> Mapping[str, Fused]:
        """Of a head first the rows that make its keys, then those that make its values.

        The former meet queries, by the other side.
        """
        parts = {KEY_UP: self.num_heads * self.qk_nope_head_dim, VALUE_UP: self.num_heads * self.v_head_dim}
        return {"self_attn.kv_b_proj": Fused(parts=parts, num_groups=self.num_heads, transposed=(KEY_UP,))}

    @property
    def beside_heads(self) -> tuple[str, ...]:
        """As Architecture.beside_heads."""
        return (QUERY, QUERY_DOWN, QUERY_UP, DOWN)

    def head_orders(self, layout: HeadLayout) -> Mapping[str, list[int]]:
        """As Architecture.head_orders."""
        if layout.order is None:
            return {}

        def behind(width: int) -> list[int]:
            return [*range(width), *(width + place for place in layout.order or ())]

        of_queries, of_latents = behind(self.qk_nope_head_dim), behind(self.kv_lora_rank)
        return {
            **{f"{name}.{kind}": of_queries for name in (QUERY, QUERY_UP) for kind in ("weight", "bias")},
            **{f"{DOWN}.{kind}": of_latents for kind in ("weight", "bias")},
        }


def read_latent_shapes(config: Any, family: Family) -> LatentShapes:
    """From a transformers config; raises UserError for sizes that cannot be."""
    of = f"of a {config.model_type} checkpoint must be"
    for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank"):
        size = getattr(config, key)
        if size is None and key == "q_lora_rank":
            continue
        if size is None or size < 1:
            raise UserError(f"{key} {of} >= 1, got {size}; mend its config")
    if family.has_rope:
        _require_size_of_turned(config, family, of)
    return LatentShapes(
        num_heads=config.num_attention_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
    )


def _require_size_of_turned(config: Any, family: Family, of: str) -> None:
    """Raises UserError unless transformers' rotations are made for it."""
    turned, parameters = config.qk_rope_head_dim, config.rope_parameters
    part = float(parameters.get("partial_rotary_factor") or 1.0)
    part = 1.0 if family.ignores_rotary_factor else part
    if int(config.head_dim * part) != turned:
        of_part = "" if part == 1.0 else f" by partial_rotary_factor ({part:g})"
        raise UserError(f"head_dim {of} its qk_rope_head_dim ({turned}){of_part}, got {config.head_dim}; leave it out")


def latent_scale(config: Any, family: Family) -> float:
    """Of the logits. A rope that extends texts says how much steeper they become (YaRN, arXiv 2309.00071)."""
    scale = math.sqrt(1.0 / (config.qk_nope_head_dim + config.qk_rope_head_dim))
    parameters = config.rope_parameters if family.has_rope else {}
    steepness, factor = float(parameters.get("mscale_all_dim") or 0.0), float(parameters.get("factor") or 1.0)
    if parameters.get("rope_type", "default") != "default" and factor > 1.0:
        scale *= (0.1 * steepness * math.log(factor) + 1.0) ** 2
    return scale
