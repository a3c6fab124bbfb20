"""A match put into a draft tree."""

from __future__ import annotations

from functools import partial

import torch

from kernels import match_in_tree as kernel
from kernels.benchmarks.case import Case, Setting, Work, check_equal
from kernels.reference.likeliest_tree import Tree
from kernels.reference.match_in_tree import match_in_tree as reference


def cases(setting: Setting) -> list[Case]:
    sizes = ((3, 7),) if setting.is_small else ((1, 16), (64, 16), (64, 60))
    return [
        Case(
            op="match_in_tree",
            label=f"{num_requests} requests, {num_nodes} nodes of each",
            dtype="int64",
            prepare=partial(_prepare, setting, num_requests, num_nodes),
        )
        for num_requests, num_nodes in sizes
    ]


def _prepare(setting: Setting, num_requests: int, num_nodes: int) -> Work:
    """Every node has two children, the tokens 0 and 1; matches of half as many tokens, of three."""
    nodes = torch.arange(num_nodes, device=setting.device).repeat(num_requests, 1)
    match = setting.integers(0, 3, num_requests, num_nodes, seed=0)
    match = torch.where(nodes < num_nodes // 2, match, -1)
    call = partial(kernel.match_in_tree, match, Tree(nodes % 2, nodes // 2 - 1), depth=(num_nodes + 1).bit_length() - 1)

    def check() -> list[str]:
        for name, found, wanted in zip(Tree._fields, call(), reference(*call.args, **call.keywords), strict=True):
            check_equal(name, found, wanted)
        return ["equal"]

    return Work(check=check, calls=[call], num_bytes=5 * 8 * num_requests * num_nodes, comes_from="L2")
