"""The decoder families we build ourselves, read from a Hugging Face config.

`read_architecture` returns what the decoder needs and nothing else, or None for a family that runs through
transformers' own modelling code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kernels.reference.act_and_mul import Activation
from kernels.reference.experts import RoutingRule
from runner.engine.delta_shapes import DeltaShapes, read_delta_shapes
from runner.engine.errors import UserError
from runner.engine.families import FAMILIES, Family, Mixture, NormNames
from runner.engine.fused_tensors import Fused
from runner.engine.latent_shapes import LatentShapes, latent_scale, read_latent_shapes
from runner.engine.rope import ONE_ROPE, HeadLayout


@dataclass(frozen=True, kw_only=True)
class ExpertShapes:
    """The mixtures of experts that stand in place of layers' MLPs."""

    mixture: Mixture
    num_experts: int
    rule: RoutingRule
    is_router_float32: bool  # whatever dtype rows have
    intermediate_size: int  # of an expert
    shared_size: int  # intermediate, of the MLP beside them; 0: there is none
    in_layers: tuple[bool, ...]  # of each layer; the others have an MLP

    @property
    def router_name(self) -> str:
        """In the checkpoint, within a layer."""
        return f"{self.mixture.block}.{self.mixture.router}"

    @property
    def prefix(self) -> str:
        """Of the names of experts' tensors, within a layer."""
        return f"{self.mixture.block}.experts."

    @property
    def corrections_name(self) -> str | None:
        """Of the tensor that scores are corrected by, within a layer."""
        return None if self.mixture.corrections is None else f"{self.mixture.block}.{self.mixture.corrections}"

    @property
    def shared_gate_name(self) -> str | None:
        """Of the tensor that gates the MLP beside them, within a layer."""
        return None if self.mixture.shared_gate is None else f"{self.mixture.block}.{self.mixture.shared_gate}.weight"

    @property
    def shared_name(self) -> str:
        """Of the MLP beside them, within a layer."""
        return f"{self.mixture.block}.{self.mixture.shared}"

    def names_of(self, expert: int) -> tuple[str, str, str]:
        """Of its gate, up and down projections."""
        gate, up, down = (f"{self.prefix}{expert}.{name}" for name in self.mixture.projections)
        return gate, up, down


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Shapes of a decoder of one of FAMILIES, and what its layers do."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # bias of the attention's output projection
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over each query and key head, before rope (Qwen3)
    is_qk_norm_whole: bool  # over all query heads together, and over all key heads (OLMo 2)
    sliding_windows: tuple[int | None, ...]  # per layer: keys a query sees, itself included; None = all
    ropes: tuple[str | None, ...]  # per layer: which of the config's rotations, None = none (SmolLM3)
    head_layout: HeadLayout
    norms: NormNames
    norms_add_one: bool  # to their weights (Gemma)
    norms_round_last: bool  # Family.norms_round_last
    activation: Activation
    attention_scale: float
    attention_softcap: float | None = None  # logits of the attention become softcap * tanh(logits / softcap) (Gemma 2)
    logits_softcap: float | None = None
    embedding_scale: float | None = None
    has_sinks: bool = False  # Family.has_sinks
    fused: tuple[str, ...] = ()  # Family.fused
    experts: ExpertShapes | None = None
    has_output_gate: bool = False  # Family.has_output_gate
    delta: DeltaShapes | None = None
    latent: LatentShapes | None = None  # of the attention, in place of heads' keys and values

    @property
    def has_plain_layers(self) -> bool:
        """As Family.has_plain_layers."""
        return FAMILIES[self.family].has_plain_layers

    @property
    def is_plain(self) -> bool:
        """Whether its layers are plain, and heads turn whole: what other draft heads are built of."""
        is_other = self.has_output_gate or self.norms_add_one or self.latent is not None
        return self.has_plain_layers and self.head_layout.order is None and not is_other

    @cached_property
    def qkv_rows(self) -> dict[str, int]:
        """Rows of the matrices that give queries, keys and values, by name."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}

    @property
    def head_orders(self) -> Mapping[str, list[int]]:
        """Of the elements of a head in our rotations (HeadLayout.order), by tensors' names within a layer."""
        if self.latent is not None:
            return self.latent.head_orders(self.head_layout)
        order = self.head_layout.order
        parts = [f"{name}_{kind}" for name in "qk" for kind in ("proj.weight", "proj.bias", "norm.weight")]
        return {} if order is None else {f"self_attn.{part}": order for part in parts}

    @property
    def beside_heads(self) -> tuple[str, ...]:
        """Matrices of those whose heads are reordered, and what is multiplied with them."""
        return tuple(self.qkv_rows) if self.latent is None else self.latent.beside_heads

    @property
    def fused_tensors(self) -> Mapping[str, Fused]:
        """Names, within a layer, of checkpoints' tensors that hold several matrices."""
        parts = {"self_attn.qkv_proj": self.qkv_rows, "mlp.gate_up_proj": gate_up_rows("mlp", self.intermediate_size)}
        fused = {
            name: Fused(parts=rows) for name, rows in parts.items() if any(f".{own}_proj" in name for own in self.fused)
        }
        if self.has_output_gate:
            queries = self.num_heads * self.head_dim
            both = {"self_attn.q_proj": queries, "self_attn.gate_proj": queries}
            fused["self_attn.q_proj"] = Fused(parts=both, num_groups=self.num_heads)
        if self.latent is not None:
            return {**fused, **self.latent.fused_tensors}
        return fused if self.delta is None else {**fused, **self.delta.fused_tensors}


