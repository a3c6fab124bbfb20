"""The token that stands for one yet to be guessed, of drafters that guess several in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError

KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")  # in the order vLLM looks them up


def mask_token_id(config: Mapping[str, Any], source: ModelSource, vocab_size: int) -> int:
    """The id that a drafter's config names; its embedding is a row of a table of vocab_size rows.

    Raises:
        UserError: none named, or one that the table has no row for.
    """
    nested = config.get("dflash_config") or {}
    found = [("dflash_config.mask_token_id", nested.get("mask_token_id")), *((key, config.get(key)) for key in KEYS)]
    key, value = next(((key, value) for key, value in found if value is not None), (None, None))
    if key is None:
        raise UserError(
            f"{source.name}={source.model} must name the mask token that it was trained to guess behind "
            f"({', '.join(key for key, _ in found)}), and its config.json has none of them; choose a drafter that was "
            "trained to draft in one pass, or method=draft_model for an ordinary one"
        )
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
        raise UserError(
            f"{source.name}={source.model}: {key} must be a token in [0, {vocab_size - 1}], the vocabulary whose "
            f"embeddings it reads, got {value!r}; mend its config.json or choose the drafter of this target"
        )
    return value
