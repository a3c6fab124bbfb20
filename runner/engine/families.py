"""What each decoder family that we build ourselves fixes in code rather than in its config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from kernels.reference.act_and_mul import ALPHA, LIMIT, Activation
from kernels.reference.experts import Scores

# How tensors of gated delta nets hold projections together: matrix by matrix (Qwen3.5), or a key head and its value
# heads at a time (Qwen3-Next); or how those of Mamba-2's layers do.
DeltaLayout = Literal["by_matrix", "by_key_head", "mamba"]


class StateKeys(NamedTuple):
    """Of a config: numbers of heads, their sizes, tokens that a convolution sees, and whether there are biases."""

    num_key_heads: str
    num_value_heads: str
    key_dim: str
    value_dim: str
    taps: str
    biases: str = ""  # of projections; "": there are none, as the next
    convolution_bias: str = ""


OF_DELTA_NETS = StateKeys(
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
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


@dataclass(frozen=True, kw_only=True)
class NormNames:
    """Of a layer, in the checkpoint; None: there is no such norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None  # over what attention adds to the residual stream
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


PRE_NORMS = NormNames()
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
GLM_NORMS = NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")


@dataclass(frozen=True, kw_only=True)
class NormsBeside:
    """Of an MLP and experts beside each other, in the checkpoint, within a layer (Gemma 4)."""

    before_mlp: str = "pre_feedforward_layernorm"
    after_mlp: str = "post_feedforward_layernorm_1"
    before_experts: str = "pre_feedforward_layernorm_2"
    after_experts: str = "post_feedforward_layernorm_2"
    router_scale: str = "router.scale"  # the weight, times the root of the hidden size, of what the router reads


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A family's mixture of experts: names in the checkpoint, within a layer, and keys of the config."""

    block: str  # "": its tensors lie in the layer
    is_there: bool | str = True  # or: the config's key says so
    norms: NormsBeside | None = None  # of experts beside the layer's MLP; None: they stand in its place
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # gate, where there is one, up, down
    router: str = "gate"
    router_digits: Literal["of rows", "of checkpoint", "float32"] = "of rows"  # the last: so it is published
    count_key: str = "num_experts"
    choices_key: str = "num_experts_per_tok"  # experts that a row goes to
    size_key: str = "moe_intermediate_size"  # of an expert
    scores: Scores = "softmax"
    is_normalized: bool | str = True  # the weights of a row's experts add up to 1, or: the config's key says so
    scale_key: str | None = None  # of those weights; None: they are not scaled
    factors: str | None = None  # name in the checkpoint, within the block, of what each expert's are multiplied by
    has_groups: bool = False  # of experts, as the config's n_group says: a row goes to those of the best topk_group
    corrections: str | None = None  # name in the checkpoint, within the block, of what scores are corrected by
    corrections_have_rows: bool = False  # in the checkpoint [1, num_experts]
    shared: str | None = None  # name of the MLP beside the experts, within the block, which all rows go to
    shared_count_key: str = ""  # how many experts' size it has, or:
    shared_size_key: str = ""  # its size
    shared_gate: str | None = None  # name, within the block, of what it is gated by, one number a row
    # That have a mixture, as the config says it.
    layers: Literal["all", "behind_dense", "behind_first", "by_block", "by_step", "by_type", "in_range"] = "all"
    has_biases: bool = False
    # One tensor may hold all experts' weights, each with a row for every output (Qwen3.5) or input (Qwen3-VL, where its
    # sizes do not say that it is the former), up behind gate, or with the two in turns (gpt-oss).
    stacks: Literal["none", "by_output", "by_input", "by_input_in_turns"] = "none"
    stack_names: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")  # within the block

    def named(self, name: str) -> str:
        """Within the layer, of what has this name within the block."""
        return f"{self.block}.{name}" if self.block else name


