"""The cuts and masses of rows that top_p or top_k truncates, as probabilistic rejection needs them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels import truncation as kernel
from kernels.benchmarks.case import VOCAB_SIZE, Case, Setting, Work, check_equal
from kernels.benchmarks.sampling import TEMPERATURE, TOP_P
from kernels.reference import sampling as reference

TOP_K = 50


def cases(setting: Setting) -> list[Case]:
    vocab_size, sizes = (300, (2,)) if setting.is_small else (VOCAB_SIZE, (1, 64, 320))
    return [
        Case(
            op="truncation",
            label=f"{mode}, {num_rows} rows",
            dtype="float32",
            prepare=partial(_prepare, setting, mode, num_rows, vocab_size),
        )
        for mode in ("top_p", "top_k")
        for num_rows in sizes
    ]


def _prepare(setting: Setting, mode: str, num_rows: int, vocab_size: int) -> Work:
    logits = setting.normal(num_rows, vocab_size, seed=0, dtype=torch.float32).mul_(3.0)
    positions = torch.arange(num_rows, device=setting.device)
    temperatures = torch.full((num_rows,), TEMPERATURE, device=setting.device)
    top_p = torch.full((num_rows,), TOP_P, dtype=torch.float64, device=setting.device) if mode == "top_p" else None
    top_k = torch.full((num_rows,), TOP_K, device=setting.device) if mode == "top_k" else None

    def truncated_rows(rows: Tensor) -> kernel.TruncatedRows:
        return kernel.truncate_rows(rows, positions, temperatures=temperatures, top_k=top_k, top_p=top_p)

    def check() -> list[str]:
        truncated = truncated_rows(logits)
        scaled = logits / temperatures.unsqueeze(1)
        wanted = scaled if top_k is None else reference.apply_top_k(scaled, top_k, max_top_k=TOP_K)
        wanted = wanted if top_p is None else reference.apply_top_p(wanted, top_p)
        maxima = wanted.amax(dim=1)
        check_equal("kept tokens", scaled >= truncated.cuts.unsqueeze(1), wanted > float("-inf"))
        check_equal("maxima", truncated.maxima, maxima)
        check_equal("argmax", truncated.argmax, reference.greedy_argmax(logits))
        weights = reference.fixed_point_weights(wanted, maxima.unsqueeze(1))
        check_equal("masses", truncated.masses, weights.sum(dim=1))
        return ["truncated rows"]

    num_bytes = logits.numel() * logits.element_size()
    return Work(
        check=check,
        calls=[partial(truncated_rows, own) for (own,) in setting.copies(num_bytes, logits)],
        num_bytes=num_bytes,
        comes_from=setting.comes_from(num_bytes),
    )
