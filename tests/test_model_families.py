"""Our decoder computes what transformers computes, for every family and option it claims to support."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cpu.panels import pack, unpack
from kernels.reference.linear import linear
from runner.engine.architecture import read_architecture
from runner.engine.checkpoint import ModelSource
from runner.engine.decoder import Decoder
from runner.engine.errors import UserError
from runner.engine.experts import Experts
from runner.engine.grouped_query_attention import GroupedQueryAttention
from runner.engine.linear import ColumnParallelLinear, RowParallelLinear
from runner.engine.loader import load_model
from runner.engine.shard import Shard
from runner.engine.tile_shape import ROW_INVARIANT_TILES
from runner.ranks.ranks import Ranks
from tests.rank_threads import in_ranks
from tests.transformers_reference import (
    CPU,
    assert_as_accurate,
    assert_taps_are_hidden_states,
    engine_logits,
    float64_logits,
    load,
    long_context_logits,
    random_model,
    random_sequences,
    reference_logits,
    save,
    saved_model,
)

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
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
STRETCHED = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}
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
GPT_OSS = {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 8, "pad_token_id": 0}
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
ERNIE = {
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "moe_num_experts": 6,
    "moe_k": 3,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "pad_token_id": 0,
}
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
SLIDING_LAYER = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
AFMOE = {
    **EXPERTS,
    **SLIDING_LAYER,
    "num_dense_layers": 1,
    "num_shared_experts": 2,
    "num_experts_per_tok": 3,
    "route_scale": 2.5,
    "mup_enabled": True,
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
GRANITE_HYBRID = {
    **GRANITE,
    "shared_intermediate_size": 48,
    "num_local_experts": 0,
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
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
LATENT_YARN = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.9}
GEMMA = {"head_dim": 24, "pad_token_id": 0}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
# name -> (family, options)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, attention bias": ("llama", {"attention_bias": True}),
    "llama, mlp bias": ("llama", {"mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 24}),
    "llama, as many kv heads": ("llama", {"num_key_value_heads": 4}),
    "llama, ignores layer_types": ("llama", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}),
    "llama4_text": ("llama4_text", LLAMA4),
    "llama4_text, experts in some layers, heads not normed, tied": (
        "llama4_text",
        {**LLAMA4, "interleave_moe_layer_step": 2, "use_qk_norm": False, "tie_word_embeddings": True}
        | {"attn_temperature_tuning": False, "attention_bias": True, "no_rope_layers": [1, 1, 0]},
    ),
    "llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama, dynamic rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn rope": ("llama", {"rope_parameters": YARN}),
    "llama, proportional rope": ("llama", {"rope_parameters": PROPORTIONAL}),
    "afmoe": ("afmoe", AFMOE),
    "afmoe, experts everywhere, none shared, tied, not scaled": (
        "afmoe",
        {**AFMOE, "num_dense_layers": 0, "num_shared_experts": 1, "tie_word_embeddings": True, "mup_enabled": False},
    ),
    "arcee, biased": ("arcee", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "cwm": ("cwm", {**SLIDING_LAYER, "head_dim": 16, "rope_parameters": LLAMA3}),
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
    "dots1": ("dots1", {**ROUTED, **SLIDING_LAYER}),
    "dots1, biased, not normalized, experts everywhere": (
        "dots1",
        {**ROUTED, "attention_bias": True, "norm_topk_prob": False, "n_shared_experts": 1, "first_k_dense_replace": 0},
    ),
    "ernie4_5": ("ernie4_5", {"head_dim": 24}),
    "ernie4_5, biased, tied": ("ernie4_5", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": True}),
    "ernie4_5_moe": ("ernie4_5_moe", ERNIE),
    "ernie4_5_moe, untied, in some layers, none shared": (
        "ernie4_5_moe",
        {**ERNIE, "tie_word_embeddings": False, "moe_num_shared_experts": 0, "moe_layer_end_index": 0}
        | {"moe_layer_start_index": 0},
    ),
    "exaone4": ("exaone4", {"head_dim": 16, **SLIDING_LAYER}),
    "exaone4, without windows, tied": (
        "exaone4",
        {"head_dim": 24, "sliding_window": None, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True},
    ),
    "exaone_moe": (
        "exaone_moe",
        {**EXPERTS, **SLIDING_LAYER, "num_shared_experts": 2, "first_k_dense_replace": 1, "num_experts_per_tok": 3},
    ),
    "exaone_moe, experts below a dense layer, not normalized": (
        "exaone_moe",
        {**EXPERTS, **SLIDING_LAYER, "mlp_layer_types": ["sparse", "dense"], "norm_topk_prob": False},
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
    "flex_olmo": ("flex_olmo", {"num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": 0}),
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
    "glm4_moe_lite": ("glm4_moe_lite", {**LATENT_ROUTED, "mlp_layer_types": ["dense", "sparse"]}),
    "glm4_moe_lite, tied, experts below a dense layer": (
        "glm4_moe_lite",
        {**LATENT_ROUTED, "mlp_layer_types": ["sparse", "dense"], "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
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
    "granite": ("granite", GRANITE),
    "granite, tied, biased": (
        "granite",
        {**GRANITE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 0.05},
    ),
    "granite, multiplied by nothing": ("granite", {"attention_multiplier": 0.25, "pad_token_id": 0}),
    "granitemoe": ("granitemoe", GRANITE_EXPERTS),
    "granitemoe, tied": ("granitemoe", {**GRANITE_EXPERTS, "tie_word_embeddings": True, "num_experts_per_tok": 1}),
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
    "granitemoeshared": ("granitemoeshared", {**GRANITE_EXPERTS, "shared_intermediate_size": 48}),
    "granite_swa": ("granite_swa", GRANITE_OF_WINDOWS),
    "granite_swa, all turn, biased": (
        "granite_swa",
        {**GRANITE_OF_WINDOWS, "layer_rope_theta": None, "attention_bias": True, "mlp_bias": True},
    ),
    "granite_swa, turns by two bases": (
        "granite_swa",
        {**GRANITE_OF_WINDOWS, "layer_rope_theta": [5e5, 1e2], "rope_parameters": {**LLAMA3, "rope_theta": 1e4}},
    ),
    "granitemoe_swa": ("granitemoe_swa", {**GRANITE_EXPERTS, **GRANITE_OF_WINDOWS, "shared_intermediate_size": 48}),
    "granitemoe_swa, no shared expert": ("granitemoe_swa", {**GRANITE_EXPERTS, **GRANITE_OF_WINDOWS}),
    "iquestcoder": ("iquestcoder", {"head_dim": 24, "attention_bias": True, "mlp_bias": True}),
    "mellum": ("mellum", MELLUM),
    "mellum, a dense layer, biased": (
        "mellum",
        {**MELLUM, "mlp_layer_types": ["dense", "sparse"], "attention_bias": True, "norm_topk_prob": False},
    ),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 24, "tie_word_embeddings": True}),
    "hunyuan_v1_dense, stretched rope, biased": (
        "hunyuan_v1_dense",
        {"head_dim": 16, "attention_bias": True, "rope_parameters": STRETCHED},
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
    "internlm3": ("internlm3", {"head_dim": 16}),
    "internlm3, biased, dynamic rope": (
        "internlm3",
        {"head_dim": 24, "attention_bias": True, "mlp_bias": True}
        | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 6.0}},
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
    "olmo2": ("olmo2", {}),
    "olmo2, biased, tied, as many kv heads": (
        "olmo2",
        {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "olmo3": (
        "olmo3",
        {**SLIDING_LAYER, "rope_parameters": {"full_attention": YARN, "sliding_attention": DEFAULT_ROPE}},
    ),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "olmoe, normalized": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}),
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
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen2_moe, every other layer": (
        "qwen2_moe",
        {**EXPERTS, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 2, "norm_topk_prob": True},
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
    "youtu": ("youtu", {**LATENT, "tie_word_embeddings": True}),
}


BFLOAT16 = (
    "afmoe",
    "deepseek_v3",
    "ernie4_5, biased, tied",
    "exaone4",
    "gemma2",
    "gemma3_text",
    "gemma4_text, inputs of layers",
    "gemma4_text, keys that are values, other heads",
    "glm4",
    "granite",
    "granitemoehybrid",
    "hunyuan_v1_dense, stretched rope, biased",
    "laguna",
    "lfm2",
    "llama, attention bias",
    "minimax_m2",
    "mistral, sliding",
    "nemotron_h",
    "nemotron_h, experts over a latent",
    "olmo3",
    "phi3",
    "qwen2, tied",
    "qwen3",
    "smollm3",
)


def make_config(variant: str) -> Any:
    from transformers import AutoConfig

    family, options = VARIANTS[variant]
    return AutoConfig.for_model(family, **{**SHAPE, **options})


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_as_accurate_as_those_of_transformers(variant: str, tmp_path: Path) -> None:
    model = random_model(make_config(variant))
    sequences = random_sequences(VOCAB_SIZE, LENGTHS)
    loaded = load(save(model, tmp_path))
    assert isinstance(loaded.model, Decoder)
    ours = engine_logits(loaded, sequences)
    assert_as_accurate(ours, reference_logits(model, sequences), float64_logits(model, sequences))


@pytest.mark.parametrize("variant", ["llama", "qwen2, sliding layer", "qwen3", "qwen3_moe", "glm4_moe", "qwen3_5_text"])
def test_logits_are_accurate_without_fixed_tiles(variant: str, tmp_path: Path) -> None:
    model = random_model(make_config(variant))
    sequences = random_sequences(VOCAB_SIZE, LENGTHS)
    ours = engine_logits(load(save(model, tmp_path)), sequences, batch_invariant=False)
    assert_as_accurate(ours, reference_logits(model, sequences), float64_logits(model, sequences))


def test_layers_of_one_kind_turn_as_many_heads_as_each_has(tmp_path: Path) -> None:
    """Kernels are told how many; plain torch, where gradients are asked for, looks them up in a table of whole rows."""
    model = load(
        save(random_model(make_config("laguna, layers of one kind have other heads, no experts")), tmp_path)
    ).model
    assert isinstance(model, Decoder)
    for layer in model.layers:
        attention = layer.attention
        assert isinstance(attention, GroupedQueryAttention)
        rope = model._ropes[attention.turns](torch.zeros(1, dtype=torch.int64), model.embed_tokens)
        assert len(rope.table.partner) == attention.qkv_proj.weight.shape[0]


@pytest.mark.parametrize("variant", BFLOAT16)
def test_bfloat16_logits_are_as_accurate_as_those_of_transformers(variant: str, tmp_path: Path) -> None:
    source = save(random_model(make_config(variant)), tmp_path)
    model = saved_model(tmp_path, torch.bfloat16)
    sequences = random_sequences(VOCAB_SIZE, LENGTHS)
    ours = engine_logits(load(source, dtype=torch.bfloat16), sequences)
    assert_as_accurate(ours, reference_logits(model, sequences), float64_logits(model, sequences))


def test_longrope_takes_its_short_factors_when_max_model_len_does_not_pass_the_switch(tmp_path: Path) -> None:
    model = random_model(longrope_config())
    sequences = random_sequences(VOCAB_SIZE, ((5, 5), (24, 4), (17, 4)))  # transformers uses its short set up to 32
    ours = engine_logits(load(save(model, tmp_path), max_model_len=32), sequences)
    assert_as_accurate(ours, reference_logits(model, sequences), float64_logits(model, sequences))


def test_longrope_takes_its_long_factors_for_short_sequences_too_when_max_model_len_passes_the_switch(
    tmp_path: Path,
) -> None:
    """transformers switches by the longest sequence at hand, so a request's text would change with its neighbours."""
    model = random_model(longrope_config())
    sequences = random_sequences(VOCAB_SIZE, LENGTHS)
    ours = engine_logits(load(save(model, tmp_path), max_model_len=128), sequences)
    assert_as_accurate(ours, *long_context_logits(model, sequences))