def gate_up_rows(name: str, intermediate_size: int) -> dict[str, int]:
    """Rows of the matrices that an MLP of this name within a layer begins with, by name."""
    return {f"{name}.gate_proj": intermediate_size, f"{name}.up_proj": intermediate_size}


def read_architecture(config: Any) -> Architecture | None:
    """Shapes from a transformers config; None when the family is not one of ours, or its layers do more than ours.

    Raises:
        UserError: one of our families, with an option that our decoder does not have.
    """
    name = config.model_type
    architectures = config.architectures or [f"{name.capitalize()}ForCausalLM"]
    if name not in FAMILIES or not architectures[0].endswith("ForCausalLM"):
        return None
    family = FAMILIES[name]
    is_ours = all(getattr(config, key, value) == value for key, value in family.fixed_values.items())
    if family.delta_nets != "none":
        is_ours = is_ours and set(config.layer_types) <= {"linear_attention", "full_attention"}
        is_ours = is_ours and "full_attention" in config.layer_types
    if getattr(config, family.activation_key) not in family.activation_names or not is_ours:
        return None
    _require_own(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Architecture(
        family=name,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=_intermediate_size(config, family),
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        qkv_bias=_is_told(config, family.qkv_bias),
        output_bias=_is_told(config, family.output_bias),
        mlp_bias=_is_told(config, family.mlp_bias),
        qk_norm=_is_told(config, family.qk_norm),
        is_qk_norm_whole=family.is_qk_norm_whole,
        sliding_windows=_sliding_windows(config, family),
        ropes=_ropes(config, family),
        head_layout=_head_layout(config, family, head_dim),
        norms=family.norms,
        norms_add_one=family.norms_add_one,
        norms_round_last=family.norms_round_last,
        activation=family.activation,
        attention_scale=(
            latent_scale(config)
            if family.is_latent
            else float(_own(config, family, "query_pre_attn_scalar") or head_dim) ** -0.5
        ),
        attention_softcap=_own(config, family, "attn_logit_softcapping"),
        logits_softcap=_own(config, family, "final_logit_softcapping"),
        embedding_scale=float(config.hidden_size) ** 0.5 if family.is_embedding_scaled else None,
        has_sinks=family.has_sinks,
        fused=family.fused,
        experts=None if family.experts is None else _experts(config, family.experts),
        has_output_gate=family.has_output_gate,
        delta=None if family.delta_nets == "none" else read_delta_shapes(config, family),
        latent=read_latent_shapes(config) if family.is_latent else None,
    )


def _own(config: Any, family: Family, key: str, default: Any = None) -> Any:
    """What a config says by a key that the family's code reads."""
    return getattr(config, key) if key in family.reads else default


def _is_told(config: Any, told: bool | str) -> bool:
    """By the family, or by a key of the config."""
    return bool(getattr(config, told, False)) if isinstance(told, str) else told


def _intermediate_size(config: Any, family: Family) -> int:
    """Of layers' MLPs; where experts stand in all their places a config need not say it."""
    if family.experts is not None and not hasattr(config, "intermediate_size"):
        return int(getattr(config, family.experts.size_key))
    return int(config.intermediate_size)


def _experts(config: Any, mixture: Mixture) -> ExpertShapes:
    """Raises UserError for numbers of experts that cannot be."""
    for key in (mixture.count_key, mixture.choices_key, *_LAYER_KEYS[mixture.layers]):
        number, of = getattr(config, key), f"{key} of a {config.model_type} checkpoint must be"
        if number is None:
            raise UserError(f"{of} given, got null; mend its config")
        if key in _STEPS and number < 1:
            raise UserError(f"{of} >= 1, got {number}; mend its config")
    num_experts, choices = getattr(config, mixture.count_key), getattr(config, mixture.choices_key)
    if not 1 <= choices <= num_experts:
        raise UserError(
            f"{mixture.choices_key} of a {config.model_type} checkpoint must lie in [1, {num_experts}], as many as "
            f"there are experts, got {choices}; mend its config"
        )
    size = getattr(config, mixture.size_key)
    num_groups, kept_groups = _groups(config, mixture, num_experts, choices)
    return ExpertShapes(
        mixture=mixture,
        num_experts=num_experts,
        rule=RoutingRule(
            choices=choices,
            is_normalized=_is_told(config, mixture.is_normalized),
            scores=mixture.scores,
            scale=1.0 if mixture.scale_key is None else float(getattr(config, mixture.scale_key)),
            num_groups=num_groups,
            kept_groups=kept_groups,
        ),
        is_router_float32=mixture.router_digits == "float32",
        intermediate_size=size,
        shared_size=_shared_size(config, mixture, size),
        in_layers=tuple(_has_experts(config, mixture, layer) for layer in range(config.num_hidden_layers)),
    )


def _groups(config: Any, mixture: Mixture, num_experts: int, choices: int) -> tuple[int, int]:
    """(groups of experts, groups that a row goes to).

    Raises:
        UserError: groups that cannot be, or that have too few experts.
    """
    if not mixture.has_groups or config.n_group in (None, 1):
        return 1, 1
    num_groups, kept = config.n_group, config.topk_group
    of = f"of a {config.model_type} checkpoint must"
    if num_groups < 1 or num_experts % num_groups or num_experts < 2 * num_groups:
        raise UserError(
            f"n_group {of} divide {num_experts}, the experts, into groups of two and more, got {num_groups}; mend its "
            "config"
        )
    if kept is None or not 1 <= kept <= num_groups or kept * (num_experts // num_groups) < choices:
        raise UserError(
            f"topk_group {of} lie in [1, {num_groups}], and so many groups must have the {choices} experts that a row "
            f"goes to, got {kept}; mend its config"
        )
    return num_groups, kept


def _shared_size(config: Any, mixture: Mixture, size: int) -> int:
    """size: of an expert."""
    if mixture.shared is None:
        return 0
    if mixture.shared_size_key:
        return int(getattr(config, mixture.shared_size_key) or 0)
    return size * (getattr(config, mixture.shared_count_key) or 0)


# Of a config, which say by Mixture.layers what layers have experts.
_STEPS = ("decoder_sparse_step", "moe_layer_interval")
_LAYER_KEYS = {
    "all": (),
    "behind_first": ("first_k_dense_replace",),
    "by_step": ("decoder_sparse_step",),
    "by_type": ("mlp_layer_types",),
    "in_range": ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
}


def _has_experts(config: Any, mixture: Mixture, layer: int) -> bool:
    if mixture.layers == "behind_first":
        return layer >= int(config.first_k_dense_replace)
    if mixture.layers == "by_type":
        return bool(config.mlp_layer_types[layer] == "sparse")
    if mixture.layers == "in_range":
        span = range(config.moe_layer_start_index, config.moe_layer_end_index + 1)
        return layer in span and (layer + 1) % int(config.moe_layer_interval) == 0
    if mixture.layers == "by_step":
        return layer not in (config.mlp_only_layers or ()) and (layer + 1) % config.decoder_sparse_step == 0
    return True


def _require_own(config: Any) -> None:
    """Raises UserError for an option that our decoder does not have."""
    name = config.model_type
    of = f"of a {name} checkpoint{f' ({config.name_or_path})' if config.name_or_path else ''}"  # none in hf_config
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        if getattr(config, key, 1) < 1:
            raise UserError(f"{key} {of} must be >= 1, got {getattr(config, key)}; mend its config")
    if config.num_attention_heads % config.num_key_value_heads:
        raise UserError(
            f"num_attention_heads {of} must be divisible by num_key_value_heads "
            f"({config.num_key_value_heads}), got {config.num_attention_heads}; mend its config"
        )
    for key, rule in (("use_bidirectional_attention", False), ("is_causal", True)):
        if bool(getattr(config, key, rule)) != rule:  # transformers reads the latter of every decoder
            raise UserError(
                f"{key} {of} must be {str(rule).lower()}: tokens that see what follows them cannot be generated one "
                "after another; use a checkpoint of the published architecture"
            )


def _sliding_windows(config: Any, family: Family) -> tuple[int | None, ...]:
    if family.windows == "none":
        return (None,) * int(config.num_hidden_layers)
    window: int | None = config.sliding_window if _own(config, family, "use_sliding_window", True) else None
    if family.windows == "one":
        return (window,) * int(config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)


def _ropes(config: Any, family: Family) -> tuple[str | None, ...]:
    if any(isinstance(value, dict) for value in config.rope_parameters.values()):
        return tuple(config.layer_types)  # Gemma 3: each kind of layers has its own
    if family.is_rope_in_windows and config.sliding_window is not None:
        return tuple(ONE_ROPE if kind == "sliding_attention" else None for kind in config.layer_types)
    turned = _own(config, family, "no_rope_layers", [1] * int(config.num_hidden_layers))  # 0: does not turn
    return tuple(ONE_ROPE if is_turned else None for is_turned in turned)


def _head_layout(config: Any, family: Family, head_dim: int) -> HeadLayout:
    # Proportional frequencies are of whole heads, and zero where nothing turns.
    is_partial = family.is_rope_partial and config.rope_parameters.get("rope_type") != "proportional"
    factor = config.rope_parameters.get("partial_rotary_factor", 1.0) if is_partial else 1.0
    is_interleaved = _is_told(config, family.is_rope_interleaved)
    return HeadLayout(head_dim=head_dim, num_rotated=int(head_dim * factor), is_interleaved=is_interleaved)
