"""The forms that a prompt may come in, which whoever reads one tells apart alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeGuard

PROMPT_RULE = (
    "a prompt must be a string, token ids, a list of chat messages, {'prompt': ...} or {'prompt_token_ids': [...]}"
)
PROMPT_KEYS = ("prompt", "prompt_token_ids")  # those of a mapping; one that has both is its token ids
# text | {"prompt_token_ids": [...]}, {"prompt": text} | chat messages | token ids
Prompt = str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | Sequence[int]


def is_token_ids(prompt: Any) -> TypeGuard[Sequence[int]]:
    """Whether it is a list of integers, one prompt as vLLM takes it."""
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes)
    # A bool is no number.
    return is_list and bool(prompt) and all(isinstance(own, Integral) and not isinstance(own, bool) for own in prompt)
