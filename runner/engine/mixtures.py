"""The mixtures of experts of the families that runner.engine.families lists."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from runner.engine.mixture import Mixture

# DeepSeek-V3's (arXiv 2412.19437).
DEEPSEEK = Mixture(
    block="mlp",
    router_digits="of checkpoint",
    count_key="n_routed_experts",
    scores="sigmoid",
    is_normalized="norm_topk_prob",
    scale_key="routed_scaling_factor",
    has_groups=True,
    corrections="gate.e_score_correction_bias",
    shared="shared_experts",
    shared_count_key="n_shared_experts",
    layers="behind_first",
)
DEEPSEEK_V2 = replace(DEEPSEEK, scores="softmax", has_groups=False, corrections=None, is_normalized=False)
GLM4_LITE = replace(DEEPSEEK, layers="by_type")
MISTRAL4 = replace(DEEPSEEK, router_digits="of rows", scores="softmax", corrections=None, stacks="by_output")
NEMOTRON = replace(
    DEEPSEEK,
    projections=("up_proj", "down_proj"),
    latent_key="moe_latent_size",
    shared_size_key="moe_shared_expert_intermediate_size",
    layers="by_block",
)
SOLAR = replace(DEEPSEEK, layers="all")

# Trinity's. The first layers, as many as num_dense_layers says, have none.
AFMOE = replace(
    DEEPSEEK,
    router="router.gate",
    router_digits="of rows",
    count_key="num_experts",
    is_normalized=True,
    scale_key="route_scale",
    has_groups=False,
    corrections="expert_bias",
    shared_count_key="num_shared_experts",
    layers="behind_dense",
)

LING = replace(
    DEEPSEEK,
    count_key="num_local_experts",
    layers="by_type",
    limits_key="expert_swiglu_limit_list",
    shared_limits_key="share_expert_swiglu_limit_list",
)
EXAONE = replace(
    DEEPSEEK,
    count_key="num_experts",
    corrections="e_score_correction_bias",
    shared_count_key="num_shared_experts",
    layers="by_type",
)
HY = replace(
    EXAONE,
    router="router.gate",
    is_normalized=True,
    scale_key="router_scaling_factor",
    has_groups=False,
    corrections="expert_bias",
    shared="shared_mlp",
)

ERNIE = Mixture(
    block="mlp",
    router_digits="float32",
    count_key="moe_num_experts",
    choices_key="moe_k",
    corrections="moe_statics.e_score_correction_bias",
    corrections_have_rows=True,
    shared="shared_experts",
    shared_count_key="moe_num_shared_experts",
    layers="in_range",
)

# Gemma 4's, as its 26B-A4B has it; dense layers of that family have none.
GEMMA4 = Mixture(
    block="",
    is_there="enable_moe_block",
    is_beside_mlp=True,
    router="router.proj",
    choices_key="top_k_experts",
    factors="router.per_expert_scale",
    stacks="by_output",
)

GPT_OSS = Mixture(
    block="mlp",
    router="router",
    count_key="num_local_experts",
    size_key="intermediate_size",
    has_biases=True,
    stacks="by_input_in_turns",
)

GRANITE = Mixture(
    block="",
    router="block_sparse_moe.router.layer",
    count_key="num_local_experts",
    size_key="intermediate_size",
    stacks="by_output",
    stack_names=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
)
SHARED_GRANITE = replace(GRANITE, shared="shared_mlp", shared_size_key="shared_intermediate_size")
HYBRID_GRANITE = replace(SHARED_GRANITE, is_there="num_local_experts")
GRANITE_OF_WINDOWS = replace(
    SHARED_GRANITE,
    router="block_sparse_moe.router",
    stack_names=("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
)

HUNYUAN = Mixture(
    block="mlp",
    router="gate.wg",
    router_digits="of checkpoint",
    choices_key="moe_topk",
    size_key="intermediate_size",
    shared="shared_mlp",
    shared_size_key="intermediate_size",
)

LAGUNA = Mixture(
    block="mlp",
    is_there="num_experts",
    scores="sigmoid",
    scale_key="moe_routed_scaling_factor",
    corrections="experts.e_score_correction_bias",
    shared="shared_expert",
    shared_size_key="shared_expert_intermediate_size",
    layers="by_type",
)

LFM2 = Mixture(
    block="mlp",
    scores="sigmoid",
    is_normalized="norm_topk_prob",
    scale_key="routed_scaling_factor",
    corrections="expert_bias",
    layers="behind_dense",
)

LLAMA4 = Mixture(
    block="feed_forward",
    router="router",
    count_key="num_local_experts",
    size_key="intermediate_size",
    scales_inputs=True,
    shared="shared_expert",
    shared_size_key="intermediate_size",
    layers="listed",
    stacks="by_input",
)

MELLUM = Mixture(block="mlp", is_normalized="norm_topk_prob", layers="by_type")

MIXTRAL = Mixture(
    block="block_sparse_moe",
    projections=("w1", "w3", "w2"),
    count_key="num_local_experts",
    size_key="intermediate_size",
)
MINIMAX = replace(MIXTRAL, router_digits="of checkpoint", scores="sigmoid", corrections="e_score_correction_bias")
KIMI = replace(
    DEEPSEEK,
    block=MIXTRAL.block,
    projections=MIXTRAL.projections,
    count_key="num_local_experts",
    layers="by_type",
)

OLMO = Mixture(block="mlp", size_key="intermediate_size", is_normalized="norm_topk_prob")

# Qwen2-MoE's, whose shared expert is gated.
_QWEN2: dict[str, Any] = {
    "block": "mlp",
    "shared": "shared_expert",
    "shared_size_key": "shared_expert_intermediate_size",
    "shared_gate": "shared_expert_gate",
}
QWEN2 = Mixture(**_QWEN2, is_normalized="norm_topk_prob", layers="by_step")
FLINT = Mixture(
    block="mlp",
    router_digits="float32",
    scores="sigmoid",
    is_normalized="norm_topk_prob",
    shared="shared_expert",
    shared_size_key="shared_expert_intermediate_size",
    layers="by_step",
)
QWEN3 = Mixture(block="mlp", is_normalized="norm_topk_prob", layers="by_step")
QWEN3_VL = Mixture(block="mlp", layers="by_step", stacks="by_input")
QWEN3_5 = Mixture(**_QWEN2, stacks="by_output")
