"""Two products of a Llama-3-8B layer and the norm between them: in their launches, and in one of its own.

The rows of "in products" and "a launch" have the same arguments; what the norm costs in either is their difference
from each other and from the products alone (the op `linear`).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import linear as kernel
from kernels.benchmarks.case import Case, Setting, Work, check_error, check_row_bits, name_of
from kernels.reference.act_and_mul import act_and_mul
from kernels.rms_norm import add_rms_norm

EPS = 1e-5
COMPANY = 17
ROWS = (1, 8, 64, 256, 512)
HIDDEN, INTERMEDIATE, QKV = 4096, 14336, 6144
SMALL = (130, 200, 96)


def cases(setting: Setting) -> list[Case]:
    sizes = (1, 5) if setting.is_small else ROWS
    return [
        Case(
            op="norms_in_products",
            label=f"{first}, norm, {second}: {how}, {num_rows} rows",
            dtype=name_of(setting.dtype),
            prepare=partial(_prepare, setting, num_rows, is_gated=second == "gate_up", rides=how == "in products"),
        )
        for first, second in (("o", "gate_up"), ("down", "qkv"))
        for num_rows in sizes
        for how in ("in products", "a launch")
    ]


def _prepare(setting: Setting, num_rows: int, *, is_gated: bool, rides: bool) -> Work:
    hidden, intermediate, qkv = SMALL if setting.is_small else (HIDDEN, INTERMEDIATE, QKV)
    in_features, outputs = (hidden, intermediate) if is_gated else (intermediate, qkv)
    in_company = COMPANY if num_rows == 1 else num_rows
    x, stream = setting.normal(in_company, in_features, seed=0), setting.normal(in_company, hidden, seed=1)
    first = setting.normal(hidden, in_features, seed=2).div_(in_features**0.5)
    second = setting.normal((1 + is_gated) * outputs, hidden, seed=3).div_(hidden**0.5)
    norm, eps = setting.normal(hidden, seed=4), torch.tensor(EPS, device=setting.device)
    multiply = kernel.gated_linear if is_gated else kernel.linear

    def ours(rows: Tensor, residual: Tensor, first: Tensor, second: Tensor) -> Tensor:
        if rides:
            return multiply(kernel.linear_to_norm(rows, first, None, residual, norm, eps)[0], second)
        return multiply(add_rms_norm(kernel.linear(rows, first), residual, norm, eps)[0], second)

    def torchs(rows: Tensor, residual: Tensor, first: Tensor, second: Tensor) -> Tensor:
        normed = F.rms_norm(F.linear(rows, first) + residual, (hidden,), norm.to(rows.dtype), EPS)
        found = F.linear(normed, second)
        return act_and_mul(found) if is_gated else found

    def check() -> list[str]:
        some = slice(0, num_rows)
        exact = torchs(*(tensor.double() for tensor in (x[some], stream[some], first, second)))
        given = (x[some], stream[some], first, second)
        passed = [check_error(ours(*given), torchs(*given), exact)]
        if not setting.is_interpreted:  # there a product is a BLAS's, whose order of summation is its own
            passed.append(check_row_bits(lambda own: ours(x[own], stream[own], first, second), in_company))
        return passed

    rows, residual, num_weight_bytes = x[:num_rows], stream[:num_rows], first.nbytes + second.nbytes
    copies = setting.copies(num_weight_bytes, first, second)
    return Work(
        check=check,
        calls=[partial(ours, rows, residual, *own) for own in copies],
        torch_calls=[partial(torchs, rows, residual, *own) for own in copies],
        # The weights, what goes in, the stream that comes out and the result; nothing that lies between.
        num_bytes=num_weight_bytes + norm.nbytes + num_rows * (in_features + 2 * hidden + outputs) * x.element_size(),
        comes_from=setting.comes_from(num_weight_bytes),
    )
