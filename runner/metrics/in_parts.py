"""Why a decoding step runs in parts, with the host between drafts and verification, and not whole, in one call."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

MAX_REASONS_SHOWN = 3


class InParts(StrEnum):
    """The values are keys of `steps_in_parts` in the summary."""

    # No note names these: they pass by themselves, or follow from the device and the method that were chosen.
    PROMPT = "prompt"  # no request decodes
    CATCH_UP = "catch_up"  # the drafter takes in what earlier steps committed
    UNCAPTURED = "uncaptured"  # with hardware.enforce_eager, or on a CPU without what whole steps are compiled for
    HOST_DRAFTS = "host_drafts"  # it drafts on the host, for too many requests, or learns from steps there
    # A note names these (`_NOTED` says what they are).
    TRANSFORMERS = "transformers"
    SYNTHETIC_TREES = "synthetic_trees"
    SAMPLED = "sampled"
    STRUCTURED_OUTPUTS = "structured_outputs"
    LOGPROBS = "logprobs"
    BAD_WORDS = "bad_words"
    FEW_DRAFTS = "few_drafts"
    DRAFTER_LENGTH = "drafter_length"
    MAX_MODEL_LEN = "max_model_len"
    TOKEN_BUDGET = "token_budget"
    KV_CACHE = "kv_cache"


_APART = "a request with such an option takes its whole batch along, so give these requests a run of their own"
_NOTED: dict[InParts, tuple[str, str | None]] = {  # reason -> what happened, and what the user can do about it
    InParts.TRANSFORMERS: ("the target runs through transformers' modelling code, which is not captured", None),
    InParts.SYNTHETIC_TREES: (
        "the synthetic rule judges draft trees on the host",
        "method.speculative_token_tree=null drafts chains, which run whole",
    ),
    InParts.SAMPLED: (
        "a request was sampled, whose draft trees the rule judges by what was drawn, or by the typical rule",
        "method.speculative_token_tree=null drafts chains, which run whole under every rule",
    ),
    InParts.STRUCTURED_OUTPUTS: ("a request asked for structured_outputs", _APART),
    InParts.LOGPROBS: ("a request asked for very many logprobs", _APART),
    InParts.BAD_WORDS: ("a request had very many bad_words, or very long ones", _APART),
    InParts.FEW_DRAFTS: ("requests asked for few drafts, or none, beside others that draft", _APART),
    InParts.DRAFTER_LENGTH: (
        "a text was longer than the drafter reads",
        "lower sampler.max_tokens, or take a drafter for longer texts (method.max_model_len may be what limits it)",
    ),
    InParts.MAX_MODEL_LEN: (
        "a text came close to max_model_len",
        "raise model.max_model_len where the model reads longer texts, or lower sampler.max_tokens",
    ),
    InParts.TOKEN_BUDGET: (
        "the token budget did not hold all requests with their drafts",
        "raise hardware.max_num_batched_tokens, or lower hardware.max_num_seqs",
    ),
    InParts.KV_CACHE: (
        "the KV cache had too few free blocks for the drafts of all requests",
        "raise hardware.gpu_memory_utilization, or lower hardware.max_num_seqs",
    ),
}


def in_parts_notes(steps_in_parts: Mapping[InParts, int], num_decoding_steps: int) -> list[str]:
    """One note on the decoding steps that could have run whole, the commonest reasons first; none where all did."""
    counts = sorted(((count, reason) for reason, count in steps_in_parts.items() if reason in _NOTED), reverse=True)
    if not counts:
        return []
    total = sum(count for count, _ in counts)
    reasons = [f"{_NOTED[reason][0]} ({count:,})" for count, reason in counts[:MAX_REASONS_SHOWN]]
    if others := sum(count for count, _ in counts[MAX_REASONS_SHOWN:]):
        reasons.append(f"other reasons ({others:,}, see steps_in_parts in metrics.json)")
    remedy = _NOTED[counts[0][1]][1]
    return [
        f"{total:,} of {num_decoding_steps:,} decoding steps ran in parts, not whole: {', '.join(reasons)}"
        + (f"; {remedy}" if remedy else "")
    ]
