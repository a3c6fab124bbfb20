"""The rows that a captured step verifies."""

from __future__ import annotations

from functools import partial

from kernels import fit_drafts as kernel
from kernels.benchmarks.case import VOCAB_SIZE, Case, Setting, Work, check_equal
from kernels.reference.fit_drafts import fit_drafts as reference

LONGEST = 8192


def cases(setting: Setting) -> list[Case]:
    sizes = ((3, 4),) if setting.is_small else ((1, 7), (64, 3), (64, 16))
    return [
        Case(
            op="fit_drafts",
            label=f"{num_requests} requests, {num_drafts} drafts of each",
            dtype="int64",
            prepare=partial(_prepare, setting, num_requests, num_drafts),
        )
        for num_requests, num_drafts in sizes
    ]


def _prepare(setting: Setting, num_requests: int, num_drafts: int) -> Work:
    drafts = setting.integers(-1, VOCAB_SIZE, num_requests, num_drafts, seed=0)
    last_token_ids = setting.integers(0, VOCAB_SIZE, num_requests, seed=1)
    lengths = setting.integers(2, LONGEST, num_requests, seed=2)
    limits = lengths + setting.integers(1, num_drafts + 3, num_requests, seed=3)
    arguments = (drafts, last_token_ids, lengths, limits)

    def check() -> list[str]:
        for name, found, wanted in zip(
            ("drafts", "rows"), kernel.fit_drafts(*arguments), reference(*arguments), strict=True
        ):
            check_equal(name, found, wanted)
        return ["equal"]

    return Work(
        check=check,
        calls=[partial(kernel.fit_drafts, *arguments)],
        num_bytes=num_requests * 8 * (3 * num_drafts + 4),
        comes_from="L2",
    )
