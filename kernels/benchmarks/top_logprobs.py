"""Logprobs of chosen tokens, and of the likeliest beside them, from logits of Llama-3-8B's vocabulary."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels import top_logprobs as kernel
from kernels.benchmarks.case import (
    VOCAB_SIZE,
    Case,
    CheckFailed,
    Setting,
    Work,
    check_equal,
    check_error,
    check_row_bits,
)
from kernels.reference.top_logprobs import top_logprobs


def cases(setting: Setting) -> list[Case]:
    vocab_size, sizes = (1100, ((3, 0), (3, 4))) if setting.is_small else (VOCAB_SIZE, ((5, 0), (5, 8), (320, 0)))
    return [
        Case(
            op="top_logprobs",
            label=f"{num_rows} rows, {num_top} beside each",
            dtype="float32",
            prepare=partial(_prepare, setting, num_rows, vocab_size, num_top),
        )
        for num_rows, num_top in sizes
    ]


def _prepare(setting: Setting, num_rows: int, vocab_size: int, num_top: int) -> Work:
    logits = 3 * setting.normal(num_rows, vocab_size, seed=0, dtype=torch.float32)
    token_ids = setting.integers(0, vocab_size, num_rows, seed=1)

    def told(rows: Tensor) -> Tensor:
        return kernel.top_logprobs(rows, token_ids, num_top)

    def check() -> list[str]:
        found, expected = told(logits), top_logprobs(logits, token_ids, num_top)
        exact_columns = [0, 2, *range(3, 3 + num_top)]
        check_equal("tokens and ranks", found[:, exact_columns], expected[:, exact_columns])
        ids = torch.cat((token_ids.unsqueeze(1), expected[:, 3 : 3 + num_top].long()), dim=1)
        by_torch, exact = (rows.log_softmax(dim=-1).gather(1, ids) for rows in (logits, logits.double()))
        logprobs = torch.cat((found[:, 1:2], found[:, 3 + num_top :]), dim=1)
        if not torch.equal(logprobs.float().double(), logprobs):
            raise CheckFailed("logprobs that are no float32")
        row_bits = check_row_bits(lambda rows: kernel.top_logprobs(logits[rows], token_ids[rows], num_top), num_rows)
        return [row_bits, "equal", check_error(logprobs.float(), by_torch, exact)]

    num_bytes = logits.nbytes
    copies = setting.copies(num_bytes, logits)
    return Work(
        check=check,
        calls=[partial(told, rows) for (rows,) in copies],
        num_bytes=num_bytes,
        comes_from=setting.comes_from(num_bytes),
        torch_calls=[partial(top_logprobs, rows, token_ids, num_top) for (rows,) in copies],
    )
