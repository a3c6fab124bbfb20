"""Families whose layers attend to keys and values of heads, and choose experts."""

from __future__ import annotations

from typing import Any

from tests.family_options import (
    EXPERTS,
    GRANITE,
    GRANITE_OF_WINDOWS,
    LLAMA3,
    PROPORTIONAL,
    ROUTED,
    SLIDING_LAYER,
    STRETCHED,
    YARN,
)

GPT_OSS = {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 8, "pad_token_id": 0}
ERNIE = {
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "moe_num_experts": 6,
    "moe_k": 3,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "pad_token_id": 0,
}
AFMOE = {
    **EXPERTS,
    **SLIDING_LAYER,
    "num_dense_layers": 1,
    "num_shared_experts": 2,
    "num_experts_per_tok": 3,
    "route_scale": 2.5,
    "mup_enabled": True,
}
MELLUM = {
    **EXPERTS,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn",
            "rope_theta": 5e5,
            "factor": 16.0,
            "original_max_position_embeddings": 32,
            "attention_factor": 1.3,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
GRANITE_EXPERTS = {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3}
LLAMA4 = {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "intermediate_size": 48,
    "intermediate_size_mlp": 96,
    "num_local_experts": 6,
    "no_rope_layers": [1, 0, 1],
    "attention_chunk_size": 24,
    "floor_scale": 16,
    "attn_scale": 0.5,
    "pad_token_id": 0,
    "rope_parameters": LLAMA3,
}
LAGUNA = {
    **EXPERTS,
    "layer_types": ["full_attention", "sliding_attention"],
    "num_attention_heads_per_layer": [4, 8],
    "sliding_window": 8,
    "shared_expert_intermediate_size": 32,
    "num_experts_per_tok": 3,
    "moe_routed_scaling_factor": 2.5,
    "rope_parameters": {
        "full_attention": {**YARN, "rope_theta": 5e5, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
}
MINIMAX = {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "rotary_dim": 8}
# name -> (family, options)
OF_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4_text": ("llama4_text", LLAMA4),
    "llama4_text, experts in some layers, heads not normed, tied": (
        "llama4_text",
        {**LLAMA4, "interleave_moe_layer_step": 2, "use_qk_norm": False, "tie_word_embeddings": True}
        | {"attn_temperature_tuning": False, "attention_bias": True, "no_rope_layers": [1, 1, 0]},
    ),
    "afmoe": ("afmoe", AFMOE),
    "afmoe, experts everywhere, none shared, tied, not scaled": (
        "afmoe",
        {**AFMOE, "num_dense_layers": 0, "num_shared_experts": 1, "tie_word_embeddings": True, "mup_enabled": False},
    ),
    "dots1": ("dots1", {**ROUTED, **SLIDING_LAYER}),
    "dots1, biased, not normalized, experts everywhere": (
        "dots1",
        {**ROUTED, "attention_bias": True, "norm_topk_prob": False, "n_shared_experts": 1, "first_k_dense_replace": 0},
    ),
    "ernie4_5_moe": ("ernie4_5_moe", ERNIE),
    "ernie4_5_moe, untied, in some layers, none shared": (
        "ernie4_5_moe",
        {**ERNIE, "tie_word_embeddings": False, "moe_num_shared_experts": 0, "moe_layer_end_index": 0}
        | {"moe_layer_start_index": 0},
    ),
    "exaone_moe": (
        "exaone_moe",
        {**EXPERTS, **SLIDING_LAYER, "num_shared_experts": 2, "first_k_dense_replace": 1, "num_experts_per_tok": 3},
    ),
    "exaone_moe, experts below a dense layer, not normalized": (
        "exaone_moe",
        {**EXPERTS, **SLIDING_LAYER, "mlp_layer_types": ["sparse", "dense"], "norm_topk_prob": False},
    ),
    "flex_olmo": ("flex_olmo", {"num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": 0}),
    "flint": (
        "flint",
        {**EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0], "sliding_window": 9, "head_dim": 16}
        | {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "flint, not normalized, biased": (
        "flint",
        {**EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": [], "sliding_window": 9, "head_dim": 16}
        | {"layer_types": ["sliding_attention"] * 2, "norm_topk_prob": False, "attention_bias": True},
    ),
    "sarvam_moe": ("sarvam_moe", {**ROUTED, "head_dim": 16}),
    "sarvam_moe, biased, parts of heads turn": (
        "sarvam_moe",
        {**ROUTED, "head_dim": 16, "attention_bias": True, "partial_rotary_factor": 0.5, "use_qk_norm": False},
    ),
    "glm4_moe": ("glm4_moe", {**ROUTED, "attention_bias": True, "use_qk_norm": True}),
    "glm4_moe, experts in groups": (
        "glm4_moe",
        {**ROUTED, "n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    ),
    "glm4_moe, proportional rope": ("glm4_moe", {**ROUTED, "rope_parameters": PROPORTIONAL}),
    "glm4_moe, tied, no norms of heads": (
        "glm4_moe",
        {**ROUTED, "n_shared_experts": 1, "tie_word_embeddings": True, "num_experts_per_tok": 1, "head_dim": 24},
    ),
    "gpt_oss": ("gpt_oss", {**GPT_OSS, "rope_parameters": {**YARN, "truncate": False}}),
    "gpt_oss, tied, no biases": (
        "gpt_oss",
        {
            **GPT_OSS,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "num_experts_per_tok": 1,
            "sliding_window": 3,
        },
    ),
    "granitemoe": ("granitemoe", GRANITE_EXPERTS),
    "granitemoe, tied": ("granitemoe", {**GRANITE_EXPERTS, "tie_word_embeddings": True, "num_experts_per_tok": 1}),
    "granitemoeshared": ("granitemoeshared", {**GRANITE_EXPERTS, "shared_intermediate_size": 48}),
    "granitemoe_swa": ("granitemoe_swa", {**GRANITE_EXPERTS, **GRANITE_OF_WINDOWS, "shared_intermediate_size": 48}),
    "granitemoe_swa, no shared expert": ("granitemoe_swa", {**GRANITE_EXPERTS, **GRANITE_OF_WINDOWS}),
    "mellum": ("mellum", MELLUM),
    "mellum, a dense layer, biased": (
        "mellum",
        {**MELLUM, "mlp_layer_types": ["dense", "sparse"], "attention_bias": True, "norm_topk_prob": False},
    ),
    "hy_v3": (
        "hy_v3",
        {**EXPERTS, "num_shared_experts": 2, "num_experts_per_tok": 3, "router_scaling_factor": 1.7},
    ),
    "hy_v3, experts in all layers, biased, tied": (
        "hy_v3",
        {**EXPERTS, "mlp_layer_types": ["sparse"] * 2, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe",
        {"head_dim": 16, "num_experts": 6, "moe_topk": [3, 3], "rope_parameters": STRETCHED},
    ),
    "laguna": ("laguna", LAGUNA),
    "laguna, gates each element, biased, tied": (
        "laguna",
        {**LAGUNA, "gating": "per-element", "attention_bias": True, "tie_word_embeddings": True},
    ),
    "laguna, layers of one kind have other heads, no experts": (
        "laguna",
        {**LAGUNA, "num_hidden_layers": 4, "num_attention_heads_per_layer": [4, 8, 6, 4]}
        | {"layer_types": ["full_attention", "sliding_attention"] * 2, "mlp_layer_types": ["dense"] * 4},
    ),
    "laguna, experts below a dense layer, sees all": (
        "laguna",
        {**EXPERTS, "shared_expert_intermediate_size": 48, "mlp_layer_types": ["sparse", "dense"]}
        | {"num_attention_heads_per_layer": [4, 8], "gating": "per-head"},
    ),
    "minimax_m2": ("minimax_m2", MINIMAX),
    "minimax_m2, all of a head turns, tied": (
        "minimax_m2",
        {**MINIMAX, "rotary_dim": 16, "tie_word_embeddings": True, "num_experts_per_tok": 1},
    ),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "olmoe, normalized": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen2_moe, every other layer": (
        "qwen2_moe",
        {**EXPERTS, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 2, "norm_topk_prob": True},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral, sliding": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 1, "sliding_window": 8}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "num_experts_per_tok": 3, "tie_word_embeddings": True}),
    "qwen3_moe, normalized": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True, "attention_bias": True}),
    "qwen3_moe, a dense layer": ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [1]}),
    "qwen3_moe, every other layer": ("qwen3_moe", {**EXPERTS, "decoder_sparse_step": 2}),
    "qwen3_moe, sliding": ("qwen3_moe", {**EXPERTS, "use_sliding_window": True, "sliding_window": 8}),
    "solar_open": ("solar_open", {k: v for k, v in ROUTED.items() if k != "first_k_dense_replace"}),
    "solar_open, biased": (
        "solar_open",
        {k: v for k, v in ROUTED.items() if k != "first_k_dense_replace"} | {"attention_bias": True},
    ),
}
