"""A level's choice, and the likeliest nodes of all levels, as EAGLE-2 takes them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kernels import likeliest_tree as kernel
from kernels.benchmarks.case import VOCAB_SIZE, Case, Setting, Work, check_equal
from kernels.reference import likeliest_tree as reference


def cases(setting: Setting) -> list[Case]:
    sizes = ((3, 5, 2, 2),) if setting.is_small else ((1, 8, 4, 5), (64, 8, 4, 5), (64, 60, 10, 6))
    return [
        Case(
            op="likeliest_tree",
            label=f"{num_requests} requests, {'a level' if is_level else 'the tree'}, {num_nodes} nodes, top_k {top_k}",
            dtype="float64",
            prepare=partial(_prepare, setting, num_requests, num_nodes, top_k, depth, is_level),
        )
        for num_requests, num_nodes, top_k, depth in sizes
        for is_level in (True, False)
    ]


def _prepare(setting: Setting, num_requests: int, num_nodes: int, top_k: int, depth: int, is_level: bool) -> Work:
    """Levels of top_k rows, each with top_k candidates; the last one is the one that is timed."""
    levels = []
    for level in range(depth):
        num_rows = num_requests * (top_k if level else 1)
        scores = setting.normal(num_rows, top_k, seed=level, dtype=torch.float32).abs().cumsum(dim=1)
        levels.append((setting.integers(0, VOCAB_SIZE, num_rows, top_k, seed=level), -scores))

    def grown(ops: Any) -> reference.TreeCandidates:
        places = max(num_nodes, top_k)
        tree = reference.TreeCandidates.unwritten(num_requests, depth, places, setting.device)
        for level in range(depth):
            ops.add_level(tree, level, *levels[level], num_rows=top_k if level else 1, num_next=top_k)
        return tree

    tree, last = grown(kernel), depth - 1

    def check() -> list[str]:
        for name, found, wanted in zip(tree._fields, tree, grown(reference), strict=True):
            check_equal(name, found, wanted)
        both = (ops.likeliest_tree(tree, num_nodes) for ops in (kernel, reference))
        for name, found, wanted in zip(reference.Tree._fields, *both, strict=True):
            check_equal(name, found, wanted)
        return ["equal"]

    add_last = partial(kernel.add_level, tree, last, *levels[last], num_rows=top_k, num_next=top_k)
    # Of a level token ids and log-probabilities are read, and places written; of a tree places are read.
    placed = 24 * num_requests * max(num_nodes, top_k)
    num_bytes = 12 * levels[last][0].numel() + placed if is_level else depth * placed
    return Work(
        check=check,
        calls=[add_last if is_level else partial(kernel.likeliest_tree, tree, num_nodes)],
        num_bytes=num_bytes + 16 * num_requests * (top_k if is_level else num_nodes),
        comes_from="L2",
    )
