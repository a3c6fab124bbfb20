"""Nested dicts to the flat keys of trackers: `tpot_ms/median` for metrics, `method.max_model_len` for parameters."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any


def flat_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a summary, keys joined by "/", entries of a list by their index; the rest is left out."""
    pairs = _leaves(summary, (), split_lists=True)
    numbers = ((keys, value) for keys, value in pairs if isinstance(value, int | float) and not isinstance(value, bool))
    return {"/".join(map(_safe, keys)): float(value) for keys, value in numbers if math.isfinite(value)}


def flat_values(params: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration's values as they are, keys joined by "."."""
    return {".".join(map(_safe, keys)): value for keys, value in _leaves(params, (), split_lists=False)}


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


def _safe(key: str) -> str:
    """MLflow takes letters, digits and _-.:/ and space alone; "/" is our separator, and "." and ".." would be paths."""
    key = re.sub(r"[^\w\-.: ]", "_", key, flags=re.ASCII)
    return key if key.strip(".") else "_" * max(len(key), 1)


def _text(value: Any) -> str:
    return json.dumps(value, default=str) if isinstance(value, list | tuple | Mapping) else str(value)
