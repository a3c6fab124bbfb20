"""Llama-3-8B's products that are cut into partial sums, with what follows them: left in parts, and added up first.

"in parts" and "added up" have the same arguments; what adding up by itself costs is their difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import linear as kernel
from kernels.benchmarks.case import COMPANY, Case, Setting, Work, check_equal, check_error, check_row_bits, name_of
from kernels.partial_sums import add_up
from kernels.reference.act_and_mul import act_and_mul
from kernels.reference.partial_sums import PartialSums
from kernels.rms_norm import add_rms_norm
from kernels.rope import rope_and_write

EPS = 1e-5
ROWS = (1, 8, 64, 256)
NUM_PARTS, BLOCK_SIZE = 4, 16
SMALL = {"hidden": 1024, "intermediate": 1056, "heads": 4, "kv_heads": 2, "head_dim": 16}
LARGE = {"hidden": 4096, "intermediate": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128}

Multiply = Callable[[Tensor, Tensor], Any]  # kernels.linear.linear, or linear_in_parts


def cases(setting: Setting) -> list[Case]:
    sizes, shape = ((1, 3), SMALL) if setting.is_small else (ROWS, LARGE)
    asked: list[tuple[str, Callable[..., Work]]] = [
        (f"{what}: {how}", partial(prepare, multiply=multiply))
        for what, prepare in (
            ("o, norm, gate_up", partial(_prepare_norm, is_gated=True)),
            ("down, norm, qkv", partial(_prepare_norm, is_gated=False)),
            ("qkv, rotation", _prepare_rotation),
        )
        for how, multiply in (("in parts", kernel.linear_in_parts), ("added up", kernel.linear))
    ]
    asked.append(("add up", _prepare_add_up))
    return [
        Case(
            op="partial_sums",
            label=f"{label}, {num_rows} rows",
            dtype=name_of(setting.dtype),
            prepare=partial(prepare, setting, num_rows, shape),
        )
        for label, prepare in asked
        for num_rows in sizes
    ]


def _prepare_norm(
    setting: Setting, num_rows: int, shape: dict[str, int], *, is_gated: bool, multiply: Multiply
) -> Work:
    hidden, intermediate = shape["hidden"], shape["intermediate"]
    in_features, outputs = (hidden, intermediate) if is_gated else (intermediate, _width(shape))
    in_company = COMPANY if num_rows == 1 else num_rows
    x, stream = setting.normal(in_company, in_features, seed=0), setting.normal(in_company, hidden, seed=1)
    first = setting.normal(hidden, in_features, seed=2).div_(in_features**0.5)
    second = setting.normal((1 + is_gated) * outputs, hidden, seed=3).div_(hidden**0.5)
    norm, eps = setting.normal(hidden, seed=4), torch.tensor(EPS, device=setting.device)
    second_product = kernel.gated_linear if is_gated else kernel.linear

    def ours(rows: Tensor, residual: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return second_product(add_rms_norm(multiply(rows, first), residual, norm, eps)[0], second)

    def torchs(rows: Tensor, residual: Tensor, first: Tensor, second: Tensor) -> Tensor:
        normed = F.rms_norm(F.linear(rows, first) + residual, (hidden,), norm.to(rows.dtype), EPS)
        found = F.linear(normed, second)
        return act_and_mul(found) if is_gated else found

    def check() -> list[str]:
        some = slice(0, num_rows)
        given = (x[some], stream[some], first, second)
        passed = [check_error(ours(*given), torchs(*given), torchs(*(tensor.double() for tensor in given)))]
        if not setting.is_interpreted:  # there a product is a BLAS's, whose order of summation is its own
            passed.append(check_row_bits(lambda own: ours(x[own], stream[own], first, second), in_company))
        return passed

    num_weight_bytes = first.nbytes + second.nbytes
    copies = setting.copies(num_weight_bytes, first, second)
    rows, residual = x[:num_rows], stream[:num_rows]
    return Work(
        check=check,
        calls=[partial(ours, rows, residual, *own) for own in copies],
        torch_calls=[partial(torchs, rows, residual, *own) for own in copies],
        # The weights, what goes in, the stream that comes out and the result; nothing that lies between.
        num_bytes=num_weight_bytes + norm.nbytes + num_rows * (in_features + 2 * hidden + outputs) * x.element_size(),
        comes_from=setting.comes_from(num_weight_bytes),
    )


def _prepare_rotation(setting: Setting, num_rows: int, shape: dict[str, int], *, multiply: Multiply) -> Work:
    heads, kv_heads, head_dim = shape["heads"], shape["kv_heads"], shape["head_dim"]
    x = setting.normal(num_rows, shape["hidden"], seed=0)
    weight = setting.normal(_width(shape), shape["hidden"], seed=1).div_(shape["hidden"] ** 0.5)
    table = setting.normal(num_rows, head_dim, seed=2).float()
    positions = torch.arange(num_rows, device=setting.device)
    cache = x.new_zeros(num_rows // BLOCK_SIZE + 2, BLOCK_SIZE, 2 * kv_heads * head_dim)

    def rotate(qkv: Tensor | PartialSums) -> Tensor:
        return rope_and_write(
            qkv,
            table,
            positions,
            positions + BLOCK_SIZE,
            cache,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
        )

    def ours(weight: Tensor) -> Tensor:
        return rotate(multiply(x, weight))

    def check() -> list[str]:
        found, held = ours(weight), cache.clone()
        check_equal("queries", found, rotate(kernel.linear(x, weight)))
        check_equal("keys and values", held, cache)
        return ["equal"]

    copies = setting.copies(weight.nbytes, weight)
    return Work(
        check=check,
        calls=[partial(ours, *own) for own in copies],
        num_bytes=weight.nbytes + num_rows * (shape["hidden"] + _width(shape)) * x.element_size() + table.nbytes,
        comes_from=setting.comes_from(weight.nbytes),
    )


def _prepare_add_up(setting: Setting, num_rows: int, shape: dict[str, int]) -> Work:
    sums = torch.stack([setting.normal(num_rows, shape["hidden"], seed=seed).float() for seed in range(NUM_PARTS)])
    left = PartialSums(parts=sums, scales=None, bias=setting.normal(shape["hidden"], seed=9), dtype=setting.dtype)
    residual = setting.normal(num_rows, shape["hidden"], seed=10)

    def check() -> list[str]:
        check_equal("the sum", add_up(left, residual), left.total() + residual)
        return ["equal"]

    return Work(
        check=check,
        calls=[
            partial(add_up, replace(left, parts=parts), own)
            for parts, own in setting.copies(sums.nbytes, sums, residual)
        ],
        num_bytes=sums.nbytes + 2 * residual.nbytes,
        comes_from=setting.comes_from(sums.nbytes),
    )


def _width(shape: dict[str, int]) -> int:
    return (shape["heads"] + 2 * shape["kv_heads"]) * shape["head_dim"]
