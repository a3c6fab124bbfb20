"""Demo prompts of one length, so that no side of a comparison pads."""

from __future__ import annotations

import json

from runner.engine.errors import UserError
from runner.tiny import DEMO_PATH
from runner.tokenizer import Tokenizer


def demo_prompts(tokenizer: Tokenizer, count: int, prompt_len: int) -> list[list[int]]:
    """The first prompt_len token ids of the first `count` demo prompts that have as many.

    Raises:
        UserError: too few have.
    """
    lines = [json.loads(line)["prompt"] for line in DEMO_PATH.read_text(encoding="utf-8").splitlines()]
    encoded = [tokenizer.encode(line)[1] for line in lines]
    prompts = [tokens[:prompt_len] for tokens in encoded if len(tokens) >= prompt_len][:count]
    if len(prompts) < count:
        raise UserError(
            f"--prompt-len must leave {count} demo prompts, {len(prompts)} have {prompt_len} tokens; lower it"
        )
    return prompts
