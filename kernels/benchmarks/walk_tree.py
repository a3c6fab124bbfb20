"""Draft trees judged by the target's own tokens, on the device."""

from __future__ import annotations

from functools import partial

import torch

from kernels import walk_tree as kernel
from kernels.benchmarks.case import Case, Setting, Work, check_equal
from kernels.reference.walk_tree import walk_tree as reference

NUM_SLOTS = 160_000


def cases(setting: Setting) -> list[Case]:
    sizes = ((3, 5),) if setting.is_small else ((1, 16), (64, 16), (64, 60))
    return [
        Case(
            op="walk_tree",
            label=f"{num_requests} requests, {num_nodes} nodes of each",
            dtype="int64",
            prepare=partial(_prepare, setting, num_requests, num_nodes),
        )
        for num_requests, num_nodes in sizes
    ]


def _prepare(setting: Setting, num_requests: int, num_nodes: int) -> Work:
    """Every node has two children, the tokens 0 and 1; the target draws one of three."""
    nodes = torch.arange(num_nodes, device=setting.device).repeat(num_requests, 1)
    drawn = setting.integers(0, 3, num_requests * (num_nodes + 1), seed=0)
    slots = setting.integers(1, NUM_SLOTS, num_requests, num_nodes + 1, seed=1)
    arguments = (drawn, nodes % 2, nodes // 2 - 1, slots)
    depth = (num_nodes + 1).bit_length() - 1
    call = partial(kernel.walk_tree, *arguments, depth=depth)

    def check() -> list[str]:
        wanted = reference(*arguments, depth=depth)
        for name, found in call()._asdict().items():
            check_equal(name, found, getattr(wanted, name))
        return ["equal"]

    # Behind the rows of the way down the target's tokens and the slots are read, of all nodes drafts and parents.
    num_read = 2 * num_nodes + 3 * depth + 1
    return Work(
        check=check,
        calls=[call],
        num_bytes=num_requests * 8 * (num_read + 2 * (depth + 1) + 2 * depth + 2),
        comes_from="L2",
    )
