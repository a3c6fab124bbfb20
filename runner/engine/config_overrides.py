"""Values that take the place of those of a checkpoint's config.json, as vLLM's hf_overrides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runner.engine.errors import UserError
from runner.engine.nearest_names import did_you_mean

ROPE_KEYS = ("rope_parameters", "rope_scaling")  # of newer and older configs
OF_ANY_ROPE = ("rope_theta", "partial_rotary_factor")  # what another scaling leaves as it is
# What these say is read elsewhere too, or decides which code reads the rest.
NOT_OVERRIDDEN = {
    "architectures": "choose a checkpoint of another architecture",
    "auto_map": "set model.trust_remote_code=true to run a checkpoint's own code",
    "model_type": "choose a checkpoint of another family",
    "quantization_config": "use model.quantization",
}


def overridden(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config with others in their places; those of a config within it are changed one by one.

    Another scaling of rotations keeps their base and the part of a head that turns, unless it has others.
    """
    found = dict(values)
    for key, value in overrides.items():
        own = found.get(key)
        if key.endswith("_config") and isinstance(own, Mapping) and isinstance(value, Mapping):
            found[key] = overridden(own, value)
        elif key in ROPE_KEYS:
            stated = _rope(found)
            kept = {name: stated[name] for name in OF_ANY_ROPE if name in stated}
            found |= {"rope_scaling": None, "rope_parameters": kept | dict(value or {})}
        else:
            found[key] = value
            if key in OF_ANY_ROPE and key in (stated := _rope(found)):  # which comes first
                found |= {"rope_scaling": None, "rope_parameters": {**stated, key: value}}
    return found


def _rope(values: Mapping[str, Any]) -> Mapping[str, Any]:
    stated = (values.get(name) for name in ROPE_KEYS)
    return next((own for own in stated if isinstance(own, Mapping)), {})


def require_overridable(values: Mapping[str, Any], config: Any, overrides: Mapping[str, Any], name: str) -> None:
    """
    Args:
        values, config: of the checkpoint, as they are in its file and as transformers reads them.
        name: the option that the overrides are of.

    Raises:
        UserError: a key that means nothing to the config, or one that cannot be overridden.
    """
    for key, options in _unknown_keys(values, config, overrides, ""):
        if remedy := NOT_OVERRIDDEN.get(key):
            raise UserError(f"{name} must not have {key}; {remedy}")
        remedy = did_you_mean(key.rpartition(".")[2], options)
        raise UserError(f"{name} must have keys of the checkpoint's config.json, got {key!r}; {remedy}")


def _unknown_keys(
    values: Mapping[str, Any], config: Any, overrides: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, list[str]]]:
    """And what keys there are beside each."""
    known = [*values, *(key for key in vars(config) if not key.startswith("_"))]
    known += [*ROPE_KEYS, *OF_ANY_ROPE] if getattr(config, "rope_parameters", None) is not None else []
    for key, value in overrides.items():
        own = values.get(key)
        if key in NOT_OVERRIDDEN or (key not in known and not hasattr(config, key)):
            yield f"{prefix}{key}", sorted(set(known))
        elif key.endswith("_config") and isinstance(own, Mapping) and isinstance(value, Mapping):
            yield from _unknown_keys(own, getattr(config, key), value, f"{prefix}{key}.")
