"""The noise of a draft tree's level on logits of Llama-3-8B's vocabulary."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels import perturb as kernel
from kernels.benchmarks.case import LARGEST_SEED, VOCAB_SIZE, Case, CheckFailed, Setting, Work, noise_uncertainty
from kernels.reference.perturb import perturb
from kernels.reference.philox import Stream


def cases(setting: Setting) -> list[Case]:
    vocab_size, sizes = (300, (3,)) if setting.is_small else (VOCAB_SIZE, (8, 64))
    return [
        Case(
            op="perturb",
            label=f"{num_rows} rows",
            dtype="float32",
            prepare=partial(_prepare, setting, num_rows, vocab_size),
        )
        for num_rows in sizes
    ]


def _prepare(setting: Setting, num_rows: int, vocab_size: int) -> Work:
    logits = setting.normal(num_rows, vocab_size, seed=0, dtype=torch.float32)
    seeds = setting.integers(-LARGEST_SEED, LARGEST_SEED, num_rows, seed=1)
    positions = torch.arange(num_rows, device=setting.device)
    draft_steps = torch.zeros_like(positions)

    def perturbed(rows: Tensor) -> Tensor:
        return kernel.perturb(rows, seeds, positions, draft_steps, stream=Stream.DRAFT)

    def check() -> list[str]:
        expected = perturb(logits.double(), seeds, positions, draft_steps, stream=Stream.DRAFT)
        error = (perturbed(logits) - expected).abs()
        allowed = noise_uncertainty(expected - logits, expected)
        if not bool((error <= allowed).all()):
            raise CheckFailed(f"off by {float((error - allowed).max())} more than the noise may be")
        return ["noise"]

    num_bytes = 2 * logits.numel() * logits.element_size()
    return Work(
        check=check,
        calls=[partial(perturbed, own) for (own,) in setting.copies(num_bytes, logits)],
        num_bytes=num_bytes,
        comes_from=setting.comes_from(num_bytes),
    )
