"""Requests moved on by what a captured step has verified, tokens counted for penalties or not."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels import follow_verified as kernel
from kernels.benchmarks.case import VOCAB_SIZE, Case, Setting, Work, check_equal
from kernels.reference.follow_verified import follow_verified as reference

LONGEST = 8192


def cases(setting: Setting) -> list[Case]:
    sizes = ((3, 5),) if setting.is_small else ((1, 1), (1, 8), (64, 4), (64, 17))
    return [
        Case(
            op="follow_verified",
            label=f"{num_requests} requests, {width} rows of each{', counted' if counts else ''}",
            dtype="int64",
            prepare=partial(_prepare, setting, num_requests, width, counts=counts),
        )
        for counts in (False, True)
        for num_requests, width in sizes
    ]


def _prepare(setting: Setting, num_requests: int, width: int, *, counts: bool) -> Work:
    lengths = setting.integers(2, LONGEST, num_requests, seed=0)
    last_token_ids = setting.integers(0, VOCAB_SIZE, num_requests, 2, seed=1)
    num_accepted = setting.integers(0, width, num_requests, seed=2)
    is_token = torch.arange(width, device=setting.device) <= num_accepted.unsqueeze(1)
    token_ids = torch.where(is_token, setting.integers(0, VOCAB_SIZE, num_requests, width, seed=3), -1)
    verified = (token_ids, num_accepted, torch.full_like(num_accepted, width - 1))
    counted = [torch.zeros(num_requests, VOCAB_SIZE, dtype=torch.int32, device=setting.device)] if counts else []

    def state() -> list[Tensor]:
        return [tensor.clone() for tensor in (lengths, last_token_ids, *verified, *counted)]

    def check() -> list[str]:
        found, wanted = state(), state()
        check_equal("packed result", kernel.follow_verified(*found), reference(*wanted))
        check_equal("lengths", found[0], wanted[0])
        check_equal("last tokens", found[1], wanted[1])
        if counted:
            check_equal("counts", found[-1], wanted[-1])
        return ["equal"]

    return Work(
        check=check,
        calls=[partial(kernel.follow_verified, *state())],
        num_bytes=num_requests * 8 * (2 * width + 10 + width * counts),
        comes_from="L2",
    )
