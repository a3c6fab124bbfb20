"""Whether a head belongs to its target, and how long the texts are that it can follow."""

from __future__ import annotations

from typing import Any

from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.loader import LoadedModel


def require_fit(source: ModelSource, target: LoadedModel, *, vocab_size: int, hidden_size: int) -> None:
    """vocab_size, hidden_size: those that the head expects of its target.

    Raises:
        UserError: the target has others; the message holds all of them.
    """
    found = (target.model.vocab_size, target.model.hidden_size)
    if (vocab_size, hidden_size) != found:
        raise UserError(
            f"{source.name}={source.model} must be made for its target: the head expects a vocabulary of {vocab_size} "
            f"and a hidden size of {hidden_size}, and {target.source.model} has {found[0]} and {found[1]}; "
            "choose a head that was trained for this target"
        )


def longest_text(source: ModelSource, hf_config: Any, asked: int | None, target_len: int) -> int:
    """Tokens that the head follows a text for: what was asked for, else as many as its rotations and target have.

    Raises:
        UserError: more is asked for than the head has positions.
    """
    limit = int(getattr(hf_config, "max_position_embeddings", None) or target_len)
    if asked is not None and asked > limit:
        raise UserError(
            f"{source.name.replace('.model', '.max_model_len')} must be <= {limit}, the max_position_embeddings of "
            f"{source.model}, got {asked}; lower it or leave it out"
        )
    return min(asked or limit, target_len)
