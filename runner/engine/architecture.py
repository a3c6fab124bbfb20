"""The decoder families we build ourselves, read from a Hugging Face config.

`read_architecture` returns what the decoder needs and nothing else, or None for a family that runs through
transformers' own modelling code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kernels.reference.act_and_mul import Activation
from runner.engine.conv_shapes import SHORT_CONV, ConvShapes, read_conv_shapes
from runner.engine.delta_shapes import IN_PLACE_OF_ATTENTION, DeltaShapes, read_delta_shapes
from runner.engine.errors import UserError
from runner.engine.expert_shapes import ExpertShapes, read_expert_shapes
from runner.engine.families import FAMILIES, GEMMA4_FAMILIES
from runner.engine.family import Family, NormNames, is_told, named, stated
from runner.engine.fused_tensors import Fused
from runner.engine.head_shapes import HeadShapes, read_head_shapes
from runner.engine.latent_shapes import LatentShapes, latent_scale, read_latent_shapes
from runner.engine.layer_kinds import MLP_BLOCKS, attention_chunks, has_mlp, mixes, norm_names, ropes, sliding_windows
from runner.engine.multipliers import NO_MULTIPLIERS, Multipliers, read_multipliers
from runner.engine.per_layer_shapes import PerLayerShapes, read_per_layer_shapes
from runner.engine.rope import RopeKey

Of = TypeVar("Of")
MOST_LAYERS = 4096  # beyond those that are published: more are a slip, and take memory one by one


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Shapes of a decoder of one of FAMILIES, and what its layers do."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_sizes: tuple[int, ...]  # per layer
    num_layers: int
    heads: tuple[HeadShapes, ...]  # per layer
    rms_norm_eps: float
    added_norm_eps: float | None = None  # of norms of what layers add, where it is another
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # bias of the attention's output projection
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over each query and key head, before rope (Qwen3)
    is_qk_norm_whole: bool  # over all query heads together, and over all key heads (OLMo 2)
    norms_turned: bool  # Family.norms_turned
    sliding_windows: tuple[int | None, ...]  # per layer: keys a query sees, itself included; None = all
    attention_chunks: tuple[int | None, ...]  # per layer: of how many tokens; None: it is not cut
    ropes: tuple[RopeKey | None, ...]  # per layer: which of the config's rotations, None = none (SmolLM3)
    norms: tuple[NormNames, ...]  # per layer
    norms_add_one: bool  # to their weights (Gemma)
    norms_round_last: bool  # Family.norms_round_last
    activation: Activation
    attention_scale: float
    attention_softcap: float | None = None  # logits of the attention become softcap * tanh(logits / softcap) (Gemma 2)
    logits_softcap: float | None = None
    embedding_scale: float | None = None
    is_input_normed: bool = False  # Family.is_input_normed
    is_last_norm_plain: bool = False  # Family.is_last_norm_plain
    multipliers: Multipliers = NO_MULTIPLIERS
    has_sinks: bool = False  # Family.has_sinks
    fused: tuple[str, ...] = ()  # Family.fused
    experts: ExpertShapes | None = None
    has_output_gate: bool = False  # Family.has_output_gate
    is_gate_apart: bool = False  # Family.is_gate_apart
    gates_heads: bool = False  # a head's gate is one number
    delta: DeltaShapes | None = None
    convs: ConvShapes | None = None  # of those that stand in place of attention
    norms_values: bool = False  # Family.norms_values
    has_layer_scales: bool = False  # Family.has_layer_scales
    per_layer: PerLayerShapes | None = None  # of inputs that layers have of their own
    latent: LatentShapes | None = None  # of the attention, in place of heads' keys and values
    mixes: tuple[bool, ...]  # per layer: whether it attends, or what stands in place of that mixes tokens
    has_mlp: tuple[bool, ...]  # per layer: an MLP, or experts

    @property
    def has_plain_layers(self) -> bool:
        """As Family.has_plain_layers."""
        return FAMILIES[self.family].has_plain_layers

    @property
    def is_plain(self) -> bool:
        """Whether its layers are plain, and heads turn whole: what other draft heads are built of."""
        is_other = self.has_output_gate or self.norms_add_one or self.latent is not None
        return self.has_plain_layers and self.heads[0].layout.order is None and not is_other

    @property
    def is_dense_gemma4(self) -> bool:
        """Whether its layers are Gemma 4's that see all, with an MLP alone and own keys: DeepSpec's heads have such."""
        is_dense = self.experts is None and self.per_layer is None
        sees_all = set(self.sliding_windows) == {None} and all(own.kv_layer is None for own in self.heads)
        return self.family in GEMMA4_FAMILIES and is_dense and sees_all

    @property
    def head_orders(self) -> Mapping[str, list[int]]:
        """Of the elements of a head in our rotations (HeadLayout.order), by tensors' names within a layer."""
        if self.latent is not None:
            return self._of_attending(self.latent.head_orders(self.heads[0].layout))
        parts = [f"{name}_{kind}" for name in "qk" for kind in ("proj.weight", "proj.bias", "norm.weight")]
        return {f"{layer}self_attn.{part}": order for layer, order in self._reordered.items() for part in parts}

    @property
    def beside_heads(self) -> tuple[str, ...]:
        """Matrices of those whose heads are reordered, and what is multiplied with them."""
        if self.latent is not None:
            return tuple(self._of_attending(dict.fromkeys(self.latent.beside_heads)))
        return tuple(f"{layer}{name}" for layer in self._reordered for name in self.heads[0].qkv_rows)

    def _of_attending(self, by_name: Mapping[str, Of]) -> Mapping[str, Of]:
        """By tensors' names within a layer: where other layers have tensors of these names, of those that attend."""
        if self.delta is None:
            return by_name
        attending = [layer for layer, has_states in enumerate(self.delta.in_layers) if not has_states]
        return {f"layers.{layer}.{name}": own for layer in attending for name, own in by_name.items()}

    @property
    def _reordered(self) -> Mapping[str, list[int]]:
        """As head_orders, by what names within a layer begin with: nothing, where all layers have one layout."""
        layouts = [own.layout for own in self.heads]
        own = {"": layouts[0]} if len(set(layouts)) == 1 else {f"layers.{at}.": own for at, own in enumerate(layouts)}
        return {layer: layout.order for layer, layout in own.items() if layout.order is not None}

    @property
    def fused_tensors(self) -> Mapping[str, Fused]:
        """Names, within a layer, of checkpoints' tensors that hold several matrices."""
        heads, mlp = self.heads[0], FAMILIES[self.family].mlp
        gate_up = gate_up_rows(mlp, self.intermediate_sizes[0])
        parts: dict[str, dict[str, dict[str, int]]] = {
            "qkv": {"self_attn.qkv_proj": heads.qkv_rows},
            "gate_up": {f"{mlp}.gate_up_proj": gate_up},
            "linears": {f"{mlp}.input_linear": gate_up, f"{mlp}.output_linear": {f"{mlp}.down_proj": self.hidden_size}},
        }
        fused = {name: Fused(parts=rows) for own in self.fused for name, rows in parts[own].items()}
        if self.has_output_gate and not self.is_gate_apart:
            queries = heads.qkv_rows["self_attn.q_proj"]
            both = {"self_attn.q_proj": queries, "self_attn.gate_proj": queries}
            fused["self_attn.q_proj"] = Fused(parts=both, num_groups=heads.num_heads)
        for layer, own in enumerate(self.heads):
            if own.are_values_keys:
                name, rows = f"layers.{layer}.self_attn", own.qkv_rows
                both = {f"{name}.{part}_proj": rows[f"self_attn.{part}_proj"] for part in "kv"}
                fused[f"{name}.k_proj"] = Fused(parts=both, is_repeated=True)
        for shapes in (self.latent, self.delta, self.convs):
            fused |= {} if shapes is None else shapes.fused_tensors
        return fused

    @property
    def keys_of_values(self) -> dict[str, str]:
        """Names, within a model, of what makes values -> of what makes keys, where one tensor is both."""
        layers = [layer for layer, own in enumerate(self.heads) if own.are_values_keys]
        names = [(f"layers.{layer}.self_attn", kind) for layer in layers for kind in ("weight", "bias")]
        return {f"{name}.v_proj.{kind}": f"{name}.k_proj.{kind}" for name, kind in names}

    @property
    def unread(self) -> frozenset[str]:
        """Names of checkpoints' tensors that mean nothing: keys and values of layers that see those of others."""
        others = [layer for layer, own in enumerate(self.heads) if own.kv_layer is not None]
        kinds = {"k_proj": ("weight", "bias"), "v_proj": ("weight", "bias"), "k_norm": ("weight",)}
        names = [f"{name}.{kind}" for name, own in kinds.items() for kind in own]
        return frozenset(f"model.layers.{layer}.self_attn.{name}" for layer in others for name in names)


