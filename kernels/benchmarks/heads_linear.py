"""Products of heads with a weight each, of GLM-4.7-Flash and DeepSeek-V3, against torch's batched ones (a BLAS).

What turns queries into latents, of parts of wider rows, and what turns latents into values. What comes from memory is
the weight.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels import heads_linear as kernel
from kernels.benchmarks.case import COMPANY, Case, Setting, Work, check_error, check_row_bits, name_of
from kernels.reference.heads_linear import linear_of_heads as by_definition

ROWS = (1, 8, 64, 512)
SHAPES = {  # heads, out_features, in_features
    "GLM-4.7-Flash, to latents": (20, 512, 192),
    "GLM-4.7-Flash, to values": (20, 256, 512),
    "DeepSeek-V3, to latents": (128, 512, 128),
    "DeepSeek-V3, to values": (128, 128, 512),
}
SMALL_SHAPES = {"to latents": (3, 70, 40), "to values": (2, 24, 72)}
TURNED = 64  # elements of a head behind those that are multiplied, or behind the results


def cases(setting: Setting) -> list[Case]:
    shapes, sizes = (SMALL_SHAPES, (5,)) if setting.is_small else (SHAPES, ROWS)
    return [
        Case(
            op="heads_linear",
            label=f"{name}, {num_rows} rows",
            dtype=name_of(setting.dtype),
            prepare=partial(_prepare, setting, num_rows, *shape),
        )
        for name, shape in shapes.items()
        for num_rows in sizes
    ]


def _prepare(setting: Setting, num_rows: int, num_heads: int, out_features: int, in_features: int) -> Work:
    wide = setting.normal(max(num_rows, COMPANY), num_heads, in_features + TURNED, seed=0)
    weight = setting.normal(num_heads * out_features, in_features, seed=1).div_(in_features**0.5)
    x = wide[:, :, :in_features]
    rows, weights = x[:num_rows], weight.view(num_heads, out_features, in_features)

    def ours(some: Tensor) -> Tensor:
        out = some.new_full((len(some), num_heads, out_features + TURNED), torch.nan)[:, :, :out_features]
        kernel.linear_of_heads(some, weight, out)
        return out

    def check() -> list[str]:
        exact = by_definition(rows.double(), weights.double().unbind(), None)
        passed = [check_error(ours(rows), by_definition(rows, weights.unbind(), None), exact)]
        if not setting.is_interpreted:  # there a product is a BLAS's, whose order of summation is its own
            passed.append(check_row_bits(lambda own: ours(x[own]), len(x)))
        return passed

    out = ours(rows)
    copies = [own for (own,) in setting.copies(weight.nbytes, weight)]
    in_torch = [(rows.transpose(0, 1), own.view(weights.shape).transpose(1, 2)) for own in copies]
    return Work(
        check=check,
        calls=[partial(kernel.linear_of_heads, rows, own, out) for own in copies],
        torch_calls=[partial(torch.bmm, *own) for own in in_torch],
        num_bytes=weight.nbytes + (rows.numel() + out.numel()) * setting.dtype.itemsize,
        comes_from=setting.comes_from(weight.nbytes),
    )
