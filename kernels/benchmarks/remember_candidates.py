"""What the target said of a step's tokens into token recycling's table: 8 candidates a row."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels import remember_candidates as kernel
from kernels.benchmarks.case import VOCAB_SIZE, Case, Setting, Work, check_equal
from kernels.reference import remember_candidates as reference

WIDTH = 8


def cases(setting: Setting) -> list[Case]:
    return [
        Case(
            op="remember_candidates",
            label=f"{num_rows} rows of {WIDTH}",
            dtype="int64",
            prepare=partial(_prepare, setting, num_rows, vocab_size),
        )
        for num_rows, vocab_size in (((9, 11),) if setting.is_small else ((61, VOCAB_SIZE), (1088, VOCAB_SIZE)))
    ]


def _prepare(setting: Setting, num_rows: int, vocab_size: int) -> Work:
    """A tenth of the tokens or more are told of twice."""
    table = (
        torch.zeros(vocab_size + 1, WIDTH, dtype=torch.int64, device=setting.device),
        torch.zeros(vocab_size + 1, WIDTH, device=setting.device),
    )
    token_ids = setting.integers(0, min(vocab_size, 5 * num_rows), num_rows, seed=0)
    rows = (
        token_ids,
        setting.integers(0, vocab_size, num_rows, WIDTH, seed=1),
        setting.normal(num_rows, WIDTH, seed=2, dtype=torch.float32),
    )

    def remembered(remember: object) -> tuple[Tensor, ...]:
        held = tuple(own.clone() for own in table)
        assert callable(remember)
        remember(*held, *rows)
        return tuple(own[:-1] for own in held)

    def check() -> list[str]:
        both = (remembered(ops.remember_candidates) for ops in (kernel, reference))
        for name, found, wanted in zip(("token ids", "log-probabilities"), *both, strict=True):
            check_equal(name, found, wanted)
        return ["equal"]

    return Work(
        check=check,
        calls=[partial(kernel.remember_candidates, *table, *rows)],
        num_bytes=num_rows * (8 + 2 * 12 * WIDTH),
        comes_from="L2",
    )
