"""What requests ask to change in logits of Llama-3-8B's vocabulary: penalties behind drafts, and all of it at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import mask_and_penalise as kernel
from kernels.benchmarks.case import VOCAB_SIZE, Case, Setting, Work, check_equal
from kernels.reference.mask_and_penalise import PROMPT
from kernels.reference.mask_and_penalise import mask_and_penalise as reference

PENALTIES = (1.05, 0.1, 0.5)
MODES = ("penalties", "bias, tokens and penalties")
NUM_FORBIDDEN = 4


def cases(setting: Setting) -> list[Case]:
    vocab_size, sizes = (300, ((2, 3),)) if setting.is_small else (VOCAB_SIZE, ((1, 1), (1, 8), (64, 5)))
    return [
        Case(
            op="mask_and_penalise",
            label=f"{mode}, {num_requests} x {rows_of_each} rows",
            dtype="float32",
            prepare=partial(_prepare, setting, mode, num_requests, rows_of_each, vocab_size),
        )
        for mode in MODES
        for num_requests, rows_of_each in sizes
    ]


def _prepare(setting: Setting, mode: str, num_requests: int, rows_of_each: int, vocab_size: int) -> Work:
    num_rows, device = num_requests * rows_of_each, setting.device
    logits = setting.normal(num_rows, vocab_size, seed=0, dtype=torch.float32).mul_(3.0)
    said = setting.integers(-8, 3, num_requests, vocab_size, seed=1).clamp_(min=0).to(torch.int32)
    said[:, ::97] += PROMPT
    others: dict[str, Any] = {"penalties": torch.tensor([PENALTIES], device=device).repeat(num_requests, 1)}
    if rows_of_each > 1:
        places = torch.arange(rows_of_each, device=device)
        drafts = setting.integers(0, vocab_size, num_requests, 1, rows_of_each - 1, seed=2)
        others["ancestors"] = torch.where(places[:-1] < places.unsqueeze(1), drafts, -1).flatten(0, 1)
    tables = [said]
    if mode != "penalties":
        tables.append(setting.normal(num_requests, vocab_size, seed=3, dtype=torch.float32))
        others["forbidden"] = setting.integers(0, vocab_size, num_rows, NUM_FORBIDDEN, seed=4)

    def changed(rows: Tensor, said: Tensor, bias: Tensor | None = None) -> Tensor:
        return kernel.mask_and_penalise(rows, said=said, bias=bias, **others)

    def check() -> list[str]:
        bias = tables[1] if len(tables) > 1 else None
        check_equal("logits", changed(logits, *tables), reference(logits, said=said, bias=bias, **others))
        return ["equal"]

    num_bytes = 2 * logits.nbytes + sum(table.nbytes for table in tables)
    return Work(
        check=check,
        calls=[partial(changed, *own) for own in setting.copies(num_bytes, logits, *tables)],
        num_bytes=num_bytes,
        comes_from=setting.comes_from(num_bytes),
    )
