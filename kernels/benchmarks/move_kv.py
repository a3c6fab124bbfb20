"""An accepted branch of a tree into its place: 4 slots of each of 64 requests in all of Llama-3-8B's layers."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels import move_kv as kernel
from kernels.benchmarks.case import Case, Setting, Work, check_equal, name_of
from kernels.reference import move_kv as reference

SLOTS = 16  # of a request
SOURCES, TARGETS = (5, 7, 9, 12), (1, 2, 3, 4)  # among them


def cases(setting: Setting) -> list[Case]:
    num_requests, num_layers, width = (3, 2, 40) if setting.is_small else (64, 32, 2 * 8 * 128)
    return [
        Case(
            op="move_kv",
            label=f"{num_requests} requests x {len(SOURCES)} slots, {num_layers} layers",
            dtype=name_of(setting.dtype),
            prepare=partial(_prepare, setting, num_requests, num_layers, width),
        )
    ]


def _prepare(setting: Setting, num_requests: int, num_layers: int, width: int) -> Work:
    num_slots = num_requests * SLOTS
    kv = setting.normal(num_layers * num_slots * width, seed=0)
    offsets = torch.arange(num_layers, device=setting.device) * (num_slots * width)
    widths = torch.full((num_layers,), width, device=setting.device)
    first = torch.arange(num_requests, device=setting.device).unsqueeze(1) * SLOTS
    sources, targets = (first + torch.tensor(places, device=setting.device) for places in (SOURCES, TARGETS))

    def move(cache: Tensor) -> None:
        kernel.move_kv(cache, offsets, widths, sources, targets, widest=width)

    def check() -> list[str]:
        found, wanted = kv.clone(), kv.clone()
        move(found)
        reference.move_kv(wanted, offsets, widths, sources, targets)
        check_equal("slots", found, wanted)
        return ["slots"]

    moved_bytes = num_requests * len(SOURCES) * num_layers * width * setting.dtype.itemsize
    return Work(
        check=check,
        calls=[partial(move, own) for (own,) in setting.copies(2 * moved_bytes, kv)],
        num_bytes=2 * moved_bytes,
        comes_from=setting.comes_from(2 * moved_bytes),
    )