@dataclass(frozen=True, kw_only=True)
class Family:
    """Biases are there or not, or as the key of a config says."""

    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = False  # of the attention's output projection
    mlp_bias: bool | str = False
    mlp: str = "mlp"  # its name in the checkpoint, within a layer
    mlp_size_key: str = "intermediate_size"  # of the config
    qk_norm: bool | str = False  # RMSNorm over each query and key head, before rope
    is_qk_norm_whole: bool = False  # over all query heads together, and over all key heads
    norms_turned: bool = False  # or behind rope
    head_norms: tuple[str, str] = ("q_norm", "k_norm")  # their names in the checkpoint, within the attention
    windows: Literal["none", "one", "by_layer"] = "none"  # one: the config's for all layers
    norms: NormNames = PRE_NORMS
    norms_add_one: bool = False  # to their weights
    norms_round_last: bool = False  # their weights multiply what is not yet rounded
    activation: Activation = "silu"
    is_mlp_gated: bool = True  # else an MLP squares what of its first product is positive
    activation_key: str = "hidden_act"  # of the config
    activation_names: tuple[str, ...] = ("silu",)  # as configs spell it; with another one layers are not ours
    # By keys of the config; with others layers are not ours.
    fixed_values: Mapping[str, float | str | tuple[float, ...] | None] = field(default_factory=dict)
    is_embedding_scaled: bool = False  # by the root of the hidden size, rounded as embeddings are
    is_input_scaled: bool | str = False  # likewise, on its way from the table into the first layer, and not rounded
    has_multipliers: bool = False  # of what enters layers, of what they add, of logits (runner.engine.multipliers)
    is_rope_partial: bool = False  # the config's partial_rotary_factor says how much of a head turns
    is_rope_interleaved: bool | str = False  # neighbours turn together, not the halves of what is rotated
    is_rope_in_windows: bool = False  # and nothing turns in layers that see all, where others have windows
    has_rope: bool = True
    has_blocks: bool = False  # a layer is an attention, what stands in its place, an MLP or experts, as layer_types say
    eps_key: str = "rms_norm_eps"  # of the config
    reads: tuple[str, ...] = ()  # other keys of the config, which mean nothing to other families
    # Of what one tensor of the checkpoint holds all; linears: an MLP's gate and up, beside which down has another name.
    fused: tuple[Literal["qkv", "gate_up", "linears"], ...] = ()
    heads_by_layer: bool = False  # those of layers that see all are others, and the last layers may have no keys
    norms_values: bool = False  # of each head, by no weights; then logits of the attention are not scaled
    has_per_layer_inputs: bool = False  # where hidden_size_per_layer_input says so
    has_layer_scales: bool = False  # each layer's of the residual stream behind it
    has_sinks: bool = False  # each head has a logit that takes mass from its keys and yields nothing
    has_output_gate: bool = False  # each head's attention is gated by the layer's input (arXiv 2505.06708)
    is_gate_apart: bool = False  # in a tensor of its own; else what gates a head stands beside its queries
    delta_nets: DeltaLayout | None = None  # of layers that do not attend
    state_keys: StateKeys | None = None  # of the config, of those
    is_latent: bool = False  # keys and values of all heads are read from one latent of a token (arXiv 2405.04434)
    experts: Mixture | None = None

    @property
    def has_plain_layers(self) -> bool:
        """Llama's but for biases, norms, gates and rotations of heads, windows and experts: MTP modules' are such."""
        is_scaled = self.is_embedding_scaled or bool(self.is_input_scaled) or self.has_multipliers
        is_other = is_scaled or self.has_sinks or self.activation != "silu"
        is_other = is_other or self.is_qk_norm_whole or self.norms_turned or self.is_rope_in_windows or self.has_blocks
        return self.norms is PRE_NORMS and not (is_other or self.reads)


def is_told(config: Any, told: bool | str) -> bool:
    """By the family, or by a key of the config."""
    return bool(getattr(config, told, False)) if isinstance(told, str) else told


