"""Texts that ended because the model reads no longer ones: a note where they were asked to go on."""

from __future__ import annotations

from collections.abc import Sequence

from runner.engine.request import Request
from runner.engine.sampling_params import NO_MAX_TOKENS


def cut_text_notes(requests: Sequence[Request], max_model_len: int) -> list[str]:
    """One note on all of them; who sets no max_tokens asks for as many as there is room for."""
    num_cut = sum(
        request.finish_reason == "length"
        and len(request.output_token_ids) < request.sampling_params.max_tokens < NO_MAX_TOKENS
        for request in requests
    )
    if num_cut == 0:
        return []
    return [
        f"{num_cut:,} of {len(requests):,} texts ended at max_model_len ({max_model_len:,} tokens), before max_tokens; "
        "raise model.max_model_len where the model reads longer texts, or lower sampler.max_tokens"
    ]
