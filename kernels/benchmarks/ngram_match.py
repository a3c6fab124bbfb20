"""Prompt lookup in 64 texts of 32,000 tokens."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels import ngram_match as kernel
from kernels.benchmarks.case import VOCAB_SIZE, Case, Setting, Work, check_equal
from kernels.reference import ngram_match as reference

KEYS = {"min_n": 2, "max_n": 5, "num_tokens": 4}
GOAL_US = 50.0


def cases(setting: Setting) -> list[Case]:
    num_texts, length = (3, 1100) if setting.is_small else (64, 32_000)
    return [
        Case(
            op="ngram_match",
            label=f"{num_texts} x {length} tokens",
            dtype="int32",
            prepare=partial(_prepare, setting, num_texts, length),
        )
    ]


def _prepare(setting: Setting, num_texts: int, length: int) -> Work:
    # Few tokens are frequent and many are rare, as in texts; every second text ends as some place in it goes on.
    kinds = setting.integers(0, 2**20, num_texts, length, seed=0).to(torch.float64).div_(2**20)
    token_ids = kinds.pow_(4).mul_(VOCAB_SIZE).to(torch.int32)
    token_ids[::2, -KEYS["max_n"] :] = token_ids[::2, length // 3 : length // 3 + KEYS["max_n"]]
    lengths = torch.full((num_texts,), length, device=setting.device)
    slots = torch.arange(num_texts, device=setting.device).flip(0)

    def match(texts: Tensor) -> Tensor:
        return kernel.ngram_match(texts, lengths, slots, **KEYS)

    def check() -> list[str]:
        check_equal("drafts", match(token_ids), reference.ngram_match(token_ids, lengths, slots, **KEYS))
        return ["drafts"]

    num_bytes = token_ids.numel() * token_ids.element_size()
    return Work(
        check=check,
        calls=[partial(match, own) for (own,) in setting.copies(num_bytes, token_ids)],
        num_bytes=num_bytes,
        comes_from=setting.comes_from(num_bytes),
        goal_us=None if setting.is_small else GOAL_US,
    )