def are_names(values: Any) -> bool:
    """Whether it is a list of strings, as `architectures` of a config must be."""
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


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
    if not are_names(architectures):
        raise UserError(
            f"architectures of a {name} checkpoint{named(config)} must be a list of names, got {architectures!r}; mend "
            "its config"
        )
    if name not in FAMILIES or not architectures[0].endswith("ForCausalLM"):
        return None
    family = FAMILIES[name]
    is_ours = all(_found(config, key, value) == value for key, value in family.fixed_values.items())
    if config.architectures and family.architectures:
        is_ours = is_ours and architectures[0] in family.architectures
    if family.delta_nets is not None or family.has_short_convs:
        if config.layer_types is None:
            raise UserError(f"layer_types of a {name} checkpoint must list its layers, got None; mend its config")
        in_place = {SHORT_CONV} if family.has_short_convs else set(IN_PLACE_OF_ATTENTION)
        others = set(config.layer_types) - in_place - set(MLP_BLOCKS if family.has_blocks else ())
        attending = {"attention", "full_attention", *(["sliding_attention"] if family.windows == "by_layer" else [])}
        is_ours = is_ours and set() < others <= attending
    activation = getattr(config, family.activation_key, family.activation_names[0])
    if activation not in family.activation_names or not is_ours:
        return None
    _require_own(config)
    heads, multipliers = read_head_shapes(config, family), read_multipliers(config, family)
    return Architecture(
        family=name,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_sizes=_intermediate_sizes(config, family, heads),
        num_layers=config.num_hidden_layers,
        heads=heads,
        rms_norm_eps=getattr(config, family.eps_key),
        added_norm_eps=stated(config, family, "post_norm_eps"),
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        qkv_bias=is_told(config, family.qkv_bias),
        output_bias=is_told(config, family.output_bias),
        mlp_bias=is_told(config, family.mlp_bias),
        qk_norm=is_told(config, family.qk_norm),
        is_qk_norm_whole=family.is_qk_norm_whole,
        norms_turned=family.norms_turned,
        sliding_windows=sliding_windows(config, family),
        attention_chunks=attention_chunks(config, family),
        ropes=ropes(config, family),
        norms=norm_names(config, family),
        norms_add_one=family.norms_add_one,
        norms_round_last=family.norms_round_last,
        activation=family.activation,
        attention_scale=_attention_scale(config, family, heads[0].head_dim),
        attention_softcap=stated(config, family, "attn_logit_softcapping"),
        logits_softcap=_logits_softcap(config, family, multipliers),
        embedding_scale=float(config.hidden_size) ** 0.5 if family.is_embedding_scaled else None,
        is_input_normed=family.is_input_normed,
        is_last_norm_plain=family.is_last_norm_plain,
        multipliers=multipliers,
        has_sinks=family.has_sinks,
        fused=family.fused,
        experts=read_expert_shapes(config, family.experts),
        has_output_gate=family.has_output_gate,
        is_gate_apart=family.is_gate_apart,
        gates_heads=family.gates_heads is not None and getattr(config, family.gates_heads) in (True, "per-head"),
        delta=_delta_shapes(config, family),
        convs=read_conv_shapes(config) if family.has_short_convs else None,
        norms_values=family.norms_values,
        has_layer_scales=family.has_layer_scales,
        per_layer=read_per_layer_shapes(config, family),
        latent=read_latent_shapes(config, family) if family.is_latent else None,
        mixes=mixes(config, family),
        has_mlp=has_mlp(config, family),
    )


