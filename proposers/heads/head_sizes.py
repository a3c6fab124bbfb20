"""The sizes that a head's config tells: whether they are those of the target, and how long a text it can follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.loader import LoadedModel


def head_size(config: Mapping[str, Any], key: str, default: int, source: ModelSource, *, minimum: int = 1) -> int:
    """A whole number of a head's config.

    Raises:
        UserError: it is something else, or less than minimum.
    """
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise UserError(
            f"{source.name}={source.model}: {key} in its config must be a whole number >= {minimum}, got {value!r}; "
            "mend it or download the head again"
        )
    return value


def require_target_sizes(source: ModelSource, target: LoadedModel, *, hidden_size: int, vocab_size: int) -> None:
    """Raises UserError when a head of these sizes belongs to another target."""
    ours = {"hidden_size": (hidden_size, target.model.hidden_size), "vocabulary": (vocab_size, target.model.vocab_size)}
    wrong = [f"{name} {theirs} for {own}" for name, (theirs, own) in ours.items() if theirs != own]
    if wrong:
        raise UserError(
            f"{source.name}={source.model} must be a head that was made for {target.source.model}, got "
            f"{' and '.join(wrong)}; choose the head of this target, or the target of this head"
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
