"""What a family of decoders fixes in code rather than in its config, as the table of families says it of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from kernels.reference.act_and_mul import Activation
from kernels.reference.gate import GateFunction
from runner.engine.mixture import Mixture

# How tensors of gated delta nets hold projections together: matrix by matrix (Qwen3.5), or a key head and its value
# heads at a time (Qwen3-Next); or how those of Mamba-2's layers do. The others' have a tensor for each matrix.
DeltaLayout = Literal["by_matrix", "by_key_head", "mamba", "olmo", "kimi", "ling"]


class StateKeys(NamedTuple):
    """Of a config: numbers of heads, their sizes, tokens that a convolution sees, and whether there are biases."""

    num_key_heads: str
    num_value_heads: str
    key_dim: str
    value_dim: str
    taps: str
    biases: str = ""  # of projections; "": there are none, as the next
    convolution_bias: str = ""
    writes_twice: str = ""  # whether twice as much as a sigmoid says; "": it is not


@dataclass(frozen=True, kw_only=True)
class NormNames:
    """Of a layer, in the checkpoint; None: there is no such norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None  # over what attention adds to the residual stream
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


PRE_NORMS = NormNames()


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
    # Their names in the checkpoint, within the attention; None: they have no weights, and where they stand behind rope
    # heads that do not turn have none.
    head_norms: tuple[str, str] | None = ("q_norm", "k_norm")
    windows: Literal["none", "one", "by_layer"] = "none"  # one: the config's for all layers
    has_chunks: bool = False  # layers of type chunked_attention see the config's attention_chunk_size at a time
    norms: NormNames = PRE_NORMS
    norms_in_place: NormNames | None = None  # of layers that do not attend, where these have others
    norms_add_one: bool = False  # to their weights
    is_last_norm_plain: bool = False  # to the weight of the norm behind all layers nothing is added
    norms_round_last: bool = False  # their weights multiply what is not yet rounded
    activation: Activation = "silu"
    is_mlp_gated: bool = True  # else an MLP squares what of its first product is positive
    activation_key: str = "hidden_act"  # of the config; one without it means the first of the next
    activation_names: tuple[str, ...] = ("silu",)  # as configs spell it; with another one layers are not ours
    # By keys of the config; with others layers are not ours.
    fixed_values: Mapping[str, float | str | tuple[float, ...] | None] = field(default_factory=dict)
    is_embedding_scaled: bool = False  # by the root of the hidden size, rounded as embeddings are
    is_input_scaled: bool | str = False  # likewise, on its way from the table into the first layer, and not rounded
    is_input_normed: bool = False  # likewise, by no weights
    has_multipliers: bool = False  # of what enters layers, of what they add, of logits (runner.engine.multipliers)
    is_rope_partial: bool = False  # the config's partial_rotary_factor says how much of a head turns
    is_rope_interleaved: bool | str = False  # neighbours turn together, not the halves of what is rotated
    has_bases_by_layer: bool = False  # where it reads layer_rope_theta; else that says who turns
    is_rope_in_windows: bool = False  # and nothing turns in layers that see all, where others have windows
    architectures: tuple[str, ...] = ()  # as configs name them, where others have the model_type too
    has_rope: bool = True
    ignores_rotary_factor: bool = False  # as large as heads' turned part is stated, all of it turns
    is_rope_optional: bool = False  # where a config has no rope_theta nothing turns
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
    gate: str = "gate_proj"  # the name of that tensor's module in the checkpoint, within the attention
    gate_function: GateFunction = "sigmoid"
    gates_heads: str | None = None  # key of the config, which says whether a head's gate is one number
    has_short_convs: bool = False  # layers of type conv have one in place of attention
    delta_nets: DeltaLayout | None = None  # of layers that do not attend
    state_keys: StateKeys | None = None  # of the config, of those
    is_latent: bool = False  # keys and values of all heads are read from one latent of a token (arXiv 2405.04434)
    experts: Mixture | None = None

    @property
    def has_plain_layers(self) -> bool:
        """Llama's but for biases, norms, gates and rotations of heads, windows and experts: MTP modules' are such."""
        of_input = self.is_embedding_scaled or bool(self.is_input_scaled) or self.is_input_normed
        is_scaled = of_input or self.has_multipliers
        of_heads = self.has_sinks or self.has_chunks or self.is_qk_norm_whole or self.norms_turned
        of_mlp = self.activation != "silu" or not self.is_mlp_gated
        is_other = of_heads or of_mlp or self.is_rope_in_windows or self.has_blocks
        return self.norms is PRE_NORMS and not (is_scaled or is_other or self.reads)


def is_told(config: Any, told: bool | str) -> bool:
    """By the family, or by a key of the config."""
    return bool(getattr(config, told, False)) if isinstance(told, str) else told


def stated(config: Any, family: Family, key: str, default: Any = None) -> Any:
    """What a config says by a key that the family's code reads."""
    return getattr(config, key, default) if key in family.reads else default


def named(config: Any) -> str:
    """Whose config it is, for errors."""
    return f" ({config.name_or_path})" if config.name_or_path else ""
