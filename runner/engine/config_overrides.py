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


def overridden(values: Mapping[str, Any], config: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config with others in their places; those of a config within it are changed one by one.

    Another scaling of rotations keeps their base and the part of a head that turns, unless it has others, and where
    kinds of layers have their own those of kinds that it does not name.

    Args:
        values, config: as they are in a file, and as transformers reads them.
    """
    found = dict(values)
    for key, value in overrides.items():
        own, stated = found.get(key), _rope(config)
        if key.endswith("_config") and isinstance(own, Mapping) and isinstance(value, Mapping):
            found[key] = overridden(own, _within(config, key), value)
        elif key in ROPE_KEYS:
            kept = stated if _is_by_kind(stated) else {name: stated[name] for name in OF_ANY_ROPE if name in stated}
            found = _with_rope(found, {**kept, **(value or {})})
        else:
            found[key] = value
            if key in OF_ANY_ROPE:
                found = _with_rope(found, {**stated, key: value})
    return found


def _with_rope(values: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """In today's key alone."""
    others = {key: value for key, value in values.items() if key not in ROPE_KEYS}
    return {**others, "rope_parameters": dict(rope)}


def require_overridable(values: Mapping[str, Any], config: Any, overrides: Mapping[str, Any], name: str) -> None:
    """
    Args:
        values, config: as overridden takes them.
        name: the option that the overrides are of.

    Raises:
        UserError: a key that means nothing to the config, or one that cannot be overridden.
    """
    for problem in _problems(values, config, overrides, ""):
        raise UserError(f"{name} must {problem}")


def _problems(values: Mapping[str, Any], config: Any, overrides: Mapping[str, Any], prefix: str) -> Iterator[str]:
    known, stated = [*values, *(key for key in _keys(config) if not key.startswith("_"))], _rope(config)
    known += [*ROPE_KEYS, *OF_ANY_ROPE] if stated else []
    for key, value in overrides.items():
        own, is_mapping = values.get(key), isinstance(value, Mapping)
        if remedy := NOT_OVERRIDDEN.get(key):
            yield f"not have {prefix}{key}; {remedy}"
        elif key not in known and callable(getattr(config, key, len)):
            inner = [name for name in values if name.endswith("_config") and isinstance(values[name], Mapping)]
            other = next((name for name in inner if key in _keys(_within(config, name))), None)
            remedy = did_you_mean(key, sorted(set(known))) if other is None else f"it is one of {other}: {{{key}: ...}}"
            yield f"have keys of the checkpoint's config.json, got {prefix + key!r}; {remedy}"
        elif _is_by_kind(stated) and (
            key in OF_ANY_ROPE or (key in ROPE_KEYS and not (is_mapping and all(map(_is_mapping, value.values()))))
        ):
            kinds = [kind for kind, of_kind in stated.items() if _is_mapping(of_kind)]
            yield (
                f"have rotations by kinds of layers ({', '.join(kinds)}), got {prefix}{key}; write "
                f"{prefix}rope_parameters={{{kinds[0]}: {{...}}}}"
            )
        elif key.endswith("_config") and isinstance(own, Mapping) and isinstance(value, Mapping):
            yield from _problems(own, _within(config, key), value, f"{prefix}{key}.")


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_by_kind(rope: Mapping[str, Any]) -> bool:
    return any(map(_is_mapping, rope.values()))


def _rope(config: Any) -> Mapping[str, Any]:
    """What transformers reads of a config's rotations; nothing where it has none."""
    found = _within(config, "rope_parameters")
    return found if isinstance(found, Mapping) else {}


def _within(config: Any, key: str) -> Any:
    """A part of a config, which may be no more than a mapping itself."""
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)


def _keys(config: Any) -> list[str]:
    return list(config if isinstance(config, Mapping) else vars(config))
