"""The vocabulary of Gemma 4 E2B's drafter: 32 of its 2048 clusters for each row."""

from __future__ import annotations

from functools import partial

import torch

from kernels import cluster_logits as kernel
from kernels.benchmarks.case import Case, Setting, Work, check_equal, check_error, name_of
from kernels.reference import cluster_logits as reference


def cases(setting: Setting) -> list[Case]:
    shapes = ((3, 12, 40, 3, 70),) if setting.is_small else ((1, 2048, 128, 32, 256), (64, 2048, 128, 32, 256))
    return [
        Case(
            op="cluster_logits",
            label=f"{num_rows} rows of {hidden}, {num_chosen} of {num_clusters} clusters of {size} tokens",
            dtype=name_of(setting.dtype),
            prepare=partial(_prepare, setting, num_rows, num_clusters, size, num_chosen, hidden),
        )
        for num_rows, num_clusters, size, num_chosen, hidden in shapes
    ]


def _prepare(setting: Setting, num_rows: int, num_clusters: int, size: int, num_chosen: int, hidden: int) -> Work:
    states = setting.normal(num_rows, hidden, seed=0)
    table = setting.normal(num_clusters * size, hidden, seed=1).view(num_clusters, size, hidden)
    generator = torch.Generator().manual_seed(2)
    token_ids = torch.randperm(num_clusters * size, generator=generator).view(num_clusters, size).to(states.device)
    chosen = torch.stack([torch.randperm(num_clusters, generator=generator)[:num_chosen] for _ in range(num_rows)])
    chosen = chosen.to(states.device)
    read = num_rows * num_chosen * size * hidden * states.element_size()
    num_bytes = states.nbytes + read + 4 * num_rows * num_clusters * size
    copies = setting.copies(num_bytes, states, table, token_ids, chosen)

    def check() -> list[str]:
        found, by_torch = (op.cluster_logits(states, table, token_ids, chosen) for op in (kernel, reference))
        ids = token_ids[chosen].flatten(1)
        exact = torch.einsum("rh,rcth->rct", states.double(), table[chosen].double()).flatten(1)
        accuracy = check_error(found.gather(1, ids), by_torch.gather(1, ids), exact)
        outside = [own.scatter(1, ids, 0.0) for own in (found, by_torch)]
        check_equal("tokens of no chosen cluster", *outside)
        return [accuracy, "other tokens"]

    return Work(
        check=check,
        calls=[partial(kernel.cluster_logits, *own) for own in copies],
        num_bytes=num_bytes,
        comes_from=setting.comes_from(num_bytes),
        torch_calls=[partial(reference.cluster_logits, *own) for own in copies],
    )
