"""A model's tokenizer: prompts and responses to token ids, and back to text."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from runner.engine.errors import UserError
from runner.prompt_forms import PROMPT_KEYS, PROMPT_RULE, Prompt, is_token_ids


class Tokenizer:
    """A model's tokenizer, or none: a dummy model of no checkpoint takes token ids only."""

    def __init__(
        self, directory: Path | None, *, trust_remote_code: bool = False, name: str = "model.tokenizer"
    ) -> None:
        """name: the option to name in errors."""
        self._tokenizer: Any = None
        self._printed: dict[int, str] = {}  # what tokens print by themselves: logprobs ask for twenty at a time
        if directory is not None:
            logging.getLogger("transformers").setLevel(logging.ERROR)
            from transformers import AutoTokenizer

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
            except Exception as error:  # tokenizers has no kind of its own, and transformers any over broken JSON
                reason = " ".join(str(error).split())
                raise UserError(
                    f"{name}: no tokenizer can be read from {directory} ({reason}); set {name}=<directory or hub id>"
                ) from error

    @property
    def is_available(self) -> bool:
        return self._tokenizer is not None

    @property
    def backend(self) -> Any:
        """transformers' tokenizer, for what must know how tokens spell bytes; None when there is none."""
        return self._tokenizer

    @property
    def eos_token_id(self) -> int | None:
        return None if self._tokenizer is None else self._tokenizer.eos_token_id

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Of tokens that `decode` may leave out."""
        if self._tokenizer is None:
            return frozenset()
        added = {number for number, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        return frozenset(added | set(self._tokenizer.all_special_ids))

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, if it has one, and its token ids.

        Raises:
            UserError: it has another form, or the tokenizer cannot read it.
        """
        if is_token_ids(prompt):
            prompt = {"prompt_token_ids": prompt}
        if isinstance(prompt, Mapping):
            if not prompt or not prompt.keys() <= set(PROMPT_KEYS):  # an image that nobody reads would go unnoticed
                got = ", ".join(map(str, prompt)) or "no key"
                raise UserError(f"{PROMPT_RULE}, got a mapping with {got}; known keys: {', '.join(PROMPT_KEYS)}")
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), _token_ids(prompt["prompt_token_ids"])
            prompt = prompt["prompt"]
        if self._tokenizer is None:
            raise UserError(
                "a prompt must be {'prompt_token_ids': [...]} for a model without a tokenizer; set model.tokenizer, "
                "or use workload=synthetic"
            )
        if isinstance(prompt, str):
            return prompt, self._encode_text(prompt)
        if isinstance(prompt, Sequence) and prompt and all(isinstance(message, Mapping) for message in prompt):
            if self._tokenizer.chat_template is None:
                raise UserError(
                    "chat messages need a tokenizer with a chat template, and this one has none; pass the text itself"
                )
            text = self._apply_chat_template([message for message in prompt if isinstance(message, Mapping)])
            return text, self._encode_text(text, add_special_tokens=False)
        raise UserError(f"{PROMPT_RULE}, got {type(prompt).__name__}")

    def _encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:  # of half of a surrogate pair, as "\ud800" in JSON
            raise UserError(
                f"a text must be one that UTF-8 can hold, got {text[:60]!r}; decode it with errors='replace'"
            ) from error
        return token_ids

    def _apply_chat_template(self, messages: list[Mapping[str, Any]]) -> str:
        from jinja2 import TemplateError

        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        # Templates refuse roles and orders, and stumble over what lacks; of several with names perhaps none is meant.
        except (TemplateError, TypeError, ValueError) as error:
            raise UserError(
                f"chat messages must be such as the tokenizer's chat template takes ({error}), got "
                f"{str(messages)[:120]}; mend them, or pass the text itself"
            ) from error

    def encode_response(self, text: str) -> list[int]:
        """Token ids of a text that a model said: nothing is put before or behind it."""
        if self._tokenizer is None:
            raise UserError("the text of a response needs a tokenizer; give its token_ids, or set model.tokenizer")
        return self._encode_text(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def decode_token(self, token_id: int) -> str | None:
        """What one token prints by itself, special ones included; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        if token_id not in self._printed:
            self._printed[token_id] = str(self._tokenizer.decode([token_id]))
        return self._printed[token_id]

    def spell_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences to forbid for words: as the text's first word, and behind a space (as vLLM)."""
        spelled = []
        for word in words:
            bare, spaced = (
                tuple(self._encode_text(prefix + word.lstrip(), add_special_tokens=False)) for prefix in ("", " ")
            )
            if not bare:  # a tokenizer may drop what it does not know
                continue
            spelled.append(bare)
            # Another length means a token for the space alone, and then the word as it is spelled above.
            if len(spaced) == len(bare) and spaced[0] != bare[0]:
                spelled.append(spaced)
        return tuple(spelled)


def _token_ids(values: Any) -> list[int]:
    try:
        return [operator.index(token) for token in values]
    except TypeError as error:  # a float that int() would cut, or text
        raise UserError(f"prompt_token_ids must be a list of token ids, got {str(values)[:60]}") from error
