"""Convolutions along DFlash 2's blocks at the size of Qwen3.8-27B's head, around each layer's attention and MLP."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from kernels import block_conv as kernel
from kernels.benchmarks.case import Case, Setting, Work, check_error, name_of
from kernels.recurrent_segments import RecurrentSegments
from kernels.reference import block_conv as reference

TAPS, GROUP = 2, 16
ROWS_EACH = 8  # of a block


def cases(setting: Setting) -> list[Case]:
    shapes = ((2, 48),) if setting.is_small else ((1, 5120), (64, 5120))
    return [
        Case(
            op="block_conv",
            label=f"{num_blocks} blocks of {ROWS_EACH} rows of {width}, {TAPS} taps"
            + (", counted" if is_counted else ""),
            dtype=name_of(setting.dtype),
            prepare=partial(_prepare, setting, num_blocks, width, is_counted),
        )
        for num_blocks, width in shapes
        for is_counted in (False, True)
    ]


def _prepare(setting: Setting, num_blocks: int, width: int, is_counted: bool) -> Work:
    num_rows, num_deltas = num_blocks * ROWS_EACH, TAPS * width // GROUP
    x, both = setting.normal(num_rows, width, seed=0), setting.normal(num_rows, 2 * num_deltas, seed=1)
    base = setting.normal(TAPS, width, seed=2)
    starts = torch.arange(num_blocks, device=x.device) * ROWS_EACH
    segments = RecurrentSegments(starts=starts, ends=starts, slots=starts, num_rows=ROWS_EACH)
    if is_counted:
        segments = replace(segments, num_rows=None, first_rows=starts, counts=torch.full_like(starts, ROWS_EACH))
    num_bytes = 2 * x.nbytes + both.nbytes // 2 + base.nbytes
    copies = setting.copies(num_bytes, x, both, base)

    def check() -> list[str]:
        deltas = both[:, :num_deltas]
        found, by_torch = (op.block_conv(x, deltas, base, segments) for op in (kernel, reference))
        weights = base.double() + deltas.double().view(num_rows, TAPS, -1).repeat_interleave(GROUP, dim=2)
        blocks = x.double().view(num_blocks, ROWS_EACH, width)
        before = torch.cat((torch.zeros_like(blocks[:, :1]), blocks[:, :-1]), dim=1).view(num_rows, width)
        return [check_error(found, by_torch, weights[:, 0] * x.double() + weights[:, 1] * before)]

    return Work(
        check=check,
        calls=[partial(kernel.block_conv, x_, both_[:, :num_deltas], base_, segments) for x_, both_, base_ in copies],
        num_bytes=num_bytes,
        comes_from=setting.comes_from(num_bytes),
        torch_calls=[
            partial(reference.block_conv, x_, both_[:, :num_deltas], base_, segments) for x_, both_, base_ in copies
        ],
    )
