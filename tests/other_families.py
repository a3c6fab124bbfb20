"""Families whose layers do more than Llama's, as changes to conftest's small target."""

from __future__ import annotations

from typing import Any

# Norms, activation, caps and scales of its own.
GEMMA: dict[str, Any] = {
    "model_type": "gemma2",
    "sliding_window": 12,
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 8.0,
    "pad_token_id": 0,
}
MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 6.0,
}
# One of a token for all heads.
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
# A state follows one path of tokens, forwards: drafts are chains.
WITH_STATES = (
    *("qwen3_5_text", "granitemoehybrid", "bailing_hybrid", "kimi_linear", "lfm2_moe", "nemotron_h", "olmo_hybrid"),
)
# Drafters attend in all layers, and have fewer of them than a config says of each.
WITH_LLAMAS = (*WITH_STATES, "gemma4_text", "laguna", "llama4_text")
FAMILIES: dict[str, dict[str, Any]] = {
    # A state that no token makes forget much, below a latent whose heads are gated, and experts in groups.
    "bailing_hybrid": {
        "model_type": "bailing_hybrid",
        "layer_group_size": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 16,
        **LATENT,
        "moe_intermediate_size": 48,
        "num_experts": 6,
        "n_group": 3,
        "topk_group": 2,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "pad_token_id": 0,
    },
    # One latent of a token for all heads, and experts in groups.
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "head_dim": 8,
        "q_lora_rank": 24,
        **LATENT,
        "moe_intermediate_size": 48,
        "n_routed_experts": 6,
        "n_group": 3,
        "topk_group": 2,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
    },
    "gemma2": GEMMA,
    # The first layer sees a window and turns by other angles than the second.
    "gemma3_text": {
        **{key: value for key, value in GEMMA.items() if "softcapping" not in key},
        "model_type": "gemma3_text",
        "sliding_window_pattern": 2,
    },
    # Heads of two sizes, inputs of each layer, and two layers that see keys and values of the two below.
    "gemma4_text": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "sliding_window": 12,
        "global_head_dim": 32,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 64,
        "final_logit_softcapping": 8.0,
        "pad_token_id": 0,
    },
    # Layers of one thing each, products that nothing gates, none turned, and experts that read a latent.
    "nemotron_h": {
        "model_type": "nemotron_h",
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
        "moe_latent_size": 48,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 2.5,
    },
    # Heads normed by no weights, a text in chunks, queries scaled by place where none turn, and an expert that reads
    # its rows scaled.
    "llama4_text": {
        "model_type": "llama4_text",
        "intermediate_size_mlp": 96,
        "num_local_experts": 6,
        "no_rope_layers": [1, 0],
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 24,
        "floor_scale": 16,
        "attn_scale": 0.5,
        "pad_token_id": 0,
    },
    "glm4": {"model_type": "glm4", "pad_token_id": 0},  # half of a head turns, neighbours together
    # Embeddings, what layers add, and logits are multiplied.
    "granite": {"model_type": "granite", **MULTIPLIERS, "pad_token_id": 0},
    # A state space below a layer that attends and turns nothing, and experts beside an MLP.
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        **MULTIPLIERS,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
        "pad_token_id": 0,
    },
    # Heads are normed once they are turned, by stretched rotations, and experts lie beside an MLP.
    "hunyuan_v1_moe": {
        "model_type": "hunyuan_v1_moe",
        "num_experts": 6,
        "moe_topk": 2,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
        "pad_token_id": 0,
    },
    # A state each channel of which forgets by itself, below a latent that nothing turns, and experts.
    "kimi_linear": {
        "model_type": "kimi_linear",
        "linear_attn_config": {"num_heads": 8, "head_dim": 16, "short_conv_kernel_size": 4}
        | {"kda_layers": [1], "full_attn_layers": [2]},
        "num_key_value_heads": 4,
        **LATENT,
        "moe_intermediate_size": 48,
        "num_experts": 6,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "pad_token_id": 0,
    },
    # A short convolution between two gates below a layer that attends, and experts chosen by corrected scores.
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "pad_token_id": 0,
    },
    # Queries are scaled by how far into a text they stand.
    "ministral3": {
        "model_type": "ministral3",
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 64.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.5,
        },
    },
    # Norms in front of a state, which may be reversed, and behind what attends and turns nothing.
    "olmo_hybrid": {
        "model_type": "olmo_hybrid",
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
        "pad_token_id": 0,
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2, "pad_token_id": 0},  # the second does not turn
    # Behind a dense layer experts that are chosen by corrected scores, and one that all rows go to.
    "glm4_moe": {
        "model_type": "glm4_moe",
        "moe_intermediate_size": 48,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    # A layer of linear attention below one of gated attention.
    "qwen3_5_text": {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
    },
    # Norms behind attention and MLP alone, and over all heads together; layers see a window.
    "olmo3": {"model_type": "olmo3", "sliding_window": 12, "pad_token_id": 0},
    # Embeddings are normed, and heads that do not turn, too; what layers add is normed by an eps of its own, attention
    # gated, and logits are multiplied in front of their cap.
    "muse_glimmer_text": {
        "model_type": "muse_glimmer_text",
        "sliding_window": 12,
        "qk_scale_factor": 1.5,
        "post_norm_eps": 1e-3,
        "output_multiplier": 0.25,
        "final_logit_softcapping": 8.0,
        "pad_token_id": 0,
    },
    # Heads have a gate each, of which the second layer, which sees a window, has twice as many; in the first half of a
    # head turns. Behind a dense layer experts that are chosen by corrected scores, and one that all rows go to.
    "laguna": {
        "model_type": "laguna",
        "layer_types": ["full_attention", "sliding_attention"],
        "num_attention_heads_per_layer": [4, 8],
        "sliding_window": 12,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 48,
        "moe_routed_scaling_factor": 2.5,
    },
    # Sinks, biases everywhere, and a mixture of experts whose gates are cut off; the first layer sees a window.
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 12,
        "swiglu_limit": 7.0,
        "pad_token_id": 0,
    },
}


def keys_of(family: str) -> dict[str, Any]:
    """Arguments of conftest's engines."""
    return {"architecture": FAMILIES[family]} | ({"of_drafters": {}} if family in WITH_LLAMAS else {})
