"""Families of which every layer attends, and an MLP follows; Gemma 4 may have experts beside it."""

from __future__ import annotations

from typing import Any

from tests.family_options import (
    DEFAULT_ROPE,
    GEMMA,
    GRANITE,
    GRANITE_OF_WINDOWS,
    LLAMA3,
    LLAMA4_YARN,
    PARTIAL,
    PROPORTIONAL,
    SLIDING_LAYER,
    STRETCHED,
    VOCAB_SIZE,
    YARN,
)

GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "final_logit_softcapping": 3.0,
    "pad_token_id": 0,
}
# name -> (family, options)
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, attention bias": ("llama", {"attention_bias": True}),
    "llama, mlp bias": ("llama", {"mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 24}),
    "llama, as many kv heads": ("llama", {"num_key_value_heads": 4}),
    "llama, ignores layer_types": ("llama", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}),
    "llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama, dynamic rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn rope": ("llama", {"rope_parameters": YARN}),
    "llama, proportional rope": ("llama", {"rope_parameters": PROPORTIONAL}),
    "arcee, biased": ("arcee", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "cwm": ("cwm", {**SLIDING_LAYER, "head_dim": 16, "rope_parameters": LLAMA3}),
    "ernie4_5": ("ernie4_5", {"head_dim": 24}),
    "ernie4_5, biased, tied": ("ernie4_5", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": True}),
    "exaone4": ("exaone4", {"head_dim": 16, **SLIDING_LAYER}),
    "exaone4, without windows, tied": (
        "exaone4",
        {"head_dim": 24, "sliding_window": None, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True},
    ),
    "gemma": ("gemma", {**GEMMA, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {**GEMMA, **SLIDING_LAYER, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2, untied, uncapped": (
        "gemma2",
        {
            **GEMMA,
            **SLIDING_LAYER,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3_text": ("gemma3_text", {**GEMMA, **SLIDING_LAYER}),
    "gemma3_text, linear rope": (
        "gemma3_text",
        {
            **GEMMA,
            **SLIDING_LAYER,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma4_text": ("gemma4_text", {**GEMMA4, "hidden_size_per_layer_input": 0}),
    "gemma4_text, inputs of layers": ("gemma4_text", GEMMA4),
    "gemma4_text, inputs of layers, keys of earlier layers": (
        "gemma4_text",
        {**GEMMA4, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "gemma4_text, keys that are values, other heads": (
        "gemma4_text",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": None,
        }
        | {"tie_word_embeddings": False, "use_bidirectional_attention": "vision"},
    ),
    "gemma4_text, experts beside an MLP": (
        "gemma4_text",
        {**GEMMA4, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 32}
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True},
    ),
    "gemma4_unified_text": (
        "gemma4_unified_text",
        {key: value for key, value in GEMMA4.items() if not key.endswith("per_layer_input")},
    ),
    "glm": ("glm", {"head_dim": 16, "pad_token_id": 0}),
    "glm4": ("glm4", {"head_dim": 24, "pad_token_id": 0}),
    "glm4, tied": ("glm4", {"head_dim": 16, "pad_token_id": 0, "tie_word_embeddings": True, "attention_bias": False}),
    "glm4, proportional rope": ("glm4", {"head_dim": 16, "pad_token_id": 0, "rope_parameters": PROPORTIONAL}),
    "gemma3_text, dynamic rope": (
        "gemma3_text",
        {
            **GEMMA,
            **SLIDING_LAYER,
            "rope_parameters": {
                "full_attention": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": DEFAULT_ROPE,
            },
        },
    ),
    "granite": ("granite", GRANITE),
    "granite, tied, biased": (
        "granite",
        {**GRANITE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 0.05},
    ),
    "granite, multiplied by nothing": ("granite", {"attention_multiplier": 0.25, "pad_token_id": 0}),
    "granite_swa": ("granite_swa", GRANITE_OF_WINDOWS),
    "granite_swa, all turn, biased": (
        "granite_swa",
        {**GRANITE_OF_WINDOWS, "layer_rope_theta": None, "attention_bias": True, "mlp_bias": True},
    ),
    "granite_swa, turns by two bases": (
        "granite_swa",
        {**GRANITE_OF_WINDOWS, "layer_rope_theta": [5e5, 1e2], "rope_parameters": {**LLAMA3, "rope_theta": 1e4}},
    ),
    "iquestcoder": ("iquestcoder", {"head_dim": 24, "attention_bias": True, "mlp_bias": True}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 24, "tie_word_embeddings": True}),
    "hunyuan_v1_dense, stretched rope, biased": (
        "hunyuan_v1_dense",
        {"head_dim": 16, "attention_bias": True, "rope_parameters": STRETCHED},
    ),
    "internlm3": ("internlm3", {"head_dim": 16}),
    "internlm3, biased, dynamic rope": (
        "internlm3",
        {"head_dim": 24, "attention_bias": True, "mlp_bias": True}
        | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 6.0}},
    ),
    "ministral": ("ministral", {"head_dim": 16, **SLIDING_LAYER}),
    "ministral3, texts longer than it was trained with first": (
        "ministral3",
        {
            "head_dim": 16,
            "rope_parameters": LLAMA4_YARN,
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, sliding": ("mistral", {"sliding_window": 8, "head_dim": 24}),
    "olmo2": ("olmo2", {}),
    "olmo2, biased, tied, as many kv heads": (
        "olmo2",
        {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "olmo3": (
        "olmo3",
        {**SLIDING_LAYER, "rope_parameters": {"full_attention": YARN, "sliding_attention": DEFAULT_ROPE}},
    ),
    "phi3": ("phi3", {"pad_token_id": 0}),
    "phi3, sliding, tied": ("phi3", {"pad_token_id": 0, "sliding_window": 8, "tie_word_embeddings": True}),
    "phi3, partial rope": ("phi3", {"pad_token_id": 0, "rope_parameters": PARTIAL}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, sliding layer": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen2, yarn rope": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3, tied, biased": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3, sliding layer": (
        "qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "seed_oss": ("seed_oss", {"head_dim": 24}),
    "seed_oss, other biases": (
        "seed_oss",
        {"head_dim": 16, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "smollm3": ("smollm3", {"pad_token_id": 0, "no_rope_layers": [1, 0]}),
    "smollm3, biased, sliding": (
        "smollm3",
        {
            "pad_token_id": 0,
            "no_rope_layers": [0, 1],
            "attention_bias": True,
            "mlp_bias": True,
            "use_sliding_window": True,
            "sliding_window": 8,
            "tie_word_embeddings": False,
        },
    ),
}
