"""Families with layers that carry a state along: linear attention, state spaces, short convolutions."""

from __future__ import annotations

from typing import Any

from tests.family_options import EXPERTS, GRANITE, YARN

DELTA_NET = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
SHORT_CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention"], "pad_token_id": 0}
GRANITE_HYBRID = {
    **GRANITE,
    "shared_intermediate_size": 48,
    "num_local_experts": 0,
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
}
KIMI: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 18,  # which means nothing
    "linear_attn_config": {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4}
    | {"kda_layers": [1, 3], "full_attn_layers": [2]},
    "num_hidden_layers": 3,
    "mla_use_nope": True,
    "pad_token_id": 0,
    "num_experts": 6,
    "num_experts_per_token": 3,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "use_grouped_topk": True,
    "moe_router_activation_func": "sigmoid",
}
LING = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "rope_interleave": True,
    "num_hidden_layers": 3,
    "layer_group_size": 2,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "kda_lower_bound": -4.0,
    "pad_token_id": 0,
}
NEMOTRON = {
    "head_dim": 24,
    "layers_block_type": ["mamba", "moe", "mamba", "attention", "mlp"],
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
    "time_step_min": 1e-30,  # which transformers alone cuts prompts' steps off at, and not those of single tokens
}
OLMO: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "linear_key_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": None},  # nothing turns
    "pad_token_id": 0,
}
# name -> (family, options)
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "bailing_hybrid": ("bailing_hybrid", LING),
    "bailing_hybrid, as many rows of keys as whole queries have": (
        "bailing_hybrid",
        {**LING, "num_attention_heads": 6, "num_key_value_heads": 6},
    ),
    "bailing_hybrid, queries of a latent, not bounded, another convolution": (
        "bailing_hybrid",
        {**LING, "q_lora_rank": 20, "kda_safe_gate": False, "short_conv_kernel_size": 3, "n_group": 1, "topk_group": 1},
    ),
    "kimi_linear": ("kimi_linear", KIMI),
    "kimi_linear, queries of a latent, experts in groups, fewer heads": (
        "kimi_linear",
        {**KIMI, "q_lora_rank": 20, "num_expert_group": 2, "topk_group": 1, "moe_renormalize": False}
        # Of rotations that there are none of.
        | {"rope_scaling": {**YARN, "mscale_all_dim": 1.0}}
        | {"linear_attn_config": {**KIMI["linear_attn_config"], "num_heads": 2, "short_conv_kernel_size": 3}},
    ),
    "lfm2": ("lfm2", {**SHORT_CONV, "block_multiple_of": 24}),
    "lfm2, biased, two taps, untied, an MLP as large as stated": (
        "lfm2",
        {**SHORT_CONV, "conv_bias": True, "conv_L_cache": 2, "tie_word_embeddings": False}
        | {"block_auto_adjust_ff_dim": False},
    ),
    "lfm2, all attends, an MLP of its own size": (
        "lfm2",
        {"layer_types": ["full_attention"] * 2, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 32}
        | {"pad_token_id": 0},
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {**SHORT_CONV, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "num_dense_layers": 1}
        | {"routed_scaling_factor": 2.5},
    ),
    "lfm3": (
        "lfm3",
        {"head_dim": 16, "sliding_window": 8, "layer_types": ["conv", "sliding_attention", "full_attention"]}
        | {"num_hidden_layers": 3, "pad_token_id": 0},
    ),
    "lfm3, biased, untied, other rotations": (
        "lfm3",
        {"head_dim": 32, "layer_types": ["full_attention", "conv"], "conv_bias": True, "tie_word_embeddings": False}
        | {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}, "pad_token_id": 0},
    ),
    "lfm2_moe, experts everywhere, not normalized": (
        "lfm2_moe",
        {**SHORT_CONV, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 0}
        | {"norm_topk_prob": False, "layer_types": ["full_attention", "conv"], "conv_L_cache": 4},
    ),
    "granitemoehybrid": ("granitemoehybrid", GRANITE_HYBRID),
    "granitemoehybrid, experts, heads in groups, biased": (
        "granitemoehybrid",
        {**GRANITE_HYBRID, "num_local_experts": 6, "num_experts_per_tok": 3, "mamba_n_groups": 4}
        | {"mamba_proj_bias": True, "mamba_d_conv": 3, "tie_word_embeddings": True, "rms_norm_eps": 1e-2},
    ),
    "granitemoehybrid, all attends, heads turn, biased": (
        "granitemoehybrid",
        {**GRANITE_HYBRID, "layer_types": ["attention"] * 2, "position_embedding_type": "rope", "attention_bias": True},
    ),
    "granitemoehybrid, no convolution bias": ("granitemoehybrid", {**GRANITE_HYBRID, "mamba_conv_bias": False}),
    "nemotron_h": ("nemotron_h", NEMOTRON),
    "nemotron_h, experts over a latent": (
        "nemotron_h",
        {**NEMOTRON, "moe_latent_size": 40, "num_key_value_heads": 2, "n_group": 2, "topk_group": 1},
    ),
    "nemotron_h, no experts, biased, tied": (
        "nemotron_h",
        {**NEMOTRON, "layers_block_type": ["mlp", "attention", "mamba"], "mlp_bias": True, "use_bias": True}
        | {"use_conv_bias": False, "tie_word_embeddings": True, "n_groups": 1, "conv_kernel": 3},
    ),
    "olmo_hybrid": ("olmo_hybrid", OLMO),
    "olmo_hybrid, turned, heads share keys, written once, tied": (
        "olmo_hybrid",
        {**OLMO, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "linear_allow_neg_eigval": False}
        | {
            "linear_num_key_heads": 2,
            "tie_word_embeddings": True,
            "num_key_value_heads": 2,
            "linear_value_head_dim": 12,
        },
    ),
    "qwen3_5_text": ("qwen3_5_text", DELTA_NET),
    "qwen3_5_text, tied, as many key heads, another convolution": (
        "qwen3_5_text",
        {**DELTA_NET, "linear_num_key_heads": 4, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True},
    ),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_next": ("qwen3_next", {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_next, one dense layer, experts not normalized": (
        "qwen3_next",
        {**DELTA_NET, **EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": False, "linear_num_value_heads": 2},
    ),
}
