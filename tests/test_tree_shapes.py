"""Shapes of draft trees: Medusa's choices, the most probable nodes, and how they become drafts."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proposers.trees.best_first import best_first_paths
from proposers.trees.draft_tree import DraftTree, draft_tokens_from_trees
from proposers.trees.rank_tree import RankTree, draft_tokens_from_ranks
from proposers.trees.static import check_depth, static_tree
from runner.engine.errors import UserError
from tests.no_readback import NoReadback

CPU = torch.device("cpu")


CHOICES = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (2,))


def test_choices_become_nodes_in_depth_first_order() -> None:
    tree = static_tree(CHOICES)
    assert tree.paths == [(0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 0), (2,)]
    assert tree.parents == (-1, 0, 1, 0, -1, 4, -1)
    assert tree.ranks == (0, 0, 0, 1, 1, 0, 2)
    assert tree.depths == (1, 2, 3, 2, 1, 2, 1)
    assert tree.num_candidates == [3, 2, 1]


def test_a_request_with_less_room_gets_the_first_choices() -> None:
    for count in range(len(CHOICES) + 2):
        assert sorted(static_tree(CHOICES, count).paths) == sorted(CHOICES[:count])


def test_choices_deeper_than_the_drafter_sees_are_refused() -> None:
    check_depth(CHOICES, max_depth=3)
    with pytest.raises(UserError, match=r"speculative_token_tree must be at most 2 deep .*, got \[0, 0, 0\]"):
        check_depth(CHOICES, max_depth=2)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 30), st.integers(0, 10_000))
def test_best_first_takes_the_most_probable_nodes(depth: int, top_k: int, count: int, seed: int) -> None:
    """Against every node there is, ordered by its probability."""
    weights = torch.randn(1, depth, top_k + 2, generator=torch.Generator().manual_seed(seed)) * 2
    log_probs = weights.log_softmax(-1).sort(dim=-1, descending=True).values[..., :top_k]
    (paths,) = best_first_paths(log_probs, [count])
    every = [
        path for length in range(1, depth + 1) for path in itertools.product(range(top_k), repeat=length)
    ]  # fmt: skip

    def score(path: tuple[int, ...]) -> float:
        return sum(float(log_probs[0, place, rank]) for place, rank in enumerate(path))

    best = sorted(every, key=score, reverse=True)[:count]
    assert list(map(score, paths)) == pytest.approx(list(map(score, best)), abs=1e-9)
    for num_nodes in range(len(paths)):
        assert sorted(RankTree.of_paths(paths[:num_nodes]).paths) == sorted(paths[:num_nodes])


def test_best_first_goes_deep_where_the_drafter_is_sure_and_wide_where_it_is_not() -> None:
    sure = torch.tensor([[0.98, 0.01], [0.98, 0.01], [0.98, 0.01]]).log()
    unsure = torch.tensor([[0.4, 0.35], [0.3, 0.25], [0.2, 0.2]]).log()
    deep, wide, none = best_first_paths(torch.stack([sure, unsure, unsure]), [3, 3, 0])
    assert deep == [(0,), (0, 0), (0, 0, 0)]
    assert wide == [(0,), (1,), (0, 0)]
    assert none == []


def test_a_candidate_of_probability_zero_is_nobodys_child() -> None:
    log_probs = torch.tensor([[[0.0, -float("inf")], [-float("inf"), -float("inf")]]])
    assert best_first_paths(log_probs, [5]) == [[(0,)]]


def test_ranks_become_the_candidates_of_their_depth() -> None:
    token_ids = torch.arange(12).view(2, 3, 2) + 10
    trees = [static_tree(((0,), (1,), (1, 0), (1, 0, 1))), RankTree.of_paths([])]
    with NoReadback():  # type: ignore[no-untyped-call]
        drafts = draft_tokens_from_ranks(trees, token_ids)
    assert drafts.token_ids.tolist() == [10, 11, 12, 15]
    assert drafts.cu_num_draft_tokens == [0, 4, 4] and drafts.parent_indices == [-1, -1, 1, 2]


def test_trees_of_the_host_become_drafts() -> None:
    tree = DraftTree(token_ids=[5, 6, 7], parents=[-1, -1, 0]).depth_first()
    trees = [tree, DraftTree(token_ids=[8, 9], parents=[-1, 0])]
    drafts = draft_tokens_from_trees(trees, CPU)
    assert drafts.token_ids.tolist() == [5, 7, 6, 8, 9] and drafts.parent_indices == [-1, 0, -1, -1, 0]
    assert drafts.cu_num_draft_tokens == [0, 3, 5] and drafts.depths == [2, 2] and drafts.has_branches
