"""Arctic Inference's switch `enable_suffix_decoding`: the plugin of vLLM has matches in front of its speculators.

There a match is drafted where as many of its tokens are expected to be accepted as the speculator guesses, n_predict
(arctic_inference/vllm/model_runner.py). How many of its tokens are drafted differs: there as many as the suffix trees
are deep, or with asynchronous scheduling as the speculator drafts; here as many as suffix decoding by itself drafts
there, since every request has places for them in a step.
"""

from __future__ import annotations

from typing import Any

from runner.config.checkpoint_method import tokens_of_model
from runner.config.vllm_keys import DEPTH_KEY, MATCH_TOKENS, MATCH_TOKENS_KEY, MATCHES_DEFAULTS, MATCHES_KEY


def take_matches(values: dict[str, Any], method: Any, notes: list[str]) -> None:
    """Read the switch as method=hybrid, or as suffix where no speculator is named; it stays with other methods.

    method: the one that is named, or that the checkpoint means.
    """
    if values.get(MATCHES_KEY) is not True or method not in (None, "suffix", "mlp_speculator"):
        return
    del values[MATCHES_KEY]
    read = f"speculative_config.{MATCHES_KEY}=True is read as method="
    values |= {key: value for key, value in MATCHES_DEFAULTS.items() if values.get(key) is None}
    depth, asked = values[DEPTH_KEY], values.pop(MATCH_TOKENS_KEY, None)  # asked: of suffix decoding by itself
    of_matches = min(depth, MATCH_TOKENS) if type(depth) is int else None
    if method != "mlp_speculator":
        if method is None:
            notes.append(f"{read}suffix, which needs no model")
        values["method"] = "suffix"
        if values.get("num_speculative_tokens") is None:
            values["num_speculative_tokens"] = of_matches if asked is None else asked
        return
    tokens, model = values.pop("num_speculative_tokens", None), values.get("model")
    guessed = tokens_of_model(model, method) if isinstance(model, str) else None
    drafted = guessed if tokens is None else tokens
    if type(of_matches) is int and type(drafted) is int:
        of_matches = max(of_matches, drafted)  # as many places are there in any case
    hybrid = {
        "method": "hybrid",
        "drafter": method,
        "num_speculative_tokens": of_matches,
        "num_drafter_tokens": drafted,
        "min_match_score": tokens if guessed is None else guessed,
    }
    hybrid = {key: value for key, value in hybrid.items() if value is not None}
    values |= hybrid
    said = ", ".join(f"{key}={value}" for key, value in hybrid.items() if key != "method")
    notes.append(f"{read}hybrid with {said}; there a match may be longer")
