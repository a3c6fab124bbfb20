"""Whole numbers of a head's config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError


def head_size(config: Mapping[str, Any], key: str, default: int, source: ModelSource, *, minimum: int = 1) -> int:
    """A whole number of a head's config.

    Raises:
        UserError: it is something else, or less than minimum.
    """
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise UserError(
            f"{source.name}={source.model}: {key} in its config must be a whole number >= {minimum}, got {value!r}; "
            "mend it or download the head again"
        )
    return value
