"""What gates a layer's attention (Qwen3.5-9B), all that an expert gave for a row (Qwen3.5-35B-A3B), or a layer's input.

The last is Gemma 4's: numbers of a token that each layer has its own columns of. Laguna XS gates whole heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import gate as kernel
from kernels.benchmarks.case import Case, Setting, Work, check_error, name_of
from kernels.reference import gate as reference
from kernels.reference.gate import GateFunction

NUM_LAYERS = 30  # of Gemma 4


FUNCTIONS: Mapping[GateFunction, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": torch.relu,
    "identity": torch.clone,
}


def cases(setting: Setting) -> list[Case]:
    shapes = ((3, 70, 70), (3, 70, 1)) if setting.is_small else ((8, 4096, 4096), (512, 4096, 4096), (8, 2048, 1))
    inputs = ((3, 70),) if setting.is_small else ((8, 256), (512, 256))
    return (
        [
            Case(
                op="gate",
                label=f"{num_rows} rows of {width}, {'a gate each' if gates > 1 else 'one gate a row'}",
                dtype=name_of(setting.dtype),
                prepare=partial(_prepare, setting, num_rows, width, gates, "sigmoid"),
            )
            for num_rows, width, gates in shapes
        ]
        + [
            Case(
                op="gate",
                label=f"{num_rows} rows of {width} by gelu, far apart",
                dtype=name_of(setting.dtype),
                prepare=partial(_prepare, setting, num_rows, width, width, "gelu_tanh"),
            )
            for num_rows, width in inputs
        ]
        + [
            Case(
                op="gate",
                label=f"{num_rows} rows of {width} by relu",
                dtype=name_of(setting.dtype),
                prepare=partial(_prepare, setting, num_rows, width, width, "relu"),
            )
            for num_rows, width, _ in shapes[:1]
        ]
        + [
            Case(
                op="gate",
                label=f"{num_rows} rows of {width} by softplus, one gate a head",
                dtype=name_of(setting.dtype),
                prepare=partial(_prepare, setting, num_rows, width, gates, "softplus"),
            )
            for num_rows, width, gates in (((3, 70, 7),) if setting.is_small else ((8, 8192, 64), (512, 8192, 64)))
        ]
    )


def _prepare(setting: Setting, num_rows: int, width: int, gates: int, function: GateFunction) -> Work:
    columns = slice(width, 2 * width) if function == "gelu_tanh" else slice(0, width)
    whole = setting.normal(num_rows, NUM_LAYERS * width if function == "gelu_tanh" else width, seed=0)
    x, by = whole[:, columns], setting.normal(num_rows, gates, seed=1)
    num_bytes = 2 * x.nbytes + by.nbytes
    copies = setting.copies(num_bytes, whole, by)

    def check() -> list[str]:
        wide = by.double()
        exact = x.double() * FUNCTIONS[function](wide).repeat_interleave(width // gates, dim=1)
        return [check_error(kernel.gate(x, by, function), reference.gate(x, by, function), exact)]

    return Work(
        check=check,
        calls=[partial(kernel.gate, own[:, columns], own_by, function) for own, own_by in copies],
        num_bytes=num_bytes,
        comes_from=setting.comes_from(num_bytes),
        torch_calls=[partial(reference.gate, own[:, columns], own_by, function) for own, own_by in copies],
    )
