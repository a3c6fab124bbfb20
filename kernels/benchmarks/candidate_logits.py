"""The selector of Qwen3.8-27B's DFlash 2 head: 16 candidates of a place behind one token, or behind four in a tree."""

from __future__ import annotations

from functools import partial

import torch

from kernels import candidate_logits as kernel
from kernels.benchmarks.case import Case, Setting, Work, check_equal, check_error, name_of
from kernels.reference import candidate_logits as reference


def cases(setting: Setting) -> list[Case]:
    sizes = (60, 5, 20) if setting.is_small else (248_320, 16, 256)  # vocabulary, candidates, rank
    shapes = ((2, 3),) if setting.is_small else ((1, 1), (64, 1), (16, 4))
    return [
        Case(
            op="candidate_logits",
            label=f"{num_owners * num_each} rows of {num_owners} places, {sizes[1]} candidates of {sizes[0]:,} tokens",
            dtype=name_of(setting.dtype),
            prepare=partial(_prepare, setting, num_owners, num_each, *sizes),
        )
        for num_owners, num_each in shapes
    ]


def _prepare(setting: Setting, num_owners: int, num_each: int, vocab_size: int, num_candidates: int, rank: int) -> Work:
    num_rows = num_owners * num_each
    unary = setting.normal(num_owners, num_candidates, seed=0, dtype=torch.float32)
    hidden = setting.normal(num_owners, rank, seed=1)
    tables = [setting.normal(vocab_size, rank, seed=seed) for seed in (2, 3)]
    token_ids = setting.integers(0, vocab_size, num_rows, seed=4)
    generator = torch.Generator().manual_seed(5)
    chosen = [torch.randperm(vocab_size, generator=generator)[:num_candidates] for _ in range(num_owners)]
    candidates = torch.stack(chosen).to(hidden.device)
    read = num_rows * (num_candidates + 1) * rank * hidden.element_size()
    num_bytes = read + unary.nbytes + hidden.nbytes + candidates.nbytes + 4 * num_rows * vocab_size
    arguments = (unary, candidates, hidden, *tables, token_ids)

    def check() -> list[str]:
        found, by_torch = (op.candidate_logits(*arguments) for op in (kernel, reference))
        of_rows = torch.arange(num_owners, device=hidden.device).repeat_interleave(num_each)
        ids, latent = candidates[of_rows], tables[0][token_ids].double() * hidden[of_rows].double()
        exact = unary[of_rows].double() + (latent.unsqueeze(1) * tables[1][ids].double()).sum(dim=2)
        accuracy = check_error(found.gather(1, ids), by_torch.gather(1, ids), exact)
        check_equal("tokens that are no candidates", *(own.scatter(1, ids, 0.0) for own in (found, by_torch)))
        return [accuracy, "other tokens"]

    return Work(
        check=check,
        calls=[partial(kernel.candidate_logits, *own) for own in setting.copies(num_bytes, *arguments)],
        num_bytes=num_bytes,
        comes_from=setting.comes_from(num_bytes),
        torch_calls=[partial(reference.candidate_logits, *own) for own in setting.copies(num_bytes, *arguments)],
    )
