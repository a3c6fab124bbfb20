"""Tokens from logits of Llama-3-8B's vocabulary: greedy, at a temperature, and with top_p before the draw.

And at a temperature from the quarter of it that an EAGLE-3 head knows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import sampling as kernel
from kernels.benchmarks.case import (
    LARGEST_SEED,
    VOCAB_SIZE,
    Case,
    Setting,
    Work,
    check_draws,
    check_equal,
    noise_uncertainty,
)
from kernels.reference import sampling as reference
from kernels.reference.philox import Stream, gumbel

NUM_KNOWN = 32000
TEMPERATURE, TOP_P = 0.8, 0.9
MODES = ("greedy", "temperature", "top_p", "known tokens")


def cases(setting: Setting) -> list[Case]:
    vocab_size, sizes = (300, (3,)) if setting.is_small else (VOCAB_SIZE, (1, 64, 320))
    num_known = vocab_size * NUM_KNOWN // VOCAB_SIZE
    return [
        Case(
            op="sampling",
            label=f"{mode}, {num_rows} rows",
            dtype="float32",
            prepare=partial(_prepare, setting, mode, num_rows, num_known if mode == "known tokens" else vocab_size),
        )
        for mode in MODES
        for num_rows in sizes
    ]


def _prepare(setting: Setting, mode: str, num_rows: int, vocab_size: int) -> Work:
    logits = setting.normal(num_rows, vocab_size, seed=0, dtype=torch.float32).mul_(3.0)
    seeds = setting.integers(-LARGEST_SEED, LARGEST_SEED, num_rows, seed=1)
    positions = torch.arange(num_rows, device=setting.device)
    parameters: dict[str, Any] = {"temperatures": torch.full((num_rows,), TEMPERATURE, device=setting.device)}
    if mode == "top_p":
        parameters["top_p"] = torch.full((num_rows,), TOP_P, dtype=torch.float64, device=setting.device)
    if mode == "known tokens":
        parameters["token_ids"] = known = torch.arange(vocab_size, device=setting.device) * 4

    def sample(rows: Tensor) -> Tensor:
        if mode == "greedy":
            return kernel.greedy(rows, positions)
        return kernel.sample(rows, seeds, positions, stream=Stream.TARGET, **parameters)

    def check() -> list[str]:
        token_ids = sample(logits)
        if mode == "greedy":
            check_equal("tokens", token_ids, reference.greedy_argmax(logits))
            return ["tokens"]
        processed = logits / parameters["temperatures"].unsqueeze(1)
        if mode == "top_p":
            processed = reference.apply_top_p(processed, parameters["top_p"])
        if mode == "known tokens":
            noise = gumbel(seeds, positions, Stream.TARGET, vocab_size=4 * vocab_size).index_select(1, known)
            token_ids = token_ids // 4
        else:
            noise = gumbel(seeds, positions, Stream.TARGET, vocab_size=vocab_size)
        scores = processed + noise
        return [check_draws(token_ids, scores, noise_uncertainty(noise, scores))]

    num_bytes = logits.numel() * logits.element_size()
    return Work(
        check=check,
        calls=[partial(sample, own) for (own,) in setting.copies(num_bytes, logits)],
        num_bytes=num_bytes,
        comes_from=setting.comes_from(num_bytes),
    )
