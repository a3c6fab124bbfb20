"""From prompts in any accepted form to requests: strings, chat messages or token ids."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernels.reference.philox import fold_seed
from runner.engine.errors import UserError
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams

Prompt = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]  # text | {"prompt_token_ids": [...]} | chat messages


class Tokenizer:
    """The target's tokenizer, or none: a dummy model of no checkpoint takes token ids only."""

    def __init__(self, directory: Path | None, *, trust_remote_code: bool = False) -> None:
        self._tokenizer: Any = None
        if directory is not None:
            logging.getLogger("transformers").setLevel(logging.ERROR)
            from transformers import AutoTokenizer

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
            except (OSError, ValueError, KeyError) as error:
                raise UserError(
                    f"model.tokenizer: no tokenizer can be read from {directory} ({error}); "
                    "set model.tokenizer=<directory or hub id>"
                ) from error

    @property
    def is_available(self) -> bool:
        return self._tokenizer is not None

    @property
    def eos_token_id(self) -> int | None:
        return None if self._tokenizer is None else self._tokenizer.eos_token_id

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, if it has one, and its token ids."""
        if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
            return prompt.get("prompt"), [int(token) for token in prompt["prompt_token_ids"]]
        if isinstance(prompt, Mapping) and "prompt" in prompt:
            prompt = str(prompt["prompt"])
        if self._tokenizer is None:
            raise UserError(
                "a prompt must be {'prompt_token_ids': [...]} for a model without a tokenizer; set model.tokenizer, "
                "or use workload=synthetic"
            )
        if isinstance(prompt, str):
            return prompt, self._tokenizer.encode(prompt)
        if isinstance(prompt, Sequence) and prompt and all(isinstance(message, Mapping) for message in prompt):
            if self._tokenizer.chat_template is None:
                raise UserError(
                    "chat messages need a tokenizer with a chat template, and this one has none; pass the text itself"
                )
            text = self._tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
            return text, self._tokenizer.encode(text, add_special_tokens=False)
        raise UserError(
            "a prompt must be a string, a list of chat messages or {'prompt_token_ids': [...]}, "
            f"got {type(prompt).__name__}"
        )

    def encode_response(self, text: str) -> list[int]:
        """Token ids of a text that a model said: nothing is put before or behind it."""
        if self._tokenizer is None:
            raise UserError("the text of a response needs a tokenizer; give its token_ids, or set model.tokenizer")
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


def make_requests(
    prompts: Sequence[Prompt], params: Sequence[SamplingParams], tokenizer: Tokenizer, run_seed: int
) -> list[Request]:
    """n requests a prompt, ids "<prompt index>" or "<prompt index>-<child index>".

    A request's seed is its own, or the run's folded with its place in the workload: never with its place in a batch.
    """
    requests = []
    for index, (prompt, parameters) in enumerate(zip(prompts, params, strict=True)):
        text, token_ids = tokenizer.encode(prompt)
        if parameters.stop and not tokenizer.is_available:
            raise UserError("stop strings need a tokenizer; use stop_token_ids, or set model.tokenizer")
        seed = fold_seed(run_seed, index) if parameters.seed is None else parameters.seed
        for child in range(parameters.n):
            requests.append(
                Request(
                    request_id=f"{index}-{child}" if parameters.n > 1 else str(index),
                    prompt_index=index,
                    prompt=text,
                    prompt_token_ids=token_ids,
                    sampling_params=parameters,
                    seed=fold_seed(seed, child) if child else seed,
                )
            )
    return requests
