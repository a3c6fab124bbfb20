"""The variates that verification accepts drafts by: one for each of 1,024, and eight for each of a tree's 64 rows."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels import uniforms as kernel
from kernels.benchmarks.case import LARGEST_SEED, Case, Setting, Work, check_equal
from kernels.reference.philox import Stream, uniforms


def cases(setting: Setting) -> list[Case]:
    sizes = ((5, 1), (5, 6)) if setting.is_small else ((1024, 1), (64, 8))
    return [
        Case(
            op="uniforms",
            label=f"{num_rows} rows x {num_entries}",
            dtype="float64",
            prepare=partial(_prepare, setting, num_rows, num_entries),
        )
        for num_rows, num_entries in sizes
    ]


def _prepare(setting: Setting, num_rows: int, num_entries: int) -> Work:
    seeds = setting.integers(-LARGEST_SEED, LARGEST_SEED, num_rows, seed=1)
    positions = torch.arange(num_rows, device=setting.device)
    draft_steps = positions // 2

    def drawn(keys: Tensor) -> Tensor:
        return kernel.uniforms(keys, positions, draft_steps, stream=Stream.ACCEPT, num_entries=num_entries)

    def check() -> list[str]:
        expected = uniforms(seeds, positions, Stream.ACCEPT, draft_steps, num_entries=num_entries)
        check_equal("variates", drawn(seeds), expected)
        return ["bits"]

    num_bytes = 8 * num_rows * (3 + num_entries)
    return Work(
        check=check,
        calls=[partial(drawn, own) for (own,) in setting.copies(num_bytes, seeds)],
        num_bytes=num_bytes,
        comes_from=setting.comes_from(num_bytes),
    )
