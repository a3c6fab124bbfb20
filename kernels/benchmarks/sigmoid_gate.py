"""What gates a layer's attention (Qwen3.5-9B), or all that an expert gave for a row (Qwen3.5-35B-A3B)."""

from __future__ import annotations

from functools import partial

import torch

from kernels import sigmoid_gate as kernel
from kernels.benchmarks.case import Case, Setting, Work, check_error, name_of
from kernels.reference import sigmoid_gate as reference


def cases(setting: Setting) -> list[Case]:
    shapes = ((3, 70, 70), (3, 70, 1)) if setting.is_small else ((8, 4096, 4096), (512, 4096, 4096), (8, 2048, 1))
    return [
        Case(
            op="sigmoid_gate",
            label=f"{num_rows} rows of {width}, {'a gate each' if gates > 1 else 'one gate a row'}",
            dtype=name_of(setting.dtype),
            prepare=partial(_prepare, setting, num_rows, width, gates),
        )
        for num_rows, width, gates in shapes
    ]


def _prepare(setting: Setting, num_rows: int, width: int, gates: int) -> Work:
    x, gate = setting.normal(num_rows, width, seed=0), setting.normal(num_rows, gates, seed=1)
    num_bytes = 2 * x.nbytes + gate.nbytes
    copies = setting.copies(num_bytes, x, gate)

    def check() -> list[str]:
        exact = x.double() * torch.sigmoid(gate.double())
        return [check_error(kernel.sigmoid_gate(x, gate), reference.sigmoid_gate(x, gate), exact)]

    return Work(
        check=check,
        calls=[partial(kernel.sigmoid_gate, *own) for own in copies],
        num_bytes=num_bytes,
        comes_from=setting.comes_from(num_bytes),
        torch_calls=[partial(reference.sigmoid_gate, *own) for own in copies],
    )
