"""Llama-3-8B's products, against torch's (a BLAS): qkv, o, gate and up, down, the head; and with quantized weights.

What comes from memory is the weight; the rows are few and were written just before. Beside quantized weights torch
multiplies by the same weights in the rows' dtype.
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
from kernels.benchmarks.case import COMPANY, Case, Setting, Work, check_error, check_row_bits, name_of
from kernels.benchmarks.weights import copies_of, num_bytes_of, random_codes
from kernels.quantized_weight import CODES, FP4_GROUP, QuantizedWeight, fits_codes, num_groups, quantize
from kernels.reference.act_and_mul import act_and_mul
from kernels.words import Kind

ROWS = (1, 8, 64, 256, 512)
WEIGHTS = {  # out_features, in_features
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (2 * 14336, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
SMALL_WEIGHTS = {"qkv": (96, 70), "o": (64, 256), "gate_up": (2 * 72, 101), "down": (64, 200), "head": (130, 64)}
# Quantized weights, and the inputs that share a scale (None: all of an output's).
HELD: dict[str, tuple[Kind, int | None]] = {
    "fp8": ("fp8", None),
    "fp8 in groups of 128": ("fp8", 128),
    "int8": ("int8", None),
    "int4 in groups of 128": ("int4", 128),  # with zero points
    "NVFP4": ("fp4", FP4_GROUP),
}
HELD_ROWS = (1, 8, 512)

Product = Callable[[Tensor, Any], Tensor]  # of rows and weight


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight).to(_dtype_of_logits(x))


def _dtype_of_logits(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)  # float64 where the check asks for exact ones


# Ours and torch's; the projections are all one product.
PRODUCTS: dict[str, tuple[Product, Product]] = {
    **dict.fromkeys(("qkv", "o", "down"), (lambda x, w: kernel.linear(x, w), F.linear)),
    "gate_up": (lambda x, w: kernel.gated_linear(x, w), lambda x, w: act_and_mul(F.linear(x, w))),
    "head": (lambda x, w: kernel.linear(x, w, out_dtype=_dtype_of_logits(x)), _logits),
}


def cases(setting: Setting) -> list[Case]:
    weights, sizes, held_sizes = (SMALL_WEIGHTS, (1, 5), (5,)) if setting.is_small else (WEIGHTS, ROWS, HELD_ROWS)
    asked: list[tuple[str, int, str | None]] = [(name, num_rows, None) for name in weights for num_rows in sizes]
    asked += [
        (name, rows, held)
        for name, (_, in_features) in weights.items()
        if name != "head"
        for rows in held_sizes
        for held, (kind, group_size) in HELD.items()
        if kind not in CODES or fits_codes(kind, in_features, group_size or in_features)
    ]
    return [
        Case(
            op="linear",
            label=f"{name}, {num_rows} rows" + ("" if held is None else f", {held}"),
            dtype=name_of(setting.dtype),
            prepare=partial(_prepare, setting, name, num_rows, *weights[name], held),
        )
        for name, num_rows, held in asked
    ]


def _quantized(weight: Tensor, held: str) -> QuantizedWeight:
    """With one scale for all groups of an output: what a product takes does not depend on it."""
    kind, group_size = HELD[held]
    if kind in CODES:
        return random_codes(weight, kind, group_size or weight.shape[1])
    found = quantize(weight, kind).in_words()
    if group_size is None:
        return found
    groups = found.scales.expand(-1, num_groups(weight.shape[1], group_size)).contiguous()
    return replace(found, scales=groups, group_size=group_size)


def _prepare(setting: Setting, name: str, num_rows: int, out_features: int, in_features: int, held: str | None) -> Work:
    ours, torchs = PRODUCTS[name]
    num_outputs = out_features // 2 if name == "gate_up" else out_features
    in_company = COMPANY if num_rows == 1 else num_rows
    x = setting.normal(in_company, in_features, seed=0)
    dense = setting.normal(out_features, in_features, seed=1).div_(in_features**0.5)
    weight = dense if held is None else _quantized(dense, held)
    if isinstance(weight, QuantizedWeight):
        dense = weight.dense()
    out_dtype = torch.float32 if name == "head" else setting.dtype
    rows = x[:num_rows]

    def check() -> list[str]:
        exact = dense.double()
        if isinstance(weight, QuantizedWeight):
            exact = weight.exact().double()
        passed = [check_error(ours(rows, weight), torchs(rows, dense), torchs(rows.double(), exact))]
        if not setting.is_interpreted:  # there a product is a BLAS's, whose order of summation is its own
            passed.append(check_row_bits(lambda some: ours(x[some], weight), in_company))
        return passed

    num_weight_bytes = num_bytes_of(weight)
    return Work(
        check=check,
        calls=[partial(ours, rows, own) for own in copies_of(setting, weight, num_weight_bytes)],
        torch_calls=[partial(torchs, rows, own) for own in copies_of(setting, dense, dense.nbytes)],
        num_bytes=num_weight_bytes
        + num_rows * in_features * setting.dtype.itemsize
        + num_rows * num_outputs * out_dtype.itemsize,
        comes_from=setting.comes_from(num_weight_bytes),
    )
