"""Configs of small draft heads for the engines of conftest.py: what stands in for config.json with dummy weights.

A method whose drafts come from a head adds one entry: from the target's config to the head's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

MASK_TOKEN_ID = 1


def pard(target: Mapping[str, Any]) -> dict[str, Any]:
    """The target's first layer (tests.conftest): its first draft is right about half of the time."""
    return {**target, "num_hidden_layers": 1, "pard_token": MASK_TOKEN_ID, "spd_type": "pard"}


def dflash(target: Mapping[str, Any]) -> dict[str, Any]:
    """Two layers over the states behind the target's first and last."""
    num_layers = target["num_hidden_layers"]
    return {
        **{key: value for key, value in target.items() if key not in ("model_type", "tie_word_embeddings")},
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": num_layers,
        "block_size": 8,
        "dflash_config": {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": [0, num_layers - 1]},
    }


HEADS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {"dflash": dflash, "pard": pard}