def longrope_config() -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model("llama", **SHAPE, rope_parameters=LONGROPE)


@pytest.mark.parametrize(
    "variant",
    [
        *("llama, tied", "mistral, sliding", "olmo3", "qwen2", "qwen3", "gemma2", "gemma3_text", "glm4", "gpt_oss"),
        *("afmoe", "granite", "laguna"),
        "qwen3_5_text",
    ],
)
def test_taps_are_the_hidden_states_of_transformers(variant: str, tmp_path: Path) -> None:
    model = random_model(make_config(variant))
    assert_taps_are_hidden_states(load(save(model, tmp_path)), model, ROW_INVARIANT_TILES["prefill"])


def test_a_sharded_checkpoint_loads_as_the_whole_one_does(tmp_path: Path) -> None:
    model = random_model(make_config("qwen3"))
    whole = load(save(model, tmp_path / "whole")).model
    sharded = load(save(model, tmp_path / "sharded", max_shard_size="40KB")).model
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    for (name, ours), (_, theirs) in zip(sharded.named_parameters(), whole.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_families_that_are_not_ours_are_left_to_transformers() -> None:
    from transformers import AutoConfig

    assert read_architecture(AutoConfig.for_model("cohere")) is None
    assert read_architecture(AutoConfig.for_model("olmoe", clip_qkv=8.0)) is None
    only_states = ["linear_attention"] * 2
    assert read_architecture(AutoConfig.for_model("qwen3_5_text", **{**SHAPE, "layer_types": only_states})) is None
    assert read_architecture(AutoConfig.for_model("llama", hidden_act="gelu")) is None
    assert read_architecture(AutoConfig.for_model("gemma2", hidden_activation="gelu")) is None  # not Gemma's own gelu
    assert read_architecture(AutoConfig.for_model("gpt_oss", swiglu_limit=5.0)) is None
    for other in ({"layer_types": ["mamba", "mamba"]}, {"time_step_limit": [0.001, 0.1]}):
        assert (
            read_architecture(AutoConfig.for_model("granitemoehybrid", **{**SHAPE, **GRANITE_HYBRID, **other})) is None
        )
    assert read_architecture(AutoConfig.for_model("gpt_oss", swiglu_alpha=1.0)) is None
    assert read_architecture(AutoConfig.for_model("deepseek_v2", topk_method="group_limited_greedy")) is None
    assert read_architecture(AutoConfig.for_model("ernie4_5_moe", use_bias=True)) is None
    assert read_architecture(AutoConfig.for_model("laguna", moe_router_logit_softcapping=30.0)) is None
    for other in ({"use_sandwich_norm": False}, {"use_attention_gate": False}, {"attention_bias": True}):
        assert read_architecture(AutoConfig.for_model("lfm3", **other)) is None
    assert read_architecture(AutoConfig.for_model("qwen3", architectures=["Qwen3ForTokenClassification"])) is None


@pytest.mark.parametrize(
    ("family", "stray"),
    [
        ("llama", {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 24, "no_rope_layers": [0, 1]}),
        ("llama", {"attn_logit_softcapping": 3.0, "partial_rotary_factor": 0.5, "use_bias": True}),
        ("mistral", {"sliding_window": 8, "use_sliding_window": False}),
        ("gemma3_text", {**GEMMA, "attn_logit_softcapping": 3.0}),
    ],
)
def test_keys_of_other_families_mean_nothing(family: str, stray: dict[str, Any], tmp_path: Path) -> None:
    """Configs of heads and merged models repeat what some other model's said."""
    from transformers import AutoConfig

    model = random_model(AutoConfig.for_model(family, **{**SHAPE, **stray}))
    sequences = random_sequences(VOCAB_SIZE, LENGTHS)
    ours = engine_logits(load(save(model, tmp_path)), sequences)
    assert_as_accurate(ours, reference_logits(model, sequences), float64_logits(model, sequences))


def test_the_gelu_of_gemmas_first_releases_is_the_tanh_one() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("gemma", **{**SHAPE, "head_dim": 16})
    config.hidden_act = "gelu"  # as releases of transformers before 5.24 read it
    found = read_architecture(config)
    assert found is not None and found.activation == "gelu_tanh"


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize(
    ("family", "stored", "held"),
    [
        ("ernie4_5_moe", torch.bfloat16, torch.float32),
        ("glm4_moe", torch.float32, torch.float32),
        ("glm4_moe", torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_a_router_keeps_its_digits_beside_16_bits(
    family: str,
    stored: torch.dtype,
    held: torch.dtype,
    is_packed: bool,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """ERNIE's is published in float32; GLM's is taken as it is stored. Either way logits are not rounded."""
    if not is_packed:
        request.getfixturevalue("unpacked_weights")
    model = random_model(make_config(family)).to(stored)
    loaded = load(save(model, tmp_path), dtype=torch.bfloat16)
    assert isinstance(loaded.model, Decoder)
    loaded.model.convert(pack if is_packed else lambda weight: weight)
    mlp, gate = loaded.model.layers[1].mlp, model.model.layers[1].mlp.gate
    assert isinstance(mlp, Experts) and mlp.corrections is not None
    assert mlp.router.dtype == held and torch.equal(unpack(mlp.router), gate.weight.to(held))
    statics = gate.moe_statics if family == "ernie4_5_moe" else gate
    assert torch.equal(mlp.corrections, statics.e_score_correction_bias.float().flatten())
    assert mlp.gate_up_projs[0].dtype == torch.bfloat16

    rows = torch.randn(16, SHAPE["hidden_size"], generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = rows.double() @ gate.weight.double().t()
    assert (mlp.router_logits(rows, 1) - exact).abs().max() < 1e-6 * exact.abs().max()


@pytest.mark.parametrize(
    ("family", "options", "rule"),
    [
        (
            "qwen3_moe",
            {"num_experts_per_tok": 7},
            r"num_experts_per_tok of a qwen3_moe .* must lie in \[1, 6\], .*; mend",
        ),
        ("dots1", {"num_experts_per_tok": 2}, "n_routed_experts of a dots1 checkpoint must be given, got null; mend"),
        (
            "ernie4_5_moe",
            {"moe_layer_interval": 0},
            "moe_layer_interval of a ernie4_5_moe checkpoint must be >= 1, got 0",
        ),
        (
            "qwen3_5_text",
            {**DELTA_NET, "linear_num_value_heads": 3},
            r"divisible by linear_num_key_heads \(2\), got 3; mend its",
        ),
        (
            "qwen3_5_text",
            {**DELTA_NET, "linear_key_head_dim": 0},
            "linear_key_head_dim of a qwen3_5_text checkpoint must be >= 1",
        ),
        ("ernie4_5_moe", {"moe_layer_start_index": None}, "moe_layer_start_index of a ernie4_5_moe checkpoint must be"),
        (
            "glm4_moe",
            {**ROUTED, "n_group": 4, "topk_group": 1},
            "n_group of a glm4_moe checkpoint must divide 6, the experts, .* got 4; mend",
        ),
        (
            "glm4_moe",
            {**ROUTED, "n_group": 3, "topk_group": 1},
            r"topk_group of a glm4_moe checkpoint must lie in \[1, 3\], .* the 3 experts .*, got 1; mend",
        ),
        (
            "gemma4_text",
            {**GEMMA4, "vocab_size_per_layer_input": 95},
            "vocab_size_per_layer_input of a gemma4_text checkpoint must be >= 96, its vocab_size, got 95; mend",
        ),
        (
            "gemma4_text",
            {**GEMMA4, "num_kv_shared_layers": 1},
            r"num_kv_shared_layers of a gemma4_text .* \(full_attention, sliding_attention\) .* got 1 of 2 layers;",
        ),
        (
            "gemma4_text",
            {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 3},
            r"num_attention_heads of a gemma4_text checkpoint must be divisible by num_key_value_heads \(3\), got 4",
        ),
        (
            "laguna",
            {**LAGUNA, "num_attention_heads_per_layer": [4, 5]},
            r"num_attention_heads of a laguna checkpoint must be divisible by num_key_value_heads \(2\), got 5; mend",
        ),
        (
            "laguna",
            {**LAGUNA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "rope_parameters of a laguna checkpoint must have those of each of its layer_types, got none of full_att",
        ),
        (
            "granite_swa",
            {**GRANITE_OF_WINDOWS, "layer_rope_theta": [1e4]},
            r"layer_rope_theta of a granite_swa checkpoint must be a number in every layer, .* 2, got .*; mend",
        ),
        ("youtu", {**LATENT, "kv_lora_rank": 0}, "kv_lora_rank of a youtu checkpoint must be >= 1, got 0; mend"),
        ("youtu", {**LATENT, "q_lora_rank": -1}, "q_lora_rank of a youtu checkpoint must be >= 1, got -1; mend"),
        (
            "hunyuan_v1_moe",
            {"num_experts": 6, "moe_topk": [2, 3]},
            r"moe_topk of a hunyuan_v1_moe checkpoint must be one for all layers, got \[2, 3\]; choose",
        ),
        (
            "granite",
            {**GRANITE, "residual_multiplier": 0.0},
            "residual_multiplier of a granite checkpoint must be > 0, got 0.0; mend its config",
        ),
        (
            "muse_glimmer_text",
            {"output_multiplier": 0.0},
            "output_multiplier of a muse_glimmer_text checkpoint must be > 0, got 0.0; mend its config",
        ),
        (
            "lfm2_moe",
            {"layer_types": None},
            "layer_types of a lfm2_moe checkpoint must list its layers, got None; mend",
        ),
        ("youtu", {**LATENT, "head_dim": 16}, r"head_dim of a youtu .* its qk_rope_head_dim \(8\), got 16; leave"),
    ],
    ids=repr,
)
def test_numbers_that_cannot_be_are_refused(family: str, options: dict[str, Any], rule: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **{**SHAPE, **(EXPERTS if family == "qwen3_moe" else {}), **options})
    config.architectures = ["SomeForCausalLM"]
    with pytest.raises(UserError, match=rule):
        read_architecture(config)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("exaone4", {**SLIDING_LAYER, "head_dim": 16}),
        ("gemma4_text", GEMMA4),
        (
            "lfm3",
            {**SLIDING_LAYER, "layer_types": ["conv", "sliding_attention", "full_attention"], "num_hidden_layers": 3}
            | {"head_dim": 16, "pad_token_id": 0},
        ),
    ],
)
@pytest.mark.parametrize("lacking", [{}, {"sliding_attention": None}])
def test_rotations_that_a_kind_of_layers_lacks_are_named(
    family: str, options: dict[str, Any], lacking: dict[str, None]
) -> None:
    """The engine started, and its first step was a KeyError."""
    ropes = {"rope_parameters": {"full_attention": DEFAULT_ROPE, **lacking}}
    config = {**SHAPE, "model_type": family, **options, **ropes}
    rule = f"^model.model=m: rope_parameters of a {family} .* each of its layer_types, got none of sliding_attention; m"
    with pytest.raises(UserError, match=rule):
        load(ModelSource(model="m", load_format="dummy", hf_config=config))


def test_column_shards_concatenate_to_the_whole_product() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, generator=generator)
    weights = {"a": torch.randn(8, 6, generator=generator), "b": torch.randn(4, 6, generator=generator)}
    biases = {"a": torch.randn(8, generator=generator), "b": torch.randn(4, generator=generator)}
    outputs: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    for rank in range(2):
        layer = ColumnParallelLinear(
            6, {"a": 8, "b": 4}, bias=True, shard=Shard(rank=rank, size=2), dtype=torch.float32
        )
        targets = layer.weight_targets("p.")
        assert set(targets) == {"p.a.weight", "p.a.bias", "p.b.weight", "p.b.bias"}
        for name in ("a", "b"):
            assert targets[f"p.{name}.weight"].shard_dim == targets[f"p.{name}.bias"].shard_dim == 0
            targets[f"p.{name}.weight"].view.copy_(weights[name].chunk(2)[rank])
            targets[f"p.{name}.bias"].view.copy_(biases[name].chunk(2)[rank])
        for name, part in zip(("a", "b"), layer(x, 4).split([4, 2], dim=1), strict=True):
            outputs[name].append(part)
    for name in ("a", "b"):
        torch.testing.assert_close(torch.cat(outputs[name], dim=1), linear(x, weights[name], biases[name], 4))


def test_row_shards_sum_to_the_whole_product_and_add_the_bias_once() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(size, generator=generator) for size in ((4, 6), (8, 6), (8,)))

    def product(ranks: Ranks) -> torch.Tensor:
        shard = ranks.shard
        layer = RowParallelLinear(6, 8, "o", bias=True, shard=shard, dtype=torch.float32)
        targets = layer.weight_targets("p.")
        assert targets["p.o.weight"].shard_dim == 1 and targets["p.o.bias"].shard_dim is None
        targets["p.o.weight"].view.copy_(weight.chunk(2, dim=1)[shard.rank])
        targets["p.o.bias"].view.copy_(bias)
        return layer(x.chunk(2, dim=1)[shard.rank].contiguous(), 4)

    both = in_ranks(2, product)
    assert torch.equal(*both)
    torch.testing.assert_close(both[0], linear(x, weight, bias, 4))


@pytest.mark.parametrize(
    "variant",
    [
        "llama, attention bias",
        "llama, mlp bias",
        "phi3",
        "qwen3",
        "seed_oss",
        "gemma2",
        "glm4",
        "ernie4_5, biased, tied",
        "gpt_oss",
        "qwen3_5_text",
        "qwen3_next",
        "qwen3_5_moe_text",
        "deepseek_v3",
        "deepseek_v3, queries at once, values wider than keys",
        "olmo2",
        "minimax_m2",
        "llama4_text",
        "nemotron_h",
        "nemotron_h, experts over a latent",
        "granitemoeshared",
        "granitemoehybrid, experts, heads in groups, biased",
        "hunyuan_v1_moe",
        "hy_v3",
        "afmoe",
        "laguna",
        "mistral4, texts longer than it was trained with first",
    ],
)
def test_two_ranks_compute_together_what_one_computes_alone(variant: str, tmp_path: Path) -> None:
    model = random_model(make_config(variant))
    source = save(model, tmp_path)
    sequences = random_sequences(VOCAB_SIZE, LENGTHS)
    whole = load(source)

    def compute(ranks: Ranks) -> torch.Tensor:
        own = load_model(source, device=CPU, dtype=torch.float32, max_model_len=None, shard=ranks.shard)
        parts = 1 if variant.startswith(("deepseek", "mistral4")) else 2  # latents are whole in every rank
        assert [parts * width for width in own.model.kv_widths] == whole.model.kv_widths
        assert isinstance(own.model, Decoder) and own.model.lm_head.shape[0] == VOCAB_SIZE // 2
        assert torch.equal(own.model.whole_head(), whole.model.whole_head())
        return engine_logits(own, sequences)

    logits = in_ranks(2, compute)
    assert torch.equal(*logits)
    assert_as_accurate(logits[0], reference_logits(model, sequences), float64_logits(model, sequences))


def test_a_shard_must_divide_its_dimension() -> None:
    with pytest.raises(
        UserError, match=r"num_key_value_heads must be divisible by hardware.tensor_parallel_size \(4\), got 2"
    ):
        Shard(rank=0, size=4).split(2, "num_key_value_heads")
