"""Short convolutions at LFM2.5-1.2B's width: plain steps, verification, and a prompt.

What a call must move are the projected rows, and the ring's products that it reads and writes. Every call of a case
writes what the one before wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernels import short_conv as kernel
from kernels.benchmarks.case import Case, Setting, Work, check_equal, check_error, name_of
from kernels.recurrent_segments import RecurrentSegments
from kernels.reference import short_conv as reference
from kernels.reference.short_conv import ConvStates, ConvWeights

WIDTH, TAPS = 2048, 3
CONTEXT, UNCERTAIN = 12, 8  # tokens before those of a call, and the most that may be taken back
SHAPES = {  # what -> requests, rows of each
    "1 request, 1 row": (1, 1),
    "1 request, 8 rows": (1, 8),
    "64 requests, 1 row": (64, 1),
    "64 requests, 8 rows": (64, 8),
    "1 request, a prompt of 2,048": (1, 2048),
}


def cases(setting: Setting) -> list[Case]:
    shapes = {"2 requests, 3 rows": (2, 3)} if setting.is_small else SHAPES
    width = 80 if setting.is_small else WIDTH
    return [
        Case(
            op="short_conv",
            label=f"{label} of {width}",
            dtype=name_of(setting.dtype),
            prepare=partial(_prepare, setting, width, *shape),
        )
        for label, shape in shapes.items()
    ]


def _prepare(setting: Setting, width: int, num_requests: int, num_rows: int) -> Work:
    convolution, bias = setting.normal(TAPS, width, seed=0), setting.normal(width, seed=1)
    mixed = setting.normal(num_requests * num_rows, 3 * width, seed=2)
    context = setting.normal(num_requests * CONTEXT, 3 * width, seed=3)

    def segments(first: int, count: int) -> RecurrentSegments:
        starts = torch.full((num_requests,), first, dtype=torch.int64, device=setting.device)
        slots = torch.arange(1, num_requests + 1, device=setting.device)
        return RecurrentSegments(starts=starts, ends=starts, slots=slots, num_rows=count)

    def weights(dtype: torch.dtype) -> ConvWeights:
        return ConvWeights(convolution=convolution.to(dtype), bias=bias.to(dtype))

    def begun(op: Callable[..., Tensor], dtype: torch.dtype) -> ConvStates:
        states = ConvStates.empty(width, TAPS, num_requests + 1, UNCERTAIN, dtype, setting.device)
        op(context.to(dtype), segments(0, CONTEXT), states, weights(dtype))
        return states

    launched = segments(CONTEXT, num_rows)

    def computed(op: Callable[..., Tensor], dtype: torch.dtype) -> Tensor:
        return op(mixed.to(dtype), launched, begun(op, dtype), weights(dtype))

    def check() -> list[str]:
        found = computed(kernel.short_conv, setting.dtype)
        by_torch, exact = (computed(reference.short_conv, dtype) for dtype in (setting.dtype, torch.float64))
        passed = [check_error(found, by_torch, exact)]
        states = begun(kernel.short_conv, setting.dtype)
        for row in range(min(num_rows, 8)):
            rows = slice(row, None, num_rows)
            alone = kernel.short_conv(
                mixed[rows].contiguous(), segments(CONTEXT + row, 1), states, weights(mixed.dtype)
            )
            check_equal(f"row {row} alone", alone, found[rows])
        return [*passed, "row bits"]

    recent, own = begun(kernel.short_conv, setting.dtype).recent, weights(setting.dtype)
    num_kept = num_requests * (TAPS - 1 + min(num_rows, recent.shape[1]))
    num_bytes = mixed.nbytes + mixed.nbytes // 3 + (num_kept + TAPS + 1) * width * mixed.element_size()
    copies = setting.copies(num_bytes, mixed, recent)

    def call(mixed: Tensor, recent: Tensor) -> None:
        kernel.short_conv(mixed, launched, ConvStates(recent=recent), own)

    return Work(
        check=check,
        calls=[partial(call, *tensors) for tensors in copies],
        num_bytes=num_bytes,
        comes_from=setting.comes_from(num_bytes),
    )
