"""Configs of small draft heads for the engines of conftest.py: what stands in for config.json with dummy weights.

A method whose drafts come from a head adds one entry: from the target's config to the head's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def _medusa(target: Mapping[str, Any]) -> dict[str, Any]:
    """Version 2: through the target's own head, so that random blocks guess what the target has just said."""
    return {"model_type": "medusa", "medusa_num_heads": 5, "medusa_num_layers": 1, "version": "2"}


def _mlp_speculator(target: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": target["hidden_size"],
        "inner_dim": 48,
        "n_predict": 5,
        "vocab_size": target["vocab_size"],
        "tie_weights": False,
        "scale_input": True,
    }


HEADS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "medusa": _medusa,
    "mlp_speculator": _mlp_speculator,
}
