"""Configs of small draft heads for the engines of conftest.py: what stands in for config.json with dummy weights.

A method whose drafts come from a head adds one entry: from the target's config to the head's. `make_fair` has random
heads guess that the target says again what it said, which is right now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

HEADS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {}


def _eagle(target: Mapping[str, Any]) -> dict[str, Any]:
    return {**target, "num_hidden_layers": 1}


def _eagle3(target: Mapping[str, Any]) -> dict[str, Any]:
    """Taps of every depth of a small target; most of its vocabulary."""
    num_layers = target["num_hidden_layers"]
    return {
        **target,
        "num_hidden_layers": 1,
        "draft_vocab_size": target["vocab_size"] - target["vocab_size"] // 6,
        "eagle_aux_hidden_state_layer_ids": [0, num_layers // 2, num_layers],
    }


def _mtp(target: Mapping[str, Any]) -> dict[str, Any]:
    return {"speculators_model_type": "mtp", "transformer_layer_config": {**target, "model_type": "qwen3"}}


HEADS["eagle"] = _eagle
HEADS["eagle3"] = _eagle3
HEADS["mtp"] = _mtp


def make_fair(head: Any, target: Any) -> None:
    """Let the last tapped state through to logits that are the target's; the head's layers stay random."""
    weights = {name: weight.view for name, weight in head.weight_targets().items()}
    for name in {"fc.weight", "mtp_layers.0.input_proj.weight"} & weights.keys():
        fc = weights[name]
        fc[:, -len(fc) :] += torch.eye(len(fc))
    if (lm_head := weights.get("lm_head.weight")) is not None:
        lm_head.copy_(target.lm_head if head.target_ids is None else target.lm_head[head.target_ids])
