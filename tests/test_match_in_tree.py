"""A match in a draft tree: the kernels build what their definition builds, and that is what a set of paths says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.match_in_tree import match_in_tree as on_cpu
from kernels.reference.likeliest_tree import Tree
from kernels.reference.match_in_tree import match_in_tree as reference
from tests.no_readback import NoReadback

match_in_tree = pytest.importorskip("kernels.match_in_tree").match_in_tree
Path = tuple[int, ...]


@st.composite
def nodes(draw: st.DrawFn, num_nodes: int) -> list[tuple[int, int]]:
    """(token, parent): parents first, siblings distinct; the last ones may be missing, (-1, -1)."""
    found = list[tuple[int, int]]()
    for _ in range(draw(st.integers(0, num_nodes))):
        parent = draw(st.integers(-1, len(found) - 1))
        if free := sorted(set(range(6)) - {token for token, other in found if other == parent}):
            found.append((draw(st.sampled_from(free)), parent))
    return found + [(-1, -1)] * (num_nodes - len(found))


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, Tree]:
    num_requests, num_nodes = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    trees = [draw(nodes(num_nodes)) for _ in range(num_requests)]
    matches = []
    for _ in range(num_requests):
        match = draw(st.lists(st.integers(0, 5), max_size=num_nodes))
        matches.append(match + [-1] * (num_nodes - len(match)))
    token_ids, parents = torch.tensor(trees).unbind(dim=2)
    return torch.tensor(matches), Tree(token_ids.contiguous(), parents.contiguous())


def paths(token_ids: list[int], parents: list[int]) -> list[Path]:
    """The tokens on the way to each node, in the nodes' order."""
    found = list[Path]()
    for token, parent in zip(token_ids, parents, strict=True):
        if token >= 0:
            found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


@given(batches())
def test_the_match_comes_first_then_what_else_the_tree_holds(batch: tuple[torch.Tensor, Tree]) -> None:
    match, tree = batch
    num_nodes = match.shape[1]
    found = reference(match, tree, depth=num_nodes)
    for row, own in enumerate(match.tolist()):
        matched = [token for token in own if token >= 0]
        spine = [tuple(matched[: length + 1]) for length in range(len(matched))]
        others = [path for path in paths(tree.token_ids[row].tolist(), tree.parents[row].tolist()) if path not in spine]
        expected = [*spine, *others][:num_nodes]
        token_ids, parents = found.token_ids[row].tolist(), found.parents[row].tolist()
        assert paths(token_ids, parents) == expected
        assert token_ids[len(expected) :] == parents[len(expected) :] == [-1] * (num_nodes - len(expected))


@given(batches())
def test_compiled_for_a_cpu_it_is_the_same(batch: tuple[torch.Tensor, Tree]) -> None:
    match, tree = batch
    for depth in (match.shape[1], 40):
        for found, expected in zip(on_cpu(match, tree, depth=depth), reference(match, tree, depth=depth), strict=True):
            assert found.dtype == expected.dtype and torch.equal(found, expected)


@settings(max_examples=6)
@given(batches())
def test_the_kernel_builds_what_its_definition_builds(
    kernel_device: torch.device, batch: tuple[torch.Tensor, Tree]
) -> None:
    match, tree = batch
    num_nodes = match.shape[1]
    found = match_in_tree(match.to(kernel_device), Tree(*(own.to(kernel_device) for own in tree)), depth=num_nodes)
    with NoReadback():  # type: ignore[no-untyped-call]
        expected = reference(match, tree, depth=num_nodes)
    for own, other in zip(found, expected, strict=True):
        assert own.dtype == other.dtype and torch.equal(own.cpu(), other)


@pytest.mark.parametrize("op", [reference, on_cpu, match_in_tree])
def test_nothing_is_left_of_a_tree_where_the_match_fills_all_places(op: object, kernel_device: torch.device) -> None:
    device = kernel_device if op is match_in_tree else torch.device("cpu")
    tree = Tree(torch.tensor([[7, 4, 5]], device=device), torch.tensor([[-1, -1, 0]], device=device))
    found = op(torch.tensor([[4, 4, 4]], device=device), tree, depth=3)  # type: ignore[operator]
    assert found.token_ids.tolist() == [[4, 4, 4]] and found.parents.tolist() == [[-1, 0, 1]]
