"""Nested dicts to the flat keys of trackers: `tpot_ms/median` for metrics, `method.max_model_len` for parameters."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from runner.tracking.names import as_key

MAX_KEY_LENGTH = 250  # MLflow's
MAX_PART_LENGTH = 100  # of a metric's, which has one name of a user's, a category, among several of ours


def flat_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a summary, keys joined by "/", entries of a list by their index; the rest is left out."""
    pairs = _leaves(summary, (), split_lists=True)
    numbers = ((keys, value) for keys, value in pairs if isinstance(value, int | float) and not isinstance(value, bool))
    finite = ((keys, float(value)) for keys, value in numbers if math.isfinite(value))
    return {"/".join(as_key(key, MAX_PART_LENGTH) for key in keys): value for keys, value in finite}


def flat_values(params: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration's values as they are, keys joined by "."."""
    pairs = _leaves(params, (), split_lists=False)
    return {as_key(".".join(keys), MAX_KEY_LENGTH): value for keys, value in pairs}


def flat_params(params: Mapping[str, Any]) -> dict[str, str]:
    """The same as text; lists and empty mappings as JSON, so that [] is not lost."""
    return {key: _text(value) for key, value in flat_values(params).items()}


def _leaves(value: Any, keys: tuple[str, ...], *, split_lists: bool) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*keys, str(key)), split_lists=split_lists)
    elif split_lists and isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*keys, str(index)), split_lists=split_lists)
    elif keys:
        yield keys, value


def _text(value: Any) -> str:
    return json.dumps(value, default=str) if isinstance(value, list | tuple | Mapping) else str(value)