def _delta_shapes(config: Any, family: Family) -> DeltaShapes | None:
    """None where all layers attend."""
    if family.delta_nets is None or set(config.layer_types).isdisjoint(IN_PLACE_OF_ATTENTION):
        return None
    return read_delta_shapes(config, family)


def _found(config: Any, key: str, default: Any) -> Any:
    """What a config says, of a list as a tuple."""
    found = getattr(config, key, default)
    return tuple(found) if isinstance(found, list) else found


def _attention_scale(config: Any, family: Family, head_dim: int) -> float:
    if family.is_latent:
        return latent_scale(config, family)
    if family.has_multipliers:
        return float(config.attention_multiplier)
    if family.norms_values:
        return 1.0
    factor = stated(config, family, "qk_scale_factor", 1.0)  # of queries
    return float(factor * float(stated(config, family, "query_pre_attn_scalar") or head_dim) ** -0.5)


def _logits_softcap(config: Any, family: Family, multipliers: Multipliers) -> float | None:
    """In front of the multiplier of logits: with one m that a config has in front of its cap c, as Muse Glimmer's,
    c tanh(m x / c) is m times the logits x capped at c / m."""
    cap = stated(config, family, "final_logit_softcapping")
    return cap if cap is None or multipliers.logits is None else float(cap) / multipliers.logits


