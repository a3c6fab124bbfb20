"""Configs of small draft heads for the engines of conftest.py: what stands in for config.json with dummy weights.

A method whose drafts come from a head adds one entry: from the target's config to the head's. `make_fair` has random
heads guess that the target says again what it said, which is right now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

MASK_TOKEN_ID = 1


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


def _pard(target: Mapping[str, Any]) -> dict[str, Any]:
    """The target's first layer (tests.conftest): its first draft is right about half of the time. Or of PARD2."""
    return {"spd_type": "pard", "pard_token": MASK_TOKEN_ID, **target, "num_hidden_layers": 1}


# Of the target's config (Engines(of_drafters=...)), for a draft of method pard that reads the target's states.
PARD2 = {"spd_type": "pard2", "pard2_target_layers": [-1, 1], "pard2_scale": 0.2}


def _dflash(target: Mapping[str, Any]) -> dict[str, Any]:
    """Two layers over the states behind the target's first and last; Qwen3's unless the head's class is named."""
    num_layers = target["num_hidden_layers"]
    plain = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}
    return {
        # Dense: make_fair writes to its layers.
        **{key: value for key, value in target.items() if key not in ("tie_word_embeddings", "quantization_config")},
        **({} if "architectures" in target else plain),
        "num_hidden_layers": 2,
        "num_target_layers": num_layers,
        "block_size": 8,
        "dflash_config": {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": [0, num_layers - 1]},
    }


# Keys that make it one of DFlash 2, for a drafter's config: heads have whatever that has.
SELECTING = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 6}

# And of Domino.
CORRECTING = {"projector_type": "domino", "emb_dim": 16, "gru_hidden_dim": 24, "pure_draft_prefix_len": 0}


def _dspark(target: Mapping[str, Any]) -> dict[str, Any]:
    """The same block as speculators write it, and a sequential head with a state."""
    layers = {key: value for key, value in _dflash(target).items() if key not in ("block_size", "dflash_config")}
    return {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": layers,
        "draft_vocab_size": target["vocab_size"],
        "block_size": 8,
        "sample_from_anchor": False,  # a row of another token than the mask would guess otherwise (make_fair)
        "aux_hidden_state_layer_ids": [1, target["num_hidden_layers"]],
        "mask_token_id": MASK_TOKEN_ID,
        "markov_rank": 16,
        "markov_head_type": "rnn",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


HEADS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "dflash": _dflash,
    "dspark": _dspark,
    "eagle": _eagle,
    "eagle3": _eagle3,
    "medusa": _medusa,
    "mlp_speculator": _mlp_speculator,
    "mtp": _mtp,
    "pard": _pard,
}


def make_fair(head: Any) -> None:
    """Let the last tapped state through to logits that are the target's; the head's layers stay random."""
    target = head.target
    weights = {name: weight.view for name, weight in head.weight_targets().items()}
    if getattr(head, "known_tokens", None) is not None:  # the last of the target's tokens: no column is its own token
        head.known_tokens.ids.add_(head.known_tokens.vocab_size - len(head.known_tokens.ids))
    if (fc := weights.get("fc.weight")) is not None:
        fc[:, -len(fc) :] += torch.eye(len(fc), device=fc.device)
    if (lm_head := weights.get("lm_head.weight")) is not None:
        rows = target.whole_head()
        lm_head.copy_(rows if head.known_tokens is None else rows[head.known_tokens.ids])
    if (sequel := weights.get("markov_head.markov_w2.weight")) is not None:
        sequel *= 0.2  # it has its part in a guess, not more
    for name, scale in (("predecessor_codebook", 60), ("successor_codebook", 60)):  # so that pairs weigh something
        if (codes := weights.get(f"candidate_selector.{name}")) is not None:
            codes *= scale
    for name, scale in (("prefix_gru.weight_ih_l0", 20), ("embed_proj.0.weight", 8), ("embed_proj.2.weight", 60)):
        if (weight := weights.get(name)) is not None:  # and so does what a GRU has read
            weight *= scale
    for name, weight in weights.items():
        if name.endswith("base_kernel"):  # mostly the row itself
            weight[:, 0] += 1
    if "hidden_norm.weight" in weights:
        _let_blocks_repeat(weights, target, head.config.arch)


def _let_blocks_repeat(weights: Mapping[str, torch.Tensor], target: Any, arch: Any) -> None:
    """A DFlash block's first layer adds what it sees of the context, as far as few key heads can tell it."""
    v, o = (weights[f"layers.0.self_attn.{name}_proj.weight"] for name in ("v", "o"))
    mask = target.embed(torch.tensor([MASK_TOKEN_ID], device=v.device))[0]
    mask = mask / mask.norm()
    v -= (v @ mask).outer(mask)  # or every guess would be the mask token
    v.copy_(torch.linalg.qr(v.T.float())[0].T)
    heads = arch.heads[0]
    values = v.view(heads.num_kv_heads, heads.head_dim, -1)
    values = values.repeat_interleave(heads.num_heads // heads.num_kv_heads, dim=0)
    o.copy_(20 * values.flatten(0, 1).T)
