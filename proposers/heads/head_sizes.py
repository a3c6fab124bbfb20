"""The sizes in a head's config: whether they fit the target, what a layer sees, and how long a text may be."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, overload

from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.layer_kinds import SLIDING
from runner.engine.loader import LoadedModel
from runner.engine.rope import num_positions

logger = logging.getLogger(__name__)


def head_size(
    config: Mapping[str, Any],
    key: str,
    default: int,
    source: ModelSource,
    *,
    minimum: int = 1,
    is_null_default: bool = False,  # as published configs of such heads mean it
) -> int:
    """A whole number of a head's config.

    Raises:
        UserError: it is something else, or less than minimum.
    """
    value = config.get(key, default)
    if value is None and is_null_default:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise UserError(
            f"{source.name}={source.model}: {key} in its config must be a whole number >= {minimum}, got {value!r}; "
            "mend it or download the head again"
        )
    return value


def head_number(config: Mapping[str, Any], key: str, default: float, source: ModelSource) -> float:
    """A number >= 0 of a head's config; null is the default.

    Raises:
        UserError: it is something else.
    """
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise UserError(
            f"{source.name}={source.model}: {key} in its config must be a number >= 0, got {value!r}; mend it or "
            "download the head again"
        )
    return float(value)


@overload
def head_flag(config: Mapping[str, Any], key: str, source: ModelSource, default: bool) -> bool: ...
@overload
def head_flag(config: Mapping[str, Any], key: str, source: ModelSource, default: bool | None = None) -> bool | None: ...
def head_flag(config: Mapping[str, Any], key: str, source: ModelSource, default: bool | None = None) -> bool | None:
    """What a head's config says by a key, 0 and 1 included; null is as good as no key.

    Raises:
        UserError: it is neither true nor false.
    """
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool | int) or value not in (0, 1):
        raise UserError(
            f"{source.name}={source.model}: {key} in its config must be true or false, got {value!r}; mend it or "
            "download the head again"
        )
    return bool(value)


def head_layer_ids(key: str, ids: Any, offset: int, source: ModelSource) -> tuple[int, ...]:
    """Hidden states of the target that a head's config names by a key; offset: what is to be added to its ids.

    Raises:
        UserError: they are no whole numbers, or none.
    """
    if not isinstance(ids, list | tuple) or not ids or not all(type(layer) is int for layer in ids):
        raise UserError(
            f"{source.name}={source.model}: {key} must be a list of whole numbers, got {ids!r}; mend its config.json, "
            "or set method.aux_hidden_state_layer_ids"
        )
    return tuple(layer + offset for layer in ids)


def require_target_sizes(
    source: ModelSource,
    target: LoadedModel,
    *,
    hidden_size: int,
    vocab_size: int,
    num_layers: int | None = None,  # of the target, where the head tells it
) -> None:
    """Raises UserError when a head of these sizes belongs to another target."""
    model = target.model
    ours = {
        "hidden_size": (hidden_size, model.hidden_size),
        "vocabulary": (vocab_size, model.vocab_size),
        "layers of the target": (num_layers, None if num_layers is None else model.num_layers),
    }
    wrong = [f"{name} {theirs} for {own}" for name, (theirs, own) in ours.items() if theirs != own]
    if wrong:
        raise UserError(
            f"{source.name}={source.model} must be a head that was made for {target.source.model}, got "
            f"{' and '.join(wrong)}; choose the head of this target, or the target of this head"
        )


def layer_windows(layer_types: Sequence[str], window: Any, source: ModelSource) -> tuple[int | None, ...]:
    """Keys that a query of each layer sees, itself included; None: all.

    Raises:
        UserError: a layer is a sliding one, and the window is no whole number >= 1.
    """
    is_sliding = [kind == SLIDING for kind in layer_types]
    if any(is_sliding) and (type(window) is not int or window < 1):
        raise UserError(
            f"{source.name}={source.model}: sliding_window in its config must be a whole number >= 1 where layer_types "
            f"names sliding_attention, got {window!r}; mend it or download the head again"
        )
    return tuple(window if slides else None for slides in is_sliding)


def longest_text(source: ModelSource, hf_config: Any, asked: int | None, target_len: int) -> int:
    """Tokens that the head follows a text for: what was asked for, at most and by default as many as its target.

    Rotations are computed for every position, so the length that a head was trained with limits what it is worth
    there, not what it can do: it is logged.
    """
    length = min(asked or target_len, target_len)
    trained = num_positions(hf_config)
    if trained is not None and trained < length:
        option = source.name.replace(".model", ".max_model_len")
        logger.warning(
            "%s=%s has max_position_embeddings=%d and follows texts of up to %d tokens: behind its own length it may "
            "guess worse; %s=%d has it stop there",
            source.name,
            source.model,
            trained,
            length,
            option,
            trained,
        )
    return length
