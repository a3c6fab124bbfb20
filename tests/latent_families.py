"""Families that keep one latent of a token for all heads."""

from __future__ import annotations

from typing import Any

from tests.family_options import LLAMA4_YARN, ROUTED, YARN

LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
}
LATENT_ROUTED = {**LATENT, **{key: value for key, value in ROUTED.items() if key != "head_dim"}}
LATENT_YARN = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.9}
SARVAM_YARN = {key: value for key, value in LATENT_YARN.items() if key != "rope_type"} | {"type": "deepseek_yarn"}
# name -> (family, options)
LATENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {**LATENT_ROUTED, "norm_topk_prob": False}),
    "deepseek_v2, queries at once, yarn rope, biased": (
        "deepseek_v2",
        {**LATENT_ROUTED, "q_lora_rank": None, "norm_topk_prob": False, "attention_bias": True}
        | {"rope_parameters": LATENT_YARN, "mlp_bias": False, "routed_scaling_factor": 1.0},
    ),
    "deepseek_v3": ("deepseek_v3", {**LATENT_ROUTED, "n_group": 3, "topk_group": 2}),
    "deepseek_v3, halves turn, yarn rope, biased, not normalized": (
        "deepseek_v3",
        {**LATENT_ROUTED, "n_group": 1, "topk_group": 1, "rope_interleave": False, "rope_parameters": LATENT_YARN}
        | {"attention_bias": True, "norm_topk_prob": False, "first_k_dense_replace": 0},
    ),
    "deepseek_v3, queries at once, values wider than keys": (
        "deepseek_v3",
        {**LATENT_ROUTED, "n_group": 1, "topk_group": 1, "q_lora_rank": None, "v_head_dim": 40, "kv_lora_rank": 16},
    ),
    "sarvam_mla": (
        "sarvam_mla",
        {**LATENT_ROUTED, "n_group": 1, "topk_group": 1, "rope_scaling": SARVAM_YARN, "head_dim": 40},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {**LATENT_ROUTED, "mlp_layer_types": ["dense", "sparse"]}),
    "glm4_moe_lite, tied, experts below a dense layer": (
        "glm4_moe_lite",
        {**LATENT_ROUTED, "mlp_layer_types": ["sparse", "dense"], "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    ),
    "mistral4, texts longer than it was trained with first": (
        "mistral4",
        {**LATENT_ROUTED, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 0}
        | {"rope_parameters": {**LLAMA4_YARN, "partial_rotary_factor": 8 / 24}},
    ),
    "mistral4, halves turn, a dense layer": (
        "mistral4",
        {**LATENT_ROUTED, "rope_interleave": False, "n_shared_experts": 1, "norm_topk_prob": False}
        | {
            "rope_parameters": {**LLAMA4_YARN, "original_max_position_embeddings": 128, "partial_rotary_factor": 8 / 24}
        },
    ),
    "youtu": ("youtu", {**LATENT, "tie_word_embeddings": True}),
}
