"""What tests of families have in common: one small shape, rotations, windows, experts, multipliers."""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 96
LENGTHS = ((5, 5), (70, 4), (17, 4))  # prompt and output of each request; 70 spans two prefill tiles
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
STRETCHED = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
# Beyond the first length queries are scaled by how far into a text they stand.
LLAMA4_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 32,
}
SLIDING_LAYER = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"head_dim": 16, "moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 2}
ROUTED = {
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 6.0,
    "pad_token_id": 0,
}
GRANITE_OF_WINDOWS = {
    **GRANITE,
    "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention"],
    "layer_rope_theta": [0, 10000.0],
}
GEMMA = {"head_dim": 24, "pad_token_id": 0}
