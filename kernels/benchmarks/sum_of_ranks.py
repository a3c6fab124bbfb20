"""What two or eight ranks computed of a product into the residual stream, added up."""

from __future__ import annotations

from functools import partial

import torch

from kernels import sum_of_ranks as kernel
from kernels.benchmarks.case import Case, Setting, Work, check_equal, name_of
from kernels.reference import sum_of_ranks as reference

HIDDEN = 8192  # Llama 70B's


def cases(setting: Setting) -> list[Case]:
    shapes = ((2, 3, 70),) if setting.is_small else ((2, 8, HIDDEN), (8, 8, HIDDEN), (8, 1088, HIDDEN))
    return [
        Case(
            op="sum_of_ranks",
            label=f"{num_ranks} ranks, {num_rows} rows of {width}",
            dtype=name_of(setting.dtype),
            prepare=partial(_prepare, setting, num_ranks, num_rows, width),
        )
        for num_ranks, num_rows, width in shapes
    ]


def _prepare(setting: Setting, num_ranks: int, num_rows: int, width: int) -> Work:
    parts = setting.normal(num_ranks, num_rows, width, seed=0)
    num_bytes = parts.nbytes * (num_ranks + 1) // num_ranks
    copies = setting.copies(num_bytes, parts)

    def check() -> list[str]:
        check_equal("sums", kernel.sum_of_ranks(parts), reference.sum_of_ranks(parts))
        return ["equal"]

    return Work(
        check=check,
        calls=[partial(kernel.sum_of_ranks, own) for (own,) in copies],
        num_bytes=num_bytes,
        comes_from=setting.comes_from(num_bytes),
        torch_calls=[partial(torch.sum, own, dim=0) for (own,) in copies],
    )
