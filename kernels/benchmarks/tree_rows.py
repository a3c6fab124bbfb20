"""Rows of draft trees and the slots they see, worked out on the device."""

from __future__ import annotations

from functools import partial

import torch

from kernels import tree_rows as kernel
from kernels.benchmarks.case import Case, Setting, Work, check_equal
from kernels.reference.tree_rows import tree_rows as reference

LONGEST, NUM_SLOTS = 8192, 160_000


def cases(setting: Setting) -> list[Case]:
    sizes = ((3, 5),) if setting.is_small else ((1, 16), (64, 16), (64, 60))
    return [
        Case(
            op="tree_rows",
            label=f"{num_requests} requests, {num_nodes} nodes of each",
            dtype="int64",
            prepare=partial(_prepare, setting, num_requests, num_nodes),
        )
        for num_requests, num_nodes in sizes
    ]


def _prepare(setting: Setting, num_requests: int, num_nodes: int) -> Work:
    """Every node has two children."""
    lengths = setting.integers(2, LONGEST, num_requests, seed=0)
    slots = setting.integers(1, NUM_SLOTS, num_requests, num_nodes + 1, seed=1)
    parents = (torch.arange(num_nodes, device=setting.device) // 2 - 1).repeat(num_requests, 1)
    depth = (num_nodes + 1).bit_length() - 1
    arguments = {"first": 0, "offset": -1, "depth": depth, "rows_per_tile": 16, "split_keys": 512}
    call = partial(kernel.tree_rows, lengths, slots, parents, **arguments)

    def check() -> list[str]:
        wanted = reference(lengths, slots, parents, **arguments)
        for name, found in call()._asdict().items():
            check_equal(name, found, getattr(wanted, name))
        return ["equal"]

    num_rows = num_nodes + 1
    return Work(
        check=check,
        calls=[call],
        num_bytes=num_requests * (8 * (1 + num_rows + num_nodes) + num_rows * (3 * 8 + (7 + depth) * 4)),
        comes_from="L2",
    )
