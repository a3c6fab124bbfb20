"""Llama-3-8B's products, against torch's (a BLAS): qkv, o, gate and up, down, the head.

What comes from memory is the weight; the rows are few and were written just before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import linear as kernel
from kernels.benchmarks.case import Case, Setting, Work, check_error, check_row_bits, name_of
from kernels.reference.silu_and_mul import silu_and_mul

ROWS = (1, 8, 64, 512)
WEIGHTS = {  # out_features, in_features
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (2 * 14336, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
SMALL_WEIGHTS = {"qkv": (96, 70), "o": (64, 128), "gate_up": (2 * 72, 101), "down": (64, 200), "head": (130, 64)}
COMPANY = 17  # rows that one row is compared among

Product = Callable[[Tensor, Tensor], Tensor]  # of rows and weight


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight).to(_dtype_of_logits(x))


def _dtype_of_logits(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)  # float64 where the check asks for exact ones


# Ours and torch's; the projections are all one product.
PRODUCTS: dict[str, tuple[Product, Product]] = {
    **dict.fromkeys(("qkv", "o", "down"), (lambda x, w: kernel.linear(x, w), F.linear)),
    "gate_up": (lambda x, w: kernel.gated_linear(x, w), lambda x, w: silu_and_mul(F.linear(x, w))),
    "head": (lambda x, w: kernel.linear(x, w, out_dtype=_dtype_of_logits(x)), _logits),
}


def cases(setting: Setting) -> list[Case]:
    weights, sizes = (SMALL_WEIGHTS, (1, 5)) if setting.is_small else (WEIGHTS, ROWS)
    return [
        Case(
            op="linear",
            label=f"{name}, {num_rows} rows",
            dtype=name_of(setting.dtype),
            prepare=partial(_prepare, setting, name, num_rows, *shape),
        )
        for name, shape in weights.items()
        for num_rows in sizes
    ]


def _prepare(setting: Setting, name: str, num_rows: int, out_features: int, in_features: int) -> Work:
    ours, torchs = PRODUCTS[name]
    num_outputs = out_features // 2 if name == "gate_up" else out_features
    in_company = COMPANY if num_rows == 1 else num_rows
    x = setting.normal(in_company, in_features, seed=0)
    weight = setting.normal(out_features, in_features, seed=1).div_(in_features**0.5)
    out_dtype = torch.float32 if name == "head" else setting.dtype

    def check() -> list[str]:
        own = x[:num_rows]
        passed = [check_error(ours(own, weight), torchs(own, weight), torchs(own.double(), weight.double()))]
        if not setting.is_interpreted:  # there a product is a BLAS's, whose order of summation is its own
            passed.append(check_row_bits(lambda rows: ours(x[rows], weight), in_company))
        return passed

    weight_bytes = weight.numel() * weight.element_size()
    arguments = [(x[:num_rows], own) for (own,) in setting.copies(weight_bytes, weight)]
    output_bytes = num_rows * num_outputs * out_dtype.itemsize
    return Work(
        check=check,
        calls=[partial(ours, *own) for own in arguments],
        torch_calls=[partial(torchs, *own) for own in arguments],
        num_bytes=weight_bytes + num_rows * in_features * setting.dtype.itemsize + output_bytes,
        comes_from=setting.comes_from(weight_bytes),
    )
