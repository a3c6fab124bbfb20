"""The norm of Llama-3-8B's layers, residual add included."""

from __future__ import annotations

from functools import partial

import torch

from kernels import rms_norm as kernel
from kernels.benchmarks.case import Case, Setting, Work, check_equal, check_error, check_row_bits, name_of
from kernels.reference import rms_norm as reference

HIDDEN, EPS = 4096, 1e-5
COMPANY = 17


def cases(setting: Setting) -> list[Case]:
    hidden, sizes = (100, (1, 3)) if setting.is_small else (HIDDEN, (1, 8, 64, 512))
    return [
        Case(
            op="rms_norm",
            label=f"add and norm, {num_rows} rows",
            dtype=name_of(setting.dtype),
            prepare=partial(_prepare, setting, num_rows, hidden),
        )
        for num_rows in sizes
    ]


def _prepare(setting: Setting, num_rows: int, hidden: int) -> Work:
    in_company = COMPANY if num_rows == 1 else num_rows
    x, added = (setting.normal(in_company, hidden, seed=seed) for seed in (0, 1))
    weight, eps = setting.normal(hidden, seed=2), torch.tensor(EPS, device=setting.device)

    def check() -> list[str]:
        normed, residual = kernel.add_rms_norm(x[:num_rows], added[:num_rows], weight, eps)
        by_torch, wanted = reference.add_rms_norm(x[:num_rows], added[:num_rows], weight, eps)
        check_equal("residual", residual, wanted)
        wide = wanted.double()
        exact = wide * (wide.square().mean(-1, keepdim=True) + eps.double()).rsqrt() * weight.double()
        bits = check_row_bits(lambda rows: kernel.add_rms_norm(x[rows], added[rows], weight, eps)[0], in_company)
        return [check_error(normed, by_torch, exact), bits]

    row_bytes = hidden * setting.dtype.itemsize
    return Work(
        check=check,
        calls=[
            partial(kernel.add_rms_norm, own, own_added, weight, eps)
            for own, own_added in setting.copies(2 * num_rows * row_bytes, x[:num_rows], added[:num_rows])
        ],
        num_bytes=(4 * num_rows + 1) * row_bytes,
        comes_from=setting.comes_from(2 * num_rows * row_bytes),
    )
