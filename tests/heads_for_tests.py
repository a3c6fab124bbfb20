"""Configs of small draft heads for the engines of conftest.py: what stands in for config.json with dummy weights.

A method whose drafts come from a head adds one entry: from the target's config to the head's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

HEADS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {}


def _eagle(target: Mapping[str, Any]) -> dict[str, Any]:
    return {**target, "num_hidden_layers": 1}


def _eagle3(target: Mapping[str, Any]) -> dict[str, Any]:
    """Taps of every depth of a small target; half of its vocabulary."""
    num_layers = target["num_hidden_layers"]
    return {
        **target,
        "num_hidden_layers": 1,
        "draft_vocab_size": target["vocab_size"] // 2,
        "eagle_aux_hidden_state_layer_ids": [0, num_layers // 2, num_layers],
    }


HEADS["eagle"] = _eagle
HEADS["eagle3"] = _eagle3
