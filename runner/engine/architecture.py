"""The decoder families we build ourselves, read from a Hugging Face config.

`read_architecture` returns what the decoder needs and nothing else, or None for a family that runs through
transformers' own modelling code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from runner.engine.errors import UserError

# What a family fixes in code rather than in its config.
_QKV_BIAS = {"qwen2": True, "mimo": True, "mistral": False, "ministral": False, "phi3": False}
_QK_NORM = {"qwen3": True, "qwen3_moe": True}
FAMILIES = ("llama", "mimo", "ministral", "mistral", "phi3", "qwen2", "qwen3", "seed_oss")
EXPERT_FAMILIES = ("mixtral", "qwen3_moe")
_BLOCK_OF_EXPERTS = {"mixtral": "block_sparse_moe", "qwen3_moe": "mlp"}
_PROJECTIONS = {"mixtral": ("w1", "w3", "w2"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}  # gate, up, down


@dataclass(frozen=True, kw_only=True)
class ExpertShapes:
    """The mixtures of experts that stand in place of layers' MLPs."""

    family: str
    num_experts: int
    choices: int  # experts that a row goes to
    intermediate_size: int  # of an expert
    is_normalized: bool  # the weights of a row's experts add up to 1
    in_layers: tuple[bool, ...]  # of each layer; the others have an MLP

    @property
    def router_name(self) -> str:
        """In the checkpoint, within a layer."""
        return f"{_BLOCK_OF_EXPERTS[self.family]}.gate"

    def names_of(self, expert: int) -> tuple[str, str, str]:
        """Of its gate, up and down projections."""
        gate, up, down = (
            f"{_BLOCK_OF_EXPERTS[self.family]}.experts.{expert}.{name}" for name in _PROJECTIONS[self.family]
        )
        return gate, up, down


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Shapes of a pre-norm decoder of FAMILIES or EXPERT_FAMILIES."""

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
    sliding_windows: tuple[int | None, ...]  # per layer: keys a query sees, itself included; None = all
    experts: ExpertShapes | None = None

    @cached_property
    def qkv_rows(self) -> dict[str, int]:
        """Rows of the matrices that give queries, keys and values, by name."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}

    @cached_property
    def gate_up_rows(self) -> dict[str, int]:
        return {"mlp.gate_proj": self.intermediate_size, "mlp.up_proj": self.intermediate_size}

    @property
    def fused_tensors(self) -> Mapping[str, Mapping[str, int]]:
        """Names, within a layer, of checkpoints' tensors that hold several matrices, and the rows of these."""
        if self.family != "phi3":
            return {}
        return {"self_attn.qkv_proj": self.qkv_rows, "mlp.gate_up_proj": self.gate_up_rows}


def read_architecture(config: Any) -> Architecture | None:
    """Shapes from a transformers config; None when the family is not one of ours.

    Raises:
        UserError: one of our families, with an option that our decoder does not have.
    """
    family = config.model_type
    architectures = config.architectures or [f"{family.capitalize()}ForCausalLM"]
    if family not in (*FAMILIES, *EXPERT_FAMILIES) or not architectures[0].endswith("ForCausalLM"):
        return None
    if family == "phi3" and config.rope_parameters["partial_rotary_factor"] != 1.0:
        return None  # our rotations are of whole heads
    _require_own(config, family)
    attention_bias = bool(getattr(config, "attention_bias", False))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Architecture(
        family=family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        qkv_bias=_QKV_BIAS.get(family, attention_bias),
        output_bias=bool(getattr(config, "attention_out_bias", False))
        or (attention_bias and family in ("llama", "qwen3", "qwen3_moe")),
        mlp_bias=bool(getattr(config, "mlp_bias", False)) and family in ("llama", "seed_oss"),
        qk_norm=_QK_NORM.get(family, False),
        sliding_windows=_sliding_windows(config),
        experts=_experts(config) if family in EXPERT_FAMILIES else None,
    )


def _experts(config: Any) -> ExpertShapes:
    """Raises UserError for numbers of experts that cannot be."""
    is_mixtral, num_layers = config.model_type == "mixtral", config.num_hidden_layers
    num_experts, choices = config.num_local_experts if is_mixtral else config.num_experts, config.num_experts_per_tok
    if not 1 <= choices <= num_experts:
        raise UserError(
            f"num_experts_per_tok of a {config.model_type} checkpoint must lie in [1, {num_experts}], as many as "
            f"there are experts, got {choices}; mend its config"
        )
    dense, step = ((), 1) if is_mixtral else (config.mlp_only_layers or (), config.decoder_sparse_step)
    return ExpertShapes(
        family=config.model_type,
        num_experts=num_experts,
        choices=choices,
        intermediate_size=config.intermediate_size if is_mixtral else config.moe_intermediate_size,
        is_normalized=is_mixtral or bool(config.norm_topk_prob),
        in_layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
    )


def _require_own(config: Any, family: str) -> None:
    """Raises UserError for an option that our decoder does not have."""
    of = f"of a {family} checkpoint{f' ({config.name_or_path})' if config.name_or_path else ''}"  # none in hf_config
    if config.hidden_act != "silu":
        raise UserError(
            f"hidden_act {of} must be 'silu', got {config.hidden_act!r}; use a checkpoint of the published architecture"
        )
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        if getattr(config, name) < 1:
            raise UserError(f"{name} {of} must be >= 1, got {getattr(config, name)}; mend its config")
    if config.num_attention_heads % config.num_key_value_heads:
        raise UserError(
            f"num_attention_heads {of} must be divisible by num_key_value_heads "
            f"({config.num_key_value_heads}), got {config.num_attention_heads}; mend its config"
        )


def _sliding_windows(config: Any) -> tuple[int | None, ...]:
    window: int | None = getattr(config, "sliding_window", None)
    if config.model_type in ("llama", "seed_oss"):
        return (None,) * int(config.num_hidden_layers)
    # One window for all layers; a mistral with layer_types is another family, ministral.
    if config.model_type in ("mistral", "phi3", *EXPERT_FAMILIES):
        return (window,) * int(config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)
