"""The decoder families we build ourselves: what each fixes in code rather than in its config."""

from __future__ import annotations

import math
from typing import Any

from kernels.reference.act_and_mul import ALPHA, LIMIT
from runner.engine import mixtures
from runner.engine.family import PRE_NORMS, Family, NormNames, StateKeys

OF_DELTA_NETS = StateKeys(
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
OF_OLMO = OF_DELTA_NETS._replace(writes_twice="linear_allow_neg_eigval")
OF_KIMI = StateKeys(
    *("linear_num_heads", "linear_num_heads", "linear_head_dim", "linear_head_dim", "linear_conv_kernel_dim")
)
OF_LING = StateKeys(
    *("num_attention_heads", "num_attention_heads", "linear_head_dim", "linear_head_dim", "short_conv_kernel_size")
)
OF_GRANITE = StateKeys(
    *("mamba_n_groups", "mamba_n_heads", "mamba_d_state", "mamba_d_head", "mamba_d_conv"),
    biases="mamba_proj_bias",
    convolution_bias="mamba_conv_bias",
)
OF_NEMOTRON = StateKeys(
    *("n_groups", "mamba_num_heads", "ssm_state_size", "mamba_head_dim", "conv_kernel"),
    biases="use_bias",
    convolution_bias="use_conv_bias",
)


GEMMA_NORMS = NormNames(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
OLMO_NORMS = NormNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
AFMOE_NORMS = NormNames(
    after_attention="post_attention_layernorm", before_mlp="pre_mlp_layernorm", after_mlp="post_mlp_layernorm"
)
LFM3_NORMS = NormNames(after_attention="post_operator_norm", after_mlp="post_ffn_norm")
GLM_NORMS = NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")


_LLAMA: dict[str, Any] = {"output_bias": "attention_bias", "mlp_bias": "mlp_bias"}
_GEMMA: dict[str, Any] = {
    "output_bias": "attention_bias",
    "norms_add_one": True,
    "activation": "gelu_tanh",
    "activation_names": ("gelu_pytorch_tanh", "gelu"),  # the first releases say gelu where they mean it by tanh
    "is_embedding_scaled": True,
}
_QWEN3_NEXT: dict[str, Any] = {
    "output_bias": "attention_bias",
    "qk_norm": True,
    "norms_add_one": True,
    "is_rope_partial": True,
    "has_output_gate": True,
    "state_keys": OF_DELTA_NETS,
    "fixed_values": {"attn_output_gate": True},
}
_LATER_GEMMA: dict[str, Any] = {
    **_GEMMA,
    "activation_key": "hidden_activation",
    "activation_names": ("gelu_pytorch_tanh",),  # "gelu" means itself
    "norms": GEMMA_NORMS,
    "windows": "by_layer",
}
_GEMMA4: dict[str, Any] = {
    **_LATER_GEMMA,
    "norms_add_one": False,
    "norms_round_last": True,
    "qk_norm": True,
    "heads_by_layer": True,
    "norms_values": True,
    "has_layer_scales": True,
    "reads": ("final_logit_softcapping", "use_double_wide_mlp"),
}

_OLMO: dict[str, Any] = {
    "output_bias": "attention_bias",
    "qk_norm": True,
    "is_qk_norm_whole": True,
}
_LATER_OLMO: dict[str, Any] = {**_OLMO, "norms": OLMO_NORMS, "norms_round_last": True}
_EXAONE: dict[str, Any] = {"qkv_bias": False, "qk_norm": True, "windows": "by_layer", "is_rope_in_windows": True}

_LATENT: dict[str, Any] = {"output_bias": "attention_bias", "is_latent": True, "is_rope_interleaved": "rope_interleave"}

_LFM: dict[str, Any] = {"qkv_bias": False, "qk_norm": True, "eps_key": "norm_eps", "has_short_convs": True}

_HUNYUAN: dict[str, Any] = {
    "output_bias": "attention_bias",
    "qk_norm": True,
    "norms_turned": True,
    "head_norms": ("query_layernorm", "key_layernorm"),
    "reads": ("alpha",),  # of rope_parameters
    "fixed_values": {"use_qk_norm": True, "use_cla": False, "moe_layer_num_skipped": 0, "use_mixed_mlp_moe": True},
}

_GRANITE: dict[str, Any] = {"output_bias": "attention_bias", "has_multipliers": True}
_GRANITE_OF_WINDOWS: dict[str, Any] = {
    **_GRANITE,
    "windows": "by_layer",
    "has_sinks": True,
    "has_bases_by_layer": True,
    "reads": ("layer_rope_theta",),
}
_SHARED_GRANITE_MLP: dict[str, Any] = {
    "mlp": "shared_mlp",
    "mlp_size_key": "shared_intermediate_size",
    "fused": ("linears",),
}
_SHARED_GRANITE: dict[str, Any] = {**_GRANITE, **_SHARED_GRANITE_MLP}

FAMILIES = {
    "afmoe": Family(
        qk_norm=True,
        windows="by_layer",
        is_rope_in_windows=True,
        norms=AFMOE_NORMS,
        norms_round_last=True,
        is_input_scaled="mup_enabled",
        has_output_gate=True,
        is_gate_apart=True,
        fixed_values={"attention_bias": False, "score_func": "sigmoid", "route_norm": True},
        experts=mixtures.AFMOE,
    ),
    "arcee": Family(output_bias="attention_bias", mlp_bias="mlp_bias", is_mlp_gated=False, activation_names=("relu2",)),
    "bailing_hybrid": Family(  # Ling 3
        **{**_LATENT, "is_rope_interleaved": True},
        architectures=("BailingMoeV3ForCausalLM", "BailingHybridForCausalLM"),  # of Ling 2.5 it is another
        ignores_rotary_factor=True,
        has_output_gate=True,
        is_gate_apart=True,
        delta_nets="ling",
        state_keys=OF_LING,
        fixed_values={
            "gated_attention_proj_granularity_type": "head_wise",
            "group_norm_size": 1,
            "moe_router_enable_expert_bias": True,
            "mtp_use_kda": False,
            "no_kda_lora": True,
            "num_kv_heads_for_linear_attn": 0,
            "score_function": "sigmoid",
            "topk_method": "noaux_tc",
            **dict.fromkeys(("use_bias", "use_kda_lora", "use_mla_nope", "use_nGPT", "use_qkv_bias"), False),
            **dict.fromkeys(("scale_router_input", "up_proj_norm", "value_norm"), False),
        },
        experts=mixtures.LING,
    ),
    "cwm": Family(qkv_bias=False, windows="by_layer"),
    "deepseek_v2": Family(
        **{**_LATENT, "is_rope_interleaved": True},
        mlp_bias="mlp_bias",
        fixed_values={"topk_method": "greedy"},
        experts=mixtures.DEEPSEEK_V2,
    ),
    "deepseek_v3": Family(**_LATENT, experts=mixtures.DEEPSEEK),
    "dots1": Family(output_bias="attention_bias", qk_norm=True, windows="by_layer", experts=mixtures.DEEPSEEK),
    "ernie4_5": Family(qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias", is_rope_interleaved=True),
    "ernie4_5_moe": Family(
        qkv_bias=False,
        is_rope_interleaved=True,
        fixed_values={"use_bias": False, "moe_norm_min": 1e-12},  # moe_norm_min: sums are larger
        experts=mixtures.ERNIE,
    ),
    "exaone4": Family(**_EXAONE, norms=OLMO_NORMS),
    "exaone_moe": Family(**_EXAONE, experts=mixtures.EXAONE),
    "flex_olmo": Family(**_LATER_OLMO, experts=mixtures.OLMO),
    "flint": Family(
        output_bias="attention_bias",
        qk_norm=True,
        windows="by_layer",
        is_rope_in_windows=True,
        norms_round_last=True,
        has_sinks=True,
        experts=mixtures.FLINT,
    ),
    "gemma": Family(**_GEMMA),
    "gemma2": Family(
        **_LATER_GEMMA, reads=("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
    ),
    "gemma3_text": Family(**_LATER_GEMMA, qk_norm=True, reads=("query_pre_attn_scalar", "final_logit_softcapping")),
    "gemma4_text": Family(**_GEMMA4, has_per_layer_inputs=True, experts=mixtures.GEMMA4),
    "gemma4_unified_text": Family(**_GEMMA4),
    "glm": Family(is_rope_partial=True, is_rope_interleaved=True, fused=("gate_up",)),
    "glm4": Family(norms=GLM_NORMS, is_rope_partial=True, is_rope_interleaved=True, fused=("gate_up",)),
    "glm4_moe_lite": Family(**_LATENT, experts=mixtures.GLM4_LITE),
    "glm4_moe": Family(qk_norm="use_qk_norm", is_rope_partial=True, experts=mixtures.DEEPSEEK),
    "gpt_oss": Family(
        output_bias="attention_bias",
        windows="by_layer",
        has_sinks=True,
        activation="clamped_swiglu",
        fixed_values={"swiglu_alpha": ALPHA, "swiglu_limit": LIMIT},
        experts=mixtures.GPT_OSS,
    ),
    "granite": Family(**_GRANITE, mlp_bias="mlp_bias"),
    "granite_swa": Family(**_GRANITE_OF_WINDOWS, mlp_bias="mlp_bias"),
    "granitemoe": Family(**_GRANITE, experts=mixtures.GRANITE),
    "granitemoe_swa": Family(**_GRANITE_OF_WINDOWS, **_SHARED_GRANITE_MLP, experts=mixtures.GRANITE_OF_WINDOWS),
    "granitemoehybrid": Family(
        **_SHARED_GRANITE,
        fixed_values={"time_step_limit": (0.0, math.inf)},
        delta_nets="mamba",
        state_keys=OF_GRANITE,
        reads=("position_embedding_type",),
        experts=mixtures.HYBRID_GRANITE,
    ),
    "granitemoeshared": Family(**_SHARED_GRANITE, experts=mixtures.SHARED_GRANITE),
    "hunyuan_v1_dense": Family(**_HUNYUAN),
    "hunyuan_v1_moe": Family(**_HUNYUAN, experts=mixtures.HUNYUAN),
    "hy_v3": Family(output_bias="attention_bias", qk_norm=True, fixed_values={"mlp_bias": False}, experts=mixtures.HY),
    "internlm3": Family(**_LLAMA),
    "kimi_linear": Family(
        output_bias="attention_bias",
        is_latent=True,
        has_rope=False,
        delta_nets="kimi",
        state_keys=OF_KIMI,
        fixed_values={
            "attn_res_block_size": None,
            "mla_use_nope": True,
            "mla_use_output_gate": False,
            "moe_layer_freq": 1,
            "moe_router_activation_func": "sigmoid",
            "routed_expert_hidden_size": None,
            "use_grouped_topk": True,
        },
        experts=mixtures.KIMI,
    ),
    "kimi_k2": Family(**_LATENT, experts=mixtures.DEEPSEEK),
    "iquestcoder": Family(**_LLAMA),
    "laguna": Family(
        output_bias="attention_bias",
        qk_norm=True,
        windows="by_layer",
        is_rope_partial=True,
        has_output_gate=True,
        is_gate_apart=True,
        gate="g_proj",
        gate_function="softplus",
        gates_heads="gating",
        reads=("num_attention_heads_per_layer",),
        fixed_values={"moe_router_logit_softcapping": 0.0},
        experts=mixtures.LAGUNA,
    ),
    "lfm2": Family(**_LFM, reads=("block_auto_adjust_ff_dim",)),
    "lfm2_moe": Family(**_LFM, fixed_values={"use_expert_bias": True}, experts=mixtures.LFM2),
    "lfm3": Family(
        **_LFM,
        norms=LFM3_NORMS,
        windows="by_layer",
        has_output_gate=True,
        is_gate_apart=True,
        gates_heads="use_attention_gate",
        fixed_values={"use_sandwich_norm": True, "use_attention_gate": True, "attention_bias": False},
    ),
    "llama": Family(**_LLAMA),
    "llama4_text": Family(
        output_bias="attention_bias",
        qk_norm="use_qk_norm",
        norms_turned=True,
        head_norms=None,
        has_chunks=True,
        is_rope_interleaved=True,
        mlp="feed_forward",
        mlp_size_key="intermediate_size_mlp",
        fixed_values={"num_experts_per_tok": 1},
        reads=("no_rope_layers", "attn_temperature_tuning"),
        experts=mixtures.LLAMA4,
    ),
    "mimo": Family(qkv_bias=True, windows="by_layer"),
    "mellum": Family(output_bias="attention_bias", qk_norm=True, windows="by_layer", experts=mixtures.MELLUM),
    "minimax_m2": Family(
        qkv_bias=False,
        qk_norm=True,
        is_qk_norm_whole=True,
        is_rope_partial=True,
        reads=("rotary_dim",),
        experts=mixtures.MINIMAX,
    ),
    "ministral": Family(qkv_bias=False, windows="by_layer"),
    "ministral3": Family(qkv_bias=False, windows="one"),
    "mistral": Family(qkv_bias=False, windows="one"),  # one with layer_types is a ministral
    "mistral4": Family(**_LATENT, experts=mixtures.MISTRAL4),
    "mixtral": Family(windows="one", experts=mixtures.MIXTRAL),
    "muse_glimmer_text": Family(
        output_bias="attention_bias",
        qk_norm=True,
        head_norms=None,
        windows="by_layer",
        norms=GEMMA_NORMS,
        norms_add_one=True,
        is_last_norm_plain=True,
        is_input_normed=True,
        activation_key="hidden_activation",
        has_output_gate=True,
        is_gate_apart=True,
        reads=(
            *("layer_rope_theta", "qk_scale_factor", "post_norm_eps"),
            *("output_multiplier", "final_logit_softcapping"),
        ),
    ),
    "nemotron_h": Family(
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        norms=NormNames(before_mlp=None),
        norms_round_last=True,
        is_mlp_gated=False,
        activation_key="mlp_hidden_act",
        activation_names=("relu2",),
        has_rope=False,
        has_blocks=True,
        eps_key="layer_norm_epsilon",
        delta_nets="mamba",
        state_keys=OF_NEMOTRON,
        fixed_values={
            "mamba_hidden_act": "silu",
            "time_step_limit": (0.0, math.inf),
            "sliding_window": None,
            "residual_in_fp32": False,
        },
        experts=mixtures.NEMOTRON,
    ),
    "olmo2": Family(**_LATER_OLMO),
    "olmo3": Family(**_LATER_OLMO, windows="by_layer"),
    "olmo_hybrid": Family(
        **_LATER_OLMO,
        norms_in_place=PRE_NORMS,
        is_rope_optional=True,
        delta_nets="olmo",
        state_keys=OF_OLMO,
    ),
    "olmoe": Family(**_OLMO, fixed_values={"clip_qkv": None}, experts=mixtures.OLMO),
    "phi3": Family(qkv_bias=False, windows="one", is_rope_partial=True, fused=("qkv", "gate_up")),
    "qwen2": Family(qkv_bias=True, windows="by_layer"),
    "qwen2_moe": Family(qkv_bias="qkv_bias", windows="by_layer", experts=mixtures.QWEN2),
    "qwen2_5_vl_text": Family(qkv_bias=True, windows="by_layer"),
    "qwen3": Family(output_bias="attention_bias", qk_norm=True, windows="by_layer"),
    "qwen3_5_moe_text": Family(**_QWEN3_NEXT, delta_nets="by_matrix", experts=mixtures.QWEN3_5),
    "qwen3_5_text": Family(**_QWEN3_NEXT, delta_nets="by_matrix"),
    "qwen3_moe": Family(output_bias="attention_bias", qk_norm=True, windows="one", experts=mixtures.QWEN3),
    "qwen3_next": Family(**_QWEN3_NEXT, delta_nets="by_key_head", experts=mixtures.QWEN2),
    "qwen3_vl_moe_text": Family(output_bias="attention_bias", qk_norm=True, experts=mixtures.QWEN3_VL),
    "qwen3_vl_text": Family(output_bias="attention_bias", qk_norm=True),
    "sarvam_mla": Family(**_LATENT, experts=mixtures.DEEPSEEK),
    "sarvam_moe": Family(qk_norm="use_qk_norm", is_rope_partial=True, fused=("qkv",), experts=mixtures.DEEPSEEK),
    "seed_oss": Family(output_bias="attention_out_bias", mlp_bias="mlp_bias"),
    "smollm3": Family(
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        windows="by_layer",
        reads=("no_rope_layers", "use_sliding_window"),
    ),
    "youtu": Family(**_LATENT),
    "solar_open": Family(experts=mixtures.SOLAR),
}
GEMMA4_FAMILIES = tuple(name for name, family in FAMILIES.items() if family.heads_by_layer)
# Of other draft heads.
HEAD_FAMILIES = tuple(
    name
    for name, family in FAMILIES.items()
    if family.has_plain_layers
    and not (family.is_rope_interleaved or family.norms_add_one or family.has_output_gate or family.is_latent)
    and family.experts is None
)
