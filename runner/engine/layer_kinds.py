"""What each layer of a decoder is: which keys it sees, whether it turns, and whether it is one thing, by its config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner.engine.delta_shapes import IN_PLACE_OF_ATTENTION
from runner.engine.errors import UserError
from runner.engine.family import Family, NormNames, named, stated
from runner.engine.rope import ONE_ROPE, RopeKey

FULL, SLIDING = "full_attention", "sliding_attention"  # in layer_types: layers that see all, or a window
# Where a layer is one thing.
MLP_BLOCKS, MIXING_BLOCKS = ("mlp", "moe"), (FULL, "linear_attention")


def sliding_windows(config: Any, family: Family) -> tuple[int | None, ...]:
    if family.windows == "none":
        return (None,) * int(config.num_hidden_layers)
    window: int | None = config.sliding_window if stated(config, family, "use_sliding_window", True) else None
    if family.windows == "one":
        return (window,) * int(config.num_hidden_layers)
    return tuple(window if kind == SLIDING else None for kind in config.layer_types)


def ropes(config: Any, family: Family) -> tuple[RopeKey | None, ...]:
    is_optional = family.is_rope_optional and (config.rope_parameters or {}).get("rope_theta") is None
    if not family.has_rope or is_optional:
        return (None,) * int(config.num_hidden_layers)
    _require_bases(config)
    if any(isinstance(value, dict) for value in config.rope_parameters.values()):
        return tuple(config.layer_types)  # Gemma 3: each kind of layers has its own
    if family.is_rope_in_windows and config.sliding_window is not None:
        return tuple(ONE_ROPE if kind == SLIDING else None for kind in config.layer_types)
    if stated(config, family, "position_embedding_type", "rope") != "rope":
        return (None,) * int(config.num_hidden_layers)
    turned = stated(config, family, "no_rope_layers", [1] * int(config.num_hidden_layers))  # 0: does not turn
    if (bases := stated(config, family, "layer_rope_theta")) is not None:
        turned, own = bases, config.rope_parameters["rope_theta"]
        others = set(bases) - {0, own}
        if len(bases) != config.num_hidden_layers or (others and not family.has_bases_by_layer):
            rule = "a number" if family.has_bases_by_layer else f"0 or the rope_theta of its rope_parameters ({own})"
            raise UserError(
                f"layer_rope_theta of a {config.model_type} checkpoint must be {rule} in every layer, of which there "
                f"are {config.num_hidden_layers}, got {bases}; mend its config"
            )
        if others:
            return tuple(float(base) or None for base in bases)
    return tuple(ONE_ROPE if is_turned else None for is_turned in turned)


def _require_bases(config: Any) -> None:
    """Raises UserError for rotations of kinds of layers that no layer is of, and for a base that is no number."""
    parameters, of = config.rope_parameters, f"of a {config.model_type} checkpoint{named(config)}"
    if parameters is None:
        raise UserError(f"rope_parameters {of} must be a mapping, got none; remove rope_scaling=null from its config")
    by_kind = {kind: own for kind, own in parameters.items() if isinstance(own, dict)}
    kinds = getattr(config, "layer_types", None) or ()
    if by_kind and by_kind.keys().isdisjoint(kinds):
        raise UserError(
            f"rope_parameters {of} must be numbers and names, or those of each of its layer_types, got mappings for "
            f"{', '.join(by_kind)}; mend its config"
        )
    for own in by_kind.values() or [parameters]:
        base = own.get("rope_theta", 1.0)
        if not isinstance(base, int | float) or isinstance(base, bool) or base <= 0:
            raise UserError(f"rope_theta {of} must be a number > 0, got {base!r}; write its own into its config")


def attention_chunks(config: Any, family: Family) -> tuple[int | None, ...]:
    if not family.has_chunks:
        return (None,) * int(config.num_hidden_layers)
    return tuple(config.attention_chunk_size if kind == "chunked_attention" else None for kind in config.layer_types)


def norm_names(config: Any, family: Family) -> tuple[NormNames, ...]:
    if family.norms_in_place is None:
        return (family.norms,) * int(config.num_hidden_layers)
    return tuple(
        family.norms_in_place if kind in IN_PLACE_OF_ATTENTION else family.norms for kind in config.layer_types
    )


def mixes(config: Any, family: Family) -> tuple[bool, ...]:
    """Whether each layer attends, or has what stands in place of that."""
    return tuple(kind not in MLP_BLOCKS for kind in _blocks(config, family))


def has_mlp(config: Any, family: Family) -> tuple[bool, ...]:
    """Or experts."""
    return tuple(kind not in MIXING_BLOCKS for kind in _blocks(config, family))


def _blocks(config: Any, family: Family) -> Sequence[str]:
    """What each layer is, where it is one thing; elsewhere it mixes tokens and has an MLP."""
    return config.layer_types if family.has_blocks else ("",) * int(config.num_hidden_layers)
