"""The layers of poolside's DFlash drafters for Laguna, read from their config: dense ones of that family, all alike.

Hazard: the config may name one base for all rotations (rope_theta), where a Laguna's names some by layer type. What
transformers takes where there are none is another base, and turns half a head in layers that see all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proposers.heads.head_sizes import head_size
from runner.engine.architecture import Architecture, read_architecture
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.head_checkpoint import read_own_config
from runner.engine.rope import warn_of_unread_rope

CLASS = "DFlashLagunaForCausalLM"
# Keys of what its layers may not have, and the values with which they have none of it.
_ABSENT: dict[str, tuple[Any, ...]] = {"num_experts": (None, 0), "swa_attention_sink_enabled": (None, False)}
# What rows see is up to the method, and transformers would make other rotations of keys beside those by type.
_READ_HERE = ("auto_map", "is_causal", "rope_theta", "rope_scaling", "partial_rotary_factor")


def is_laguna(values: Mapping[str, Any]) -> bool:
    """Whether a config is of such a head."""
    return CLASS in (values.get("architectures") or ())


def read_laguna_layers(values: Mapping[str, Any], source: ModelSource) -> tuple[Architecture, Any]:
    """As head_architecture.

    Raises:
        UserError: layers that are none of Laguna's, or that differ from each other, or no base of rotations.
    """
    number = head_size(values, "num_hidden_layers", 0, source)
    kinds = values.get("layer_types") or ["full_attention"] * number
    told = {key: value for key, value in values.items() if value is not None and key not in _READ_HERE}
    own = {
        "architectures": ["LagunaForCausalLM"],
        "layer_types": kinds,
        "mlp_layer_types": ["dense"] * number,
        "num_experts": 0,
        "rope_parameters": {kind: _rope_parameters(values, kind, source) for kind in kinds},
    }
    config = read_own_config("laguna", {**told, **own}, source)
    warn_of_unread_rope(config, f"{source.name}={source.model}")
    arch = read_architecture(config)
    found = [f"{key}={values[key]!r}" for key, absent in _ABSENT.items() if values.get(key) not in absent]
    is_alike = arch is not None and len(set(kinds)) == len(set(arch.heads)) == 1
    if arch is None or not is_alike or arch.heads[0].layout.order is not None or found:
        got = f", got {', '.join(found)}" if found else ""
        raise UserError(
            f"{source.name}={source.model}: the layers of its config.json must be Laguna's with hidden_act 'silu', all "
            "of one type (layer_types) and as many heads, with rotations of whole heads, without experts and attention "
            f"sinks{got}; choose such a head"
        )
    return arch, config


def _rope_parameters(values: Mapping[str, Any], kind: str, source: ModelSource) -> dict[str, Any]:
    """Of layers of this type; what rope_parameters say counts before what older configs say without them."""
    parameters, scaling = values.get("rope_parameters") or {}, values.get("rope_scaling") or {}
    is_by_type = any(isinstance(own, Mapping) for own in parameters.values())
    own = (parameters.get(kind) or {}) if is_by_type else parameters
    if not isinstance(own, Mapping):
        raise UserError(
            f"{source.name}={source.model}: rope_parameters in its config must be a mapping for {kind}, got {own!r}; "
            "mend it or download the head again"
        )
    found = {
        "rope_type": own.get("type", scaling.get("type", "default")),
        "rope_theta": values.get("rope_theta"),
        "partial_rotary_factor": values.get("partial_rotary_factor") or 1.0,
        **scaling,
        **own,
    }
    for key in ("rope_theta", "partial_rotary_factor"):
        number = found[key]
        if not isinstance(number, int | float) or isinstance(number, bool) or number <= 0:
            raise UserError(
                f"{source.name}={source.model}: {key} in its config must be a number > 0, got {number!r}; mend it or "
                "download the head again"
            )
    return found
