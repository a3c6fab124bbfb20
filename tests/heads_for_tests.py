"""Configs of small draft heads for the engines of conftest.py: what stands in for config.json with dummy weights.

A method whose drafts come from a head adds one entry: from the target's config to the head's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def _mtp(target: Mapping[str, Any]) -> dict[str, Any]:
    return {"speculators_model_type": "mtp", "transformer_layer_config": {**target, "model_type": "qwen3"}}


HEADS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {"mtp": _mtp}