def _intermediate_sizes(config: Any, family: Family, heads: Sequence[HeadShapes]) -> tuple[int, ...]:
    """Of layers' MLPs; where experts stand in all their places a config need not say it."""
    if family.experts is not None and not hasattr(config, family.mlp_size_key):
        return (int(getattr(config, family.experts.size_key)),) * len(heads)
    is_wider = stated(config, family, "use_double_wide_mlp", False)  # where layers see others' keys and values
    size = _cut_size(config, int(getattr(config, family.mlp_size_key)), family)
    return tuple(size * (2 if is_wider and own.kv_layer is not None else 1) for own in heads)


def _cut_size(config: Any, size: int, family: Family) -> int:
    """Of an MLP, of what a config says: LFM2 may mean two thirds of it, in whole blocks."""
    if not stated(config, family, "block_auto_adjust_ff_dim", False):
        return size
    cut, block = int(config.block_ffn_dim_multiplier * int(2 * size / 3)), config.block_multiple_of
    return int(-(-cut // block) * block)


def _require_own(config: Any) -> None:
    """Raises UserError for an option that our decoder does not have."""
    name = config.model_type
    of = f"of a {name} checkpoint{named(config)}"
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
    for key in sizes:
        size = getattr(config, key, None)
        if size is not None and size < 1:
            raise UserError(f"{key} {of} must be >= 1, got {size}; mend its config")
    if config.num_hidden_layers > MOST_LAYERS:
        raise UserError(
            f"num_hidden_layers {of} must be <= {MOST_LAYERS}, got {config.num_hidden_layers}; mend its config"
        )
    # Of families that do not publish them, too: transformers reads is_causal in every config.
    for key, rule in (("use_bidirectional_attention", False), ("is_causal", True)):
        told = getattr(config, key, rule)
        if bool(told) != rule and told != "vision":  # "vision": of images' tokens alone
            raise UserError(
                f"{key} {of} must be {str(rule).lower()}: tokens that see what follows them cannot be generated one "
                "after another; use a checkpoint of the published architecture"
            )
