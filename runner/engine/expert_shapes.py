"""Shapes of mixtures of experts, and which layers have one, read from a config."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kernels.reference.experts import RoutingRule
from runner.engine.errors import UserError
from runner.engine.family import is_told
from runner.engine.mixture import Mixture

LATENT_NAMES = ("fc1_latent_proj", "fc2_latent_proj")  # within the block: to a latent of a row, and from it


@dataclass(frozen=True, kw_only=True)
class ExpertShapes:
    """The mixtures of experts that stand in place of layers' MLPs, or beside them."""

    mixture: Mixture
    num_experts: int
    rule: RoutingRule
    is_router_float32: bool  # whatever dtype rows have
    intermediate_size: int  # of an expert
    latent_size: int | None  # of what experts read and leave; None: the hidden size
    shared_size: int  # intermediate, of the MLP beside them; 0: there is none
    in_layers: tuple[bool, ...]  # of each layer; the others have an MLP alone
    # Of each of the first layers, or none: what is gated is cut off there (LimitedSilu), of experts and of `shared`.
    limits: tuple[float | None, ...] = ()
    shared_limits: tuple[float | None, ...] = ()

    @property
    def router_name(self) -> str:
        """In the checkpoint, within a layer."""
        return self.mixture.named(self.mixture.router)

    @property
    def prefix(self) -> str:
        """Of the names of experts' tensors, within a layer."""
        return self.mixture.named("experts.")

    @property
    def stack_names(self) -> tuple[str, str]:
        """Of the tensors that hold all experts' gate and up, and down, within a layer, where there are such."""
        first, last = map(self.mixture.named, self.mixture.stack_names)
        return first, last

    @property
    def latent_names(self) -> tuple[str, str]:
        """Of the projections to what experts read and from what they leave, within a layer."""
        to_latent, from_latent = map(self.mixture.named, LATENT_NAMES)
        return to_latent, from_latent

    @property
    def corrections_name(self) -> str | None:
        """Of the tensor that scores are corrected by, within a layer."""
        return None if self.mixture.corrections is None else self.mixture.named(self.mixture.corrections)

    @property
    def factors_name(self) -> str | None:
        """Of the tensor that has a factor of each expert's weights, within a layer."""
        return None if self.mixture.factors is None else self.mixture.named(self.mixture.factors)

    @property
    def shared_gate_name(self) -> str | None:
        """Of the tensor that gates the MLP beside them, within a layer."""
        return None if self.mixture.shared_gate is None else self.mixture.named(f"{self.mixture.shared_gate}.weight")

    @property
    def shared_name(self) -> str:
        """Of the MLP beside them, within a layer."""
        assert self.mixture.shared is not None
        return self.mixture.named(self.mixture.shared)

    def names_of(self, expert: int) -> list[str]:
        """Of its gate, where it has one, up and down projections."""
        return [f"{self.prefix}{expert}.{name}" for name in self.mixture.projections]


def read_expert_shapes(config: Any, mixture: Mixture | None) -> ExpertShapes | None:
    """From a transformers config, of a family's mixture; raises UserError for numbers of experts that cannot be."""
    if mixture is None or not is_told(config, mixture.is_there):
        return None
    told = {key: _number(config, key) for key in (mixture.count_key, mixture.choices_key)}
    for key, number in (told | {key: getattr(config, key) for key in _LAYER_KEYS[mixture.layers]}).items():
        of = f"{key} of a {config.model_type} checkpoint must be"
        if number is None:
            raise UserError(f"{of} given, got null; mend its config")
        if key in _STEPS and number < 1:
            raise UserError(f"{of} >= 1, got {number}; mend its config")
    num_experts, choices = told[mixture.count_key], told[mixture.choices_key]
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
            is_normalized=is_told(config, mixture.is_normalized),
            scores=mixture.scores,
            scale=1.0 if mixture.scale_key is None else float(getattr(config, mixture.scale_key)),
            num_groups=num_groups,
            kept_groups=kept_groups,
        ),
        is_router_float32=mixture.router_digits == "float32",
        intermediate_size=size,
        latent_size=_latent_size(config, mixture),
        shared_size=_shared_size(config, mixture, size),
        in_layers=tuple(_has_experts(config, mixture, layer) for layer in range(config.num_hidden_layers)),
        limits=_limits(config, mixture.limits_key),
        shared_limits=_limits(config, mixture.shared_limits_key),
    )


def _limits(config: Any, key: str | None) -> tuple[float | None, ...]:
    """Of layers, as a config lists them; 0: there is none."""
    told = None if key is None else getattr(config, key, None)
    if told is None:
        return ()
    is_list = isinstance(told, list | tuple) and len(told) >= config.num_hidden_layers
    if not is_list or not all(one is None or (_is_number(one) and 0 <= one < math.inf) for one in told):
        raise UserError(
            f"{key} of a {config.model_type} checkpoint must list a number >= 0 for each of its "
            f"{config.num_hidden_layers} layers, got {told!r}; mend its config"
        )
    return tuple(float(one) if one else None for one in told)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(config: Any, key: str) -> Any:
    """Of all layers, which Hunyuan's configs may list one by one; raises UserError where they differ."""
    told = getattr(config, key)
    if not isinstance(told, list):
        return told
    if len(set(told)) != 1:
        raise UserError(
            f"{key} of a {config.model_type} checkpoint must be one for all layers, got {told}; choose another model"
        )
    return told[0]


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


def _latent_size(config: Any, mixture: Mixture) -> int | None:
    size = None if mixture.latent_key is None else getattr(config, mixture.latent_key)
    if size is not None and size < 1:
        raise UserError(
            f"{mixture.latent_key} of a {config.model_type} checkpoint must be >= 1, got {size}; mend its config"
        )
    return None if size is None else int(size)


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
    "behind_dense": ("num_dense_layers",),
    "behind_first": ("first_k_dense_replace",),
    "by_block": ("layer_types",),
    "by_step": ("decoder_sparse_step",),
    "by_type": ("mlp_layer_types",),
    "listed": ("moe_layers",),
    "in_range": ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
}


def _has_experts(config: Any, mixture: Mixture, layer: int) -> bool:
    if mixture.layers in ("behind_dense", "behind_first"):
        (number_of_dense,) = _LAYER_KEYS[mixture.layers]
        return layer >= int(getattr(config, number_of_dense))
    if mixture.layers == "listed":
        return layer in config.moe_layers
    if mixture.layers == "by_block":
        return bool(config.layer_types[layer] == "moe")
    if mixture.layers == "by_type":
        return bool(config.mlp_layer_types[layer] == "sparse")
    if mixture.layers == "in_range":
        span = range(config.moe_layer_start_index, config.moe_layer_end_index + 1)
        return layer in span and (layer + 1) % int(config.moe_layer_interval) == 0
    if mixture.layers == "by_step":
        return layer not in (config.mlp_only_layers or ()) and (layer + 1) % config.decoder_sparse_step == 0
    return True
