"""Shapes of draft trees: Medusa's choices, the most probable nodes, and how they become drafts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proposers.trees.best_first import best_first_trees
from proposers.trees.draft_tree import DraftTree, draft_tokens_from_trees
from proposers.trees.rank_tree import RankTree, draft_tokens_from_ranks
from proposers.trees.static import static_tree
from runner.engine.draft_trees import tree_shape
from runner.engine.errors import UserError
from tests.no_readback import NoReadback

CPU = torch.device("cpu")


def test_choices_become_nodes_in_depth_first_order() -> None:
    tree = static_tree([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [2]])
    assert tree.paths == [(0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 0), (2,)]
    assert tree.parents == (-1, 0, 1, 0, -1, 4, -1)
    assert tree.ranks == (0, 0, 0, 1, 1, 0, 2)
    assert tree.depths == (1, 2, 3, 2, 1, 2, 1)
    assert tree.num_candidates == [3, 2, 1]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], r"speculative_token_tree must hold a path .*, got none"),
        ([[0], []], r"non-empty paths of ranks >= 0, got \[\]"),
        ([[0], [-1]], r"ranks >= 0, got \[-1\]"),
        ([[0], ["a"]], r"ranks >= 0, got \['a'\]"),
        ([[0], [True]], r"ranks >= 0, got \[True\]"),
        ([[0], [1, 0]], r"beginning of each of its paths, got \[1, 0\] without \[1\]"),
        ([[0], [0, 1], [0]], r"each path once, got \[0\] twice"),
        ([[0], [0, 0], [0, 0, 0]], r"at most 2 deep for this method, got \[0, 0, 0\]"),
    ],
)
def test_choices_that_are_no_tree_are_refused(choices: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        static_tree(choices, max_depth=2)


@settings(deadline=None, derandomize=True)
@given(st.sets(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=12), st.data())
def test_a_cut_tree_is_a_tree_with_the_first_siblings(paths: set[tuple[int, ...]], data: st.DataObject) -> None:
    closed = {path[:end] for path in paths for end in range(1, len(path) + 1)}
    tree = static_tree([list(path) for path in closed])
    assert set(tree.paths) == closed
    count = data.draw(st.integers(0, len(closed) + 1))
    cut = tree.cut(count)
    assert cut.num_nodes == min(count, len(closed))
    for path in cut.paths:
        assert len(path) == 1 or path[:-1] in cut.paths
        earlier = [other for other in closed if other[:-1] == path[:-1] and other[-1] < path[-1]]
        assert all(other in cut.paths for other in earlier)


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 30), st.integers(0, 10_000))
def test_best_first_takes_the_most_probable_nodes(depth: int, top_k: int, count: int, seed: int) -> None:
    """Against every node there is, ordered by its probability."""
    weights = torch.randn(1, depth, top_k + 2, generator=torch.Generator().manual_seed(seed)) * 2
    log_probs = weights.log_softmax(-1).sort(dim=-1, descending=True).values[..., :top_k]
    (tree,) = best_first_trees(log_probs, [count])
    every = [
        path for length in range(1, depth + 1) for path in itertools.product(range(top_k), repeat=length)
    ]  # fmt: skip

    def score(path: tuple[int, ...]) -> float:
        return sum(float(log_probs[0, place, rank]) for place, rank in enumerate(path))

    best = sorted(every, key=score, reverse=True)[:count]
    assert tree.num_nodes == len(best)
    assert sorted(map(score, tree.paths)) == pytest.approx(sorted(map(score, best)), abs=1e-9)
    assert tree_shape(tree.parents).depths == tuple(map(len, tree.paths))


def test_best_first_goes_deep_where_the_drafter_is_sure_and_wide_where_it_is_not() -> None:
    sure = torch.tensor([[0.98, 0.01], [0.98, 0.01], [0.98, 0.01]]).log()
    unsure = torch.tensor([[0.4, 0.35], [0.3, 0.25], [0.2, 0.2]]).log()
    deep, wide, none = best_first_trees(torch.stack([sure, unsure, unsure]), [3, 3, 0])
    assert deep.paths == [(0,), (0, 0), (0, 0, 0)]
    assert wide.paths == [(0,), (0, 0), (1,)]
    assert none.num_nodes == 0


def test_a_candidate_of_probability_zero_is_nobodys_child() -> None:
    laws = torch.tensor([[[0.0, -float("inf")], [-float("inf"), -float("inf")]]])
    (tree,) = best_first_trees(laws, [5])
    assert tree.paths == [(0,)]


def test_ranks_become_the_candidates_of_their_depth() -> None:
    token_ids = torch.arange(12).view(2, 3, 2) + 10
    trees = [static_tree([[0], [1], [1, 0], [1, 0, 1]]), RankTree.of_paths([])]
    with NoReadback():  # type: ignore[no-untyped-call]
        drafts = draft_tokens_from_ranks(trees, token_ids)
    assert drafts.token_ids.tolist() == [10, 11, 12, 15]
    assert drafts.cu_num_draft_tokens == [0, 4, 4] and drafts.parent_indices == [-1, -1, 1, 2]


def test_trees_of_the_host_become_drafts() -> None:
    trees = [DraftTree(token_ids=[5, 6, 7], parents=[-1, -1, 0]).depth_first(), DraftTree.chain([8, 9])]
    drafts = draft_tokens_from_trees(trees, CPU)
    assert drafts.token_ids.tolist() == [5, 7, 6, 8, 9] and drafts.parent_indices == [-1, 0, -1, -1, 0]
    assert drafts.cu_num_draft_tokens == [0, 3, 5] and drafts.depths == [2, 2] and drafts.has_branches
