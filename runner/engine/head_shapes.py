"""Heads of layers' attention: how many, how large, and whose keys and values they see."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

from runner.engine.errors import UserError
from runner.engine.family import Family, is_told, named, stated
from runner.engine.layer_kinds import FULL
from runner.engine.rope import HeadLayout, rope_parameters


@dataclass(frozen=True, kw_only=True)
class HeadShapes:
    """Of one layer."""

    num_heads: int
    num_kv_heads: int
    layout: HeadLayout
    # Whose keys and values the heads see: an earlier one of its kind, of a draft head one of the target. None: its own.
    kv_layer: int | None = None
    are_values_keys: bool = False  # one matrix makes both, which its norm and its rotation make keys of

    @property
    def head_dim(self) -> int:
        return self.layout.head_dim

    @property
    def qkv_rows(self) -> dict[str, int]:
        """Rows of the matrices that give queries, keys and values, by name."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}


def read_head_shapes(config: Any, family: Family) -> tuple[HeadShapes, ...]:
    """Of each layer, from a transformers config.

    Raises:
        UserError: numbers of heads, or of layers that see others' keys and values, which cannot be.
    """
    of_layers = [_of_layer(config, family, layer) for layer in range(config.num_hidden_layers)]
    for own in of_layers:
        _require_heads(own, config)
    return tuple(
        HeadShapes(
            num_heads=own.num_attention_heads,
            num_kv_heads=own.num_key_value_heads,
            layout=_layout(own, family),
            kv_layer=source,
            are_values_keys=family.heads_by_layer and config.attention_k_eq_v and kind == FULL,
        )
        for own, source, kind in zip(of_layers, _kv_layers(config, family), _kinds(config, family), strict=True)
    )


def _of_layer(config: Any, family: Family, layer: int) -> Any:
    """The config as the layer has it."""
    if family.heads_by_layer:
        return config.per_layer_config[layer]
    counts = stated(config, family, "num_attention_heads_per_layer")
    if counts is None:
        return config
    own = copy(config)
    own.num_attention_heads = counts[layer]
    own.rope_parameters = rope_parameters(config, config.layer_types[layer])
    return own


def _kinds(config: Any, family: Family) -> list[str]:
    """Of the layers, where their heads depend on them."""
    return config.layer_types if family.heads_by_layer else [FULL] * config.num_hidden_layers


def _require_heads(own: Any, config: Any) -> None:
    """own: the config as one of the layers has it."""
    of = f"of a {config.model_type} checkpoint{named(config)}"
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        size = getattr(own, key, None)
        if size is not None and size < 1:  # without a head_dim it follows from the others
            raise UserError(f"{key} {of} must be >= 1, got {size}; mend its config")
    if own.num_attention_heads % own.num_key_value_heads:
        raise UserError(
            f"num_attention_heads {of} must be divisible by num_key_value_heads ({own.num_key_value_heads}), "
            f"got {own.num_attention_heads}; mend its config"
        )


def _kv_layers(config: Any, family: Family) -> list[int | None]:
    """The last layers see what the last one of their kind before them has stored, where a config says so (Gemma 4)."""
    num_layers, kinds = config.num_hidden_layers, _kinds(config, family)
    num_sharing = config.num_kv_shared_layers if family.heads_by_layer else 0
    last_of_kind = {kind: layer for layer, kind in enumerate(kinds[: num_layers - num_sharing])}
    if num_sharing and not set(kinds) <= set(last_of_kind):
        raise UserError(
            f"num_kv_shared_layers of a {config.model_type} checkpoint{named(config)} must leave a layer of each of "
            f"layer_types ({', '.join(sorted(set(kinds)))}) that has keys and values of its own, got {num_sharing} of "
            f"{num_layers} layers; mend its config"
        )
    has_own = num_layers - num_sharing
    return [None if layer < has_own else last_of_kind[kind] for layer, kind in enumerate(kinds)]


def _layout(config: Any, family: Family) -> HeadLayout:
    if family.is_latent:  # of a head what turns
        head_dim = config.qk_rope_head_dim
    else:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Proportional frequencies are of whole heads, and zero where nothing turns.
    is_partial = family.is_rope_partial and config.rope_parameters.get("rope_type") != "proportional"
    factor = config.rope_parameters.get("partial_rotary_factor") if is_partial else 1.0
    turned = stated(config, family, "rotary_dim") or head_dim  # transformers 5.17 does not make a factor of it
    return HeadLayout(
        head_dim=head_dim,
        num_rotated=int(turned if factor is None else head_dim * factor),
        is_interleaved=is_told(config, family.is_rope_interleaved),
    )
