"""Candidates of a draft tree's level from logits of Llama-3-8B's vocabulary, by probability and drawn."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import top_candidates as kernel
from kernels.benchmarks.case import (
    LARGEST_SEED,
    VOCAB_SIZE,
    Case,
    Setting,
    Work,
    check_draws,
    check_equal,
    check_error,
    check_row_bits,
    noise_uncertainty,
)
from kernels.reference.perturb import perturb
from kernels.reference.philox import Stream
from kernels.reference.top_candidates import top_candidates

WIDTH = 4


def cases(setting: Setting) -> list[Case]:
    vocab_size, sizes = (1100, (3,)) if setting.is_small else (VOCAB_SIZE, (4, 256))
    return [
        Case(
            op="top_candidates",
            label=f"{num_rows} rows, {WIDTH} of each, {'drawn' if is_drawn else 'the likeliest'}",
            dtype="float32",
            prepare=partial(_prepare, setting, num_rows, vocab_size, is_drawn),
        )
        for num_rows in sizes
        for is_drawn in (False, True)
    ]


def _prepare(setting: Setting, num_rows: int, vocab_size: int, is_drawn: bool) -> Work:
    logits = 3 * setting.normal(num_rows, vocab_size, seed=0, dtype=torch.float32)
    seeds = setting.integers(-LARGEST_SEED, LARGEST_SEED, num_rows, seed=1)
    positions = torch.arange(num_rows, device=setting.device)

    def found(rows: Tensor, own: slice = slice(None)) -> Any:
        if is_drawn:
            return kernel.top_candidates(rows, WIDTH, seeds[own], positions[own], stream=Stream.TARGET)
        return kernel.top_candidates(rows, WIDTH)

    def check() -> list[str]:
        own = found(logits)
        passed = [check_row_bits(lambda rows: found(logits[rows], rows).log_probs, num_rows)]
        if is_drawn:
            noisy = perturb(logits.double(), seeds, positions, torch.zeros_like(seeds), stream=Stream.TARGET)
            uncertainty = noise_uncertainty(noisy - logits, noisy)
            return [*passed, check_draws(own.token_ids[:, 0], noisy, uncertainty)]
        check_equal("token_ids", own.token_ids, top_candidates(logits, WIDTH).token_ids)
        by_torch, exact = (rows.log_softmax(dim=-1).gather(1, own.token_ids) for rows in (logits, logits.double()))
        return [*passed, "equal", check_error(own.log_probs, by_torch, exact)]

    num_bytes = logits.numel() * logits.element_size()
    copies = setting.copies(num_bytes, logits)
    return Work(
        check=check,
        calls=[partial(found, rows) for (rows,) in copies],
        num_bytes=num_bytes,
        comes_from=setting.comes_from(num_bytes),
        torch_calls=[] if is_drawn else [partial(_by_torch, rows) for (rows,) in copies],
    )


def _by_torch(logits: Tensor) -> object:
    return logits.log_softmax(dim=-1).topk(WIDTH, dim=-1)