_GEMMA: dict[str, Any] = {
    "output_bias": "attention_bias",
    "norms_add_one": True,
    "activation": "gelu_tanh",
    "activation_names": ("gelu_pytorch_tanh", "gelu"),  # the latter, of the first releases, means the former
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
_OLMO_MIXTURE = Mixture(block="mlp", size_key="intermediate_size", is_normalized="norm_topk_prob")
_EXAONE: dict[str, Any] = {"qkv_bias": False, "qk_norm": True, "windows": "by_layer", "is_rope_in_windows": True}

# DeepSeek-V3's mixture (arXiv 2412.19437).
_DEEPSEEK_MIXTURE = Mixture(
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

_EXAONE_MIXTURE = replace(
    _DEEPSEEK_MIXTURE,
    count_key="num_experts",
    corrections="e_score_correction_bias",
    shared_count_key="num_shared_experts",
    layers="by_type",
)

# Trinity's: Solar Open's among dense layers that another key counts.
_AFMOE_MIXTURE = replace(
    _DEEPSEEK_MIXTURE,
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

_LATENT: dict[str, Any] = {"output_bias": "attention_bias", "is_latent": True, "is_rope_interleaved": "rope_interleave"}

# Qwen2-MoE's, whose shared expert is gated.
_QWEN_MIXTURE: dict[str, Any] = {
    "block": "mlp",
    "shared": "shared_expert",
    "shared_size_key": "shared_expert_intermediate_size",
    "shared_gate": "shared_expert_gate",
}
_SPARSE_QWEN_MIXTURE = Mixture(**_QWEN_MIXTURE, is_normalized="norm_topk_prob", layers="by_step")

_HUNYUAN: dict[str, Any] = {
    "output_bias": "attention_bias",
    "qk_norm": True,
    "norms_turned": True,
    "head_norms": ("query_layernorm", "key_layernorm"),
    "fixed_values": {"use_qk_norm": True, "use_cla": False, "moe_layer_num_skipped": 0, "use_mixed_mlp_moe": True},
}

_GRANITE: dict[str, Any] = {"output_bias": "attention_bias", "has_multipliers": True}
_SHARED_GRANITE: dict[str, Any] = {
    **_GRANITE,
    "mlp": "shared_mlp",
    "mlp_size_key": "shared_intermediate_size",
    "fused": ("linears",),
}
_GRANITE_MIXTURE = Mixture(
    block="",
    router="block_sparse_moe.router.layer",
    count_key="num_local_experts",
    size_key="intermediate_size",
    stacks="by_output",
    stack_names=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
)
_SHARED_GRANITE_MIXTURE = replace(_GRANITE_MIXTURE, shared="shared_mlp", shared_size_key="shared_intermediate_size")

# Gemma 4's, as its 26B-A4B has it; dense layers of that family have none.
_GEMMA_MIXTURE = Mixture(
    block="",
    is_there="enable_moe_block",
    norms=NormsBeside(),
    router="router.proj",
    choices_key="top_k_experts",
    factors="router.per_expert_scale",
    stacks="by_output",
)

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
        experts=_AFMOE_MIXTURE,
    ),
    "deepseek_v2": Family(
        **{**_LATENT, "is_rope_interleaved": True},
        mlp_bias="mlp_bias",
        fixed_values={"topk_method": "greedy"},
        experts=replace(_DEEPSEEK_MIXTURE, scores="softmax", has_groups=False, corrections=None, is_normalized=False),
    ),
    "deepseek_v3": Family(**_LATENT, experts=_DEEPSEEK_MIXTURE),
    "dots1": Family(
        output_bias="attention_bias",
        qk_norm=True,
        windows="by_layer",
        experts=_DEEPSEEK_MIXTURE,
    ),
    "ernie4_5": Family(qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias", is_rope_interleaved=True),
    "ernie4_5_moe": Family(
        qkv_bias=False,
        is_rope_interleaved=True,
        fixed_values={"use_bias": False, "moe_norm_min": 1e-12},  # the latter: lost in sums of published scores
        experts=Mixture(
            block="mlp",
            router_digits="float32",
            count_key="moe_num_experts",
            choices_key="moe_k",
            corrections="moe_statics.e_score_correction_bias",
            corrections_have_rows=True,
            shared="shared_experts",
            shared_count_key="moe_num_shared_experts",
            layers="in_range",
        ),
    ),
    "exaone4": Family(**_EXAONE, norms=OLMO_NORMS),
    "exaone_moe": Family(**_EXAONE, experts=_EXAONE_MIXTURE),
    "flex_olmo": Family(**_LATER_OLMO, experts=_OLMO_MIXTURE),
    "gemma": Family(**_GEMMA),
    "gemma2": Family(
        **_LATER_GEMMA, reads=("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
    ),
    "gemma3_text": Family(**_LATER_GEMMA, qk_norm=True, reads=("query_pre_attn_scalar", "final_logit_softcapping")),
    "gemma4_text": Family(
        **_GEMMA4,
        has_per_layer_inputs=True,
        experts=_GEMMA_MIXTURE,
    ),
    "gemma4_unified_text": Family(**_GEMMA4),
    "glm": Family(is_rope_partial=True, is_rope_interleaved=True, fused=("gate_up",)),
    "glm4": Family(norms=GLM_NORMS, is_rope_partial=True, is_rope_interleaved=True, fused=("gate_up",)),
    "glm4_moe_lite": Family(**_LATENT, experts=replace(_DEEPSEEK_MIXTURE, layers="by_type")),
    "glm4_moe": Family(qk_norm="use_qk_norm", is_rope_partial=True, experts=_DEEPSEEK_MIXTURE),
    "gpt_oss": Family(
        output_bias="attention_bias",
        windows="by_layer",
        has_sinks=True,
        activation="clamped_swiglu",
        fixed_values={"swiglu_alpha": ALPHA, "swiglu_limit": LIMIT},
        experts=Mixture(
            block="mlp",
            router="router",
            count_key="num_local_experts",
            size_key="intermediate_size",
            has_biases=True,
            stacks="by_input_in_turns",
        ),
    ),
    "granite": Family(**_GRANITE, mlp_bias="mlp_bias"),
    "granitemoe": Family(**_GRANITE, experts=_GRANITE_MIXTURE),
    "granitemoehybrid": Family(
        **_SHARED_GRANITE,
        fixed_values={"time_step_limit": (0.0, math.inf)},
        delta_nets="mamba",
        state_keys=OF_GRANITE,
        reads=("position_embedding_type",),
        experts=replace(_SHARED_GRANITE_MIXTURE, is_there="num_local_experts"),
    ),
    "granitemoeshared": Family(
        **_SHARED_GRANITE,
        experts=_SHARED_GRANITE_MIXTURE,
    ),
    "hunyuan_v1_dense": Family(**_HUNYUAN),
    "hunyuan_v1_moe": Family(
        **_HUNYUAN,
        experts=Mixture(
            block="mlp",
            router="gate.wg",
            router_digits="of checkpoint",
            choices_key="moe_topk",
            size_key="intermediate_size",
            shared="shared_mlp",
            shared_size_key="intermediate_size",
        ),
    ),
    "internlm3": Family(output_bias="attention_bias", mlp_bias="mlp_bias"),
    "llama": Family(output_bias="attention_bias", mlp_bias="mlp_bias"),
    "mimo": Family(qkv_bias=True, windows="by_layer"),
    "minimax_m2": Family(
        qkv_bias=False,
        qk_norm=True,
        is_qk_norm_whole=True,
        is_rope_partial=True,
        reads=("rotary_dim",),
        experts=Mixture(
            block="block_sparse_moe",
            projections=("w1", "w3", "w2"),
            router_digits="of checkpoint",
            count_key="num_local_experts",
            size_key="intermediate_size",
            scores="sigmoid",
            corrections="e_score_correction_bias",
        ),
    ),
    "ministral": Family(qkv_bias=False, windows="by_layer"),
    "ministral3": Family(qkv_bias=False, windows="one"),
    "mistral": Family(qkv_bias=False, windows="one"),  # one with layer_types is a ministral
    "mistral4": Family(
        **_LATENT,
        experts=replace(
            _DEEPSEEK_MIXTURE, router_digits="of rows", scores="softmax", corrections=None, stacks="by_output"
        ),
    ),
    "mixtral": Family(
        windows="one",
        experts=Mixture(
            block="block_sparse_moe",
            projections=("w1", "w3", "w2"),
            count_key="num_local_experts",
            size_key="intermediate_size",
        ),
    ),
    "nemotron_h": Family(  # but with experts over a latent, as Nemotron 3 Super's
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
            "moe_latent_size": None,
        },
        experts=replace(
            _DEEPSEEK_MIXTURE,
            projections=("up_proj", "down_proj"),
            shared_size_key="moe_shared_expert_intermediate_size",
            layers="by_block",
        ),
    ),
    "olmo2": Family(**_LATER_OLMO),
    "olmo3": Family(**_LATER_OLMO, windows="by_layer"),
    "olmoe": Family(**_OLMO, fixed_values={"clip_qkv": None}, experts=_OLMO_MIXTURE),
    "phi3": Family(qkv_bias=False, windows="one", is_rope_partial=True, fused=("qkv", "gate_up")),
    "qwen2": Family(qkv_bias=True, windows="by_layer"),
    "qwen2_moe": Family(qkv_bias="qkv_bias", windows="by_layer", experts=_SPARSE_QWEN_MIXTURE),
    "qwen2_5_vl_text": Family(qkv_bias=True, windows="by_layer"),
    "qwen3": Family(output_bias="attention_bias", qk_norm=True, windows="by_layer"),
    "qwen3_5_moe_text": Family(
        **_QWEN3_NEXT, delta_nets="by_matrix", experts=Mixture(**_QWEN_MIXTURE, stacks="by_output")
    ),
    "qwen3_5_text": Family(**_QWEN3_NEXT, delta_nets="by_matrix"),
    "qwen3_moe": Family(
        output_bias="attention_bias",
        qk_norm=True,
        windows="one",
        experts=Mixture(block="mlp", is_normalized="norm_topk_prob", layers="by_step"),
    ),
    "qwen3_next": Family(**_QWEN3_NEXT, delta_nets="by_key_head", experts=_SPARSE_QWEN_MIXTURE),
    "qwen3_vl_moe_text": Family(
        output_bias="attention_bias",
        qk_norm=True,
        experts=Mixture(block="mlp", layers="by_step", stacks="by_input"),
    ),
    "qwen3_vl_text": Family(output_bias="attention_bias", qk_norm=True),
    "seed_oss": Family(output_bias="attention_out_bias", mlp_bias="mlp_bias"),
    "smollm3": Family(
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        windows="by_layer",
        reads=("no_rope_layers", "use_sliding_window"),
    ),
    "youtu": Family(**_LATENT),
    "solar_open": Family(experts=replace(_DEEPSEEK_MIXTURE, layers="all")),
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
