"""The decoder shapes of a head, in the two forms that are needed: transformers' config object and published keys."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, PreTrainedConfig


def block_config(target: PreTrainedConfig, *, intermediate_size: int | None = None) -> LlamaConfig:
    """Blocks as wide as the target's own, whatever the target's family calls them; None: its MLP's width too."""
    num_heads: int = target.num_attention_heads
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size or mlp_width(target),
        num_hidden_layers=1,
        num_attention_heads=num_heads,
        num_key_value_heads=getattr(target, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // num_heads,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=getattr(target, "rms_norm_eps", 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def mlp_width(target: PreTrainedConfig) -> int:
    """Of the target's MLP; four times its own width where the family has no word for it."""
    return getattr(target, "intermediate_size", None) or 4 * int(target.hidden_size)


def published_keys(config: LlamaConfig, target: PreTrainedConfig) -> dict[str, Any]:
    """The keys that every published draft decoder has."""
    return {
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "vocab_size": config.vocab_size,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
