"""Trees of the likeliest candidates: grown on the device as on the host, by the kernels as by their definition."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kernels.cpu import likeliest_tree as on_cpu
from kernels.reference import likeliest_tree as reference
from proposers.trees.growth import DynamicGrowth
from tests.no_readback import NoReadback

kernel = pytest.importorskip("kernels.likeliest_tree")


def log_probs_of(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """From the highest on, with many ties, and some without a chance."""
    log_probs = -torch.randint(0, 3, shape, generator=generator).cumsum(dim=-1).float()
    return torch.where(torch.rand(shape, generator=generator).cumsum(dim=-1) > 1.5, -torch.inf, log_probs)


def grow(ops: Any, seed: int, device: torch.device) -> list[torch.Tensor]:
    """All that the ops return and write, level by level."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_requests, top_k, width, depth, num_nodes = (draw.randint(1, most) for most in (3, 3, 4, 4, 9))
    num_places = max(num_nodes, top_k)
    tree = reference.TreeCandidates.unwritten(num_requests, depth, num_places, device)
    for places in tree:
        places.fill_(77)  # nothing may be left of what nobody wrote
    found, num_rows = list[torch.Tensor](), 1
    for level in range(depth):
        given_rows = num_requests * draw.choice([1, num_rows])  # one: the same for all rows
        log_probs = log_probs_of(generator, given_rows, width)
        token_ids = torch.randint(0, 50, (given_rows, width), generator=generator)
        given = token_ids.to(device), log_probs.to(device)
        found += ops.add_level(tree, level, *given, num_rows=num_rows, num_next=top_k)
        num_rows = top_k
    return [*found, *tree, *ops.likeliest_tree(tree, num_nodes)]


def test_the_kernels_grow_what_their_definition_grows(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "BLOCK", 16)
    monkeypatch.setattr(kernel, "CHUNK", 16)
    for seed in range(4):
        found = grow(kernel, seed, kernel_device)
        with NoReadback():  # type: ignore[no-untyped-call]
            expected = grow(reference, seed, torch.device("cpu"))
        for own, other in zip(found, expected, strict=True):
            assert own.dtype == other.dtype and torch.equal(own.cpu(), other), seed


def test_compiled_for_a_cpu_they_grow_the_same_trees() -> None:
    for seed in range(60):
        found, expected = (grow(ops, seed, torch.device("cpu")) for ops in (on_cpu, reference))
        for own, other in zip(found, expected, strict=True):
            assert own.dtype == other.dtype and torch.equal(own, other), seed


@pytest.mark.parametrize("ops", [reference, on_cpu])
def test_what_is_no_number_has_no_chance(ops: Any) -> None:
    tree = reference.TreeCandidates.unwritten(1, 1, 3, torch.device("cpu"))
    log_probs = torch.tensor([[float("nan"), -2.0, float("nan"), -1.0]])
    following = ops.add_level(tree, 0, torch.tensor([[5, 6, 7, 8]]), log_probs, num_rows=1, num_next=3)
    assert following.token_ids.tolist() == [8, 6, 5] and following.rows.tolist() == [0, 0, 0]
    assert tree.scores.tolist() == [[[-1.0, -2.0, -float("inf")]]]
    assert ops.likeliest_tree(tree, 3).token_ids.tolist() == [[8, 6, -1]]


def paths(parents: list[int], token_ids: list[int]) -> list[tuple[int, ...]]:
    """The tokens on the way to each node, in order."""
    found: list[tuple[int, ...]] = []
    for parent, token_id in zip(parents, token_ids, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token_id))
    return found


@pytest.mark.parametrize("num_nodes", [1, 5, 12])
def test_the_tree_is_the_hosts(num_nodes: int) -> None:
    """Of scores with ties. What has no chance goes on here and not on the host: its children have none either."""
    generator, depth, top_k, num_requests = torch.Generator().manual_seed(num_nodes), min(4, num_nodes), 3, 20
    growth = DynamicGrowth([num_nodes] * num_requests, depth=depth, top_k=[top_k] * num_requests)
    tree = reference.TreeCandidates.unwritten(num_requests, depth, max(num_nodes, top_k), torch.device("cpu"))
    num_rows, on_host = 1, list[int]()
    for level in range(depth):
        log_probs = log_probs_of(generator, num_requests * num_rows, top_k)
        token_ids = torch.randint(0, 9, log_probs.shape, generator=generator)
        reference.add_level(tree, level, token_ids, log_probs, num_rows=num_rows, num_next=top_k)
        owners = growth.owners
        rows = [owner * num_rows + place - owners.index(owner) for place, owner in enumerate(owners)]
        on_host += token_ids[rows].flatten().tolist()
        growth.grow(top_k, log_probs[rows].tolist())
        num_rows = top_k
    found = reference.likeliest_tree(tree, num_nodes)
    for owner, expected in enumerate(growth.trees()):
        count = int((found.token_ids[owner] >= 0).sum())
        own = paths(found.parents[owner, :count].tolist(), found.token_ids[owner, :count].tolist())
        assert own == paths(expected.parents, [on_host[number] for number in expected.numbers])
        assert bool((found.token_ids[owner, count:] == -1).all() and (found.parents[owner, count:] == -1).all())
