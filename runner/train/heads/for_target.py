"""A new head of a method for any target: its sizes are the target's, the rest follows from a few rules.

The tiny family's recipe has numbers of its own, found for two CPU cores (runner/tiny/recipe.py).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from runner.train.heads.by_method import HEAD_CLASSES, new_head
from runner.train.heads.head import Head
from runner.train.heads.llama_config import mlp_width
from runner.train.heads.states import FrozenTarget, TargetStates

METHODS = tuple(method for method in HEAD_CLASSES if method != "pard")  # PARD is a draft model, not a head

MAX_DRAFT_VOCAB = 32_000  # of eagle3: the tokens that the target says most
MAX_UNROLLED_STEPS = 4  # guesses that are fed a guess in training; later ones are like the last of them
NUM_ANCHORS = 48  # places of a text that guesses begin at
DECAY = 0.8  # of a guess's weight, against the one before it
DFLASH_LAYERS = 5  # and DSpark's
MARKOV_RANK = 256


def tapped_layers(num_layers: int) -> tuple[int, ...]:
    """Depths that heads read: EAGLE-3's own choice, or thirds where the target is too shallow for it."""
    chosen = (2, num_layers // 2, num_layers - 3)
    if not 2 < chosen[1] < chosen[2]:
        chosen = (num_layers // 3, 2 * num_layers // 3, num_layers - 1)
    assert 0 < chosen[0] < chosen[1] < chosen[2], f"{num_layers} layers are too few"
    return chosen


def head_for(
    method: str,
    target: FrozenTarget,
    *,
    num_speculative_tokens: int,
    token_counts: Tensor,  # [vocab] int64: how often each token occurs in the texts
    states: TargetStates,  # of some texts, for the size of what is tapped
    seed: int,
) -> Head:
    """An untrained head in float32 on the target's device; the same seed gives the same weights."""
    unrolled = {"num_steps": min(num_speculative_tokens, MAX_UNROLLED_STEPS), "num_anchors": NUM_ANCHORS}
    block = {
        "num_layers": DFLASH_LAYERS,
        "intermediate_size": mlp_width(target.config),
        "num_anchors": NUM_ANCHORS,
        "place_scale": num_speculative_tokens / 2,
    }
    options: dict[str, Any] = {
        "eagle": {**unrolled, "step_decay": DECAY},
        "eagle3": {**unrolled, "step_decay": DECAY},
        "mtp": {**unrolled, "step_decay": DECAY, "num_speculative_tokens": num_speculative_tokens},
        "medusa": {"num_heads": num_speculative_tokens, "num_layers": 1, "head_decay": DECAY},
        "mlp_speculator": {
            "inner_dim": target.config.hidden_size,
            "n_predict": num_speculative_tokens,
            "step_decay": DECAY,
        },
        "dflash": {**block, "block_size": num_speculative_tokens + 1},
        "dspark": {**block, "block_size": num_speculative_tokens, "markov_rank": MARKOV_RANK},
    }[method]
    if method in ("eagle3", "dflash", "dspark"):
        options["tap_layers"] = tapped_layers(target.config.num_hidden_layers)
    if method == "eagle3":
        size = states.taps.float().square().mean().sqrt().clamp(min=1.0)
        most_said = token_counts.argsort(descending=True, stable=True)[:MAX_DRAFT_VOCAB]
        options |= {"tap_scale": float(size.log2().round().exp2()), "frequent_tokens": most_said.sort().values}
    if method in ("dflash", "dspark"):
        # A token that means nothing in these texts; the last one of those is an unused or a special one as a rule.
        options["mask_token_id"] = int((token_counts == token_counts.min()).nonzero().max())
    return new_head(method, target, options, seed=seed)
