"""The norms of Llama-3-8B's layers, residual add included, and the pair in front of its draft head's first layer.

And, of the same size, what Gemma's layers do and OLMo's: rows are normed before they are added, by weights of float32;
Gemma 4's scale the sum, OLMo's norm none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kernels import rms_norm as kernel
from kernels.benchmarks.case import (
    COMPANY,
    VOCAB_SIZE,
    Case,
    Setting,
    Work,
    check_equal,
    check_error,
    check_row_bits,
    name_of,
)
from kernels.reference import rms_norm as reference

HIDDEN, EPS = 4096, 1e-5


def cases(setting: Setting) -> list[Case]:
    hidden, sizes = (100, (1, 3)) if setting.is_small else (HIDDEN, (1, 8, 64, 512))
    pair_sizes = (3,) if setting.is_small else (1, 64)
    return [
        Case(
            op="rms_norm",
            label=f"{what}, {num_rows} rows",
            dtype=name_of(setting.dtype),
            prepare=partial(prepare, setting, num_rows, hidden),
        )
        for what, prepare, own_sizes in (
            ("add and norm", partial(_prepare_sum, norms_x=False), sizes),
            ("norm, add and norm", partial(_prepare_sum, norms_x=True), pair_sizes),
            ("norm, add, scale and norm", partial(_prepare_sum, norms_x=True, is_scaled=True), pair_sizes),
            ("norm and add", _prepare_normed, pair_sizes),
            ("embeddings and states", _prepare_pair, pair_sizes),
        )
        for num_rows in own_sizes
    ]


def _prepare_sum(setting: Setting, num_rows: int, hidden: int, *, norms_x: bool, is_scaled: bool = False) -> Work:
    in_company = COMPANY if num_rows == 1 else num_rows
    x, added = (setting.normal(in_company, hidden, seed=seed) for seed in (0, 1))
    weight, x_weight = (setting.normal(hidden, seed=seed) for seed in (2, 3))
    eps = torch.tensor(EPS, device=setting.device)
    own_weight, own_x_weight = (weight.float(), x_weight.float()) if norms_x else (weight, None)
    scale = torch.tensor(0.7, device=setting.device) if is_scaled else None

    def op(rows: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return kernel.add_rms_norm(rows, residual, own_weight, eps, own_x_weight, scale)

    def check() -> list[str]:
        first = slice(0, num_rows)
        normed, residual = op(x[first], added[first])
        branch = x[first] if own_x_weight is None else kernel.rms_norm(x[first], own_x_weight, eps)
        total = added[first] + branch
        check_equal("residual", residual, total if scale is None else (total.float() * scale).to(total.dtype))
        by_torch, exact = reference.rms_norm(residual, own_weight, eps), exact_norm(residual, weight, eps)
        bits = check_row_bits(lambda rows: op(x[rows], added[rows])[0], in_company)
        return [check_error(normed, by_torch, exact), bits]

    return _work(
        setting, check, op, x[:num_rows], added[:num_rows], rows_out=2, weight_bytes=(1 + norms_x) * own_weight.nbytes
    )


def _prepare_normed(setting: Setting, num_rows: int, hidden: int) -> Work:
    in_company = COMPANY if num_rows == 1 else num_rows
    x, added = (setting.normal(in_company, hidden, seed=seed) for seed in (0, 1))
    weight, eps = setting.normal(hidden, seed=2).float(), torch.tensor(EPS, device=setting.device)

    def op(rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return kernel.add_normed(rows, residual, weight, eps)

    def check() -> list[str]:
        first = slice(0, num_rows)
        total = op(x[first], added[first])
        check_equal("sum", total, added[first] + kernel.rms_norm(x[first], weight, eps))
        return ["equal", check_row_bits(lambda rows: op(x[rows], added[rows]), in_company)]

    return _work(setting, check, op, x[:num_rows], added[:num_rows], rows_out=1, weight_bytes=weight.nbytes)


def _work(
    setting: Setting,
    check: Callable[[], list[str]],
    op: Callable[[torch.Tensor, torch.Tensor], object],
    x: torch.Tensor,
    added: torch.Tensor,
    *,
    rows_out: int,  # rows written for each pair that is read
    weight_bytes: int,
) -> Work:
    num_bytes = x.nbytes + added.nbytes
    return Work(
        check=check,
        calls=[partial(op, own, own_added) for own, own_added in setting.copies(num_bytes, x, added)],
        num_bytes=num_bytes + rows_out * x.nbytes + weight_bytes,
        comes_from=setting.comes_from(num_bytes),
    )


def _prepare_pair(setting: Setting, num_rows: int, hidden: int) -> Work:
    in_company = COMPANY if num_rows == 1 else num_rows
    vocab = 7 if setting.is_small else VOCAB_SIZE
    table, token_ids = setting.normal(vocab, hidden, seed=0), setting.integers(0, vocab, in_company, seed=1)
    states, eps = setting.normal(in_company, hidden, seed=2), torch.tensor(EPS, device=setting.device)
    norms: dict[str, Any] = {
        "embedding_weight": setting.normal(hidden, seed=3),
        "state_weight": setting.normal(hidden, seed=4),
        "eps": eps,
    }

    def check() -> list[str]:
        def op(rows: slice) -> torch.Tensor:
            return kernel.rms_norm_pair(table, token_ids[rows], states[rows], **norms)

        first = slice(0, num_rows)
        by_torch = reference.rms_norm_pair(table, token_ids[first], states[first], **norms)
        halves = ((table[token_ids[first]], "embedding_weight"), (states[first], "state_weight"))
        exact = torch.cat([exact_norm(rows, norms[name], eps) for rows, name in halves], dim=1)
        return [check_error(op(first), by_torch, exact), check_row_bits(op, in_company)]

    row_bytes = hidden * setting.dtype.itemsize
    return Work(
        check=check,
        calls=[
            partial(kernel.rms_norm_pair, table, setting.integers(0, vocab, num_rows, seed=seed), own, **norms)
            for seed, (own,) in enumerate(setting.copies(2 * num_rows * row_bytes, states[:num_rows]))
        ],
        num_bytes=(4 * num_rows + 2) * row_bytes + num_rows * token_ids.itemsize,
        comes_from=setting.comes_from(2 * num_rows * row_bytes),
    )


def exact_norm(rows: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """float64."""
    wide = rows.double()
    return wide * (wide.square().mean(-1, keepdim=True) + eps.double()).rsqrt() * weight.double()
