"""The strict rule over trees on the device: against the verifier's walk, and the kernels against their definition."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kernels.cpu.walk_tree import walk_tree as on_cpu
from kernels.reference.walk_tree import walk_tree as reference
from runner.engine.draft_trees import tree_shape
from runner.engine.request import DraftTokens, Request
from runner.engine.sampling_params import SamplingParams
from tests.no_readback import NoReadback
from tests.sampling_for_tests import sampled_rows
from verifier.accepted_path import slot_moves
from verifier.tree import follow_tokens
from verifier.tree_batch import TreeBatch

pytest.importorskip("triton")
from kernels.walk_tree import walk_tree

BLOCK_SIZE, VOCAB_SIZE = 4, 4


@st.composite
def trees(draw: st.DrawFn, num_nodes: int) -> tuple[list[int], list[int]]:
    """(parents, drafts) of so many nodes at most; siblings are distinct tokens, often the first ones."""
    parents: list[int] = []
    drafts: list[int] = []
    for node in range(draw(st.integers(0, num_nodes))):
        parent = draw(st.integers(max(-1, node - 3), node - 1))
        siblings = [draft for draft, other in zip(drafts, parents, strict=True) if other == parent]
        if len(siblings) == VOCAB_SIZE:
            break
        parents.append(parent)
        drafts.append(min({*range(VOCAB_SIZE)} - {*siblings}))
    return parents, drafts


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    num_nodes = draw(st.integers(0, 20))
    own = [draw(trees(num_nodes)) for _ in range(draw(st.integers(1, 4)))]
    tokens = st.integers(0, 9).map(lambda number: number if number < VOCAB_SIZE else 0)
    return {
        "num_nodes": num_nodes,
        "trees": own,
        "drawn": [draw(st.lists(tokens, min_size=len(parents) + 1, max_size=len(parents) + 1)) for parents, _ in own],
        "is_here": [draw(st.booleans()) or draw(st.booleans()) for _ in own],
        "depth": max(tree_shape(parents).depth for parents, _ in own) + draw(st.integers(0, 2)),
    }


def padded(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """drawn, drafts and parents, as wide as there may be nodes."""

    def rows(lists: list[list[int]], width: int, filler: int) -> torch.Tensor:
        return torch.tensor([[*values, *[filler] * (width - len(values))] for values in lists])

    drawn = rows(case["drawn"], case["num_nodes"] + 1, -1)
    drawn = torch.where(torch.tensor(case["is_here"]).unsqueeze(1), drawn, -1)
    parents, drafts = zip(*case["trees"], strict=True)
    return drawn.flatten(), rows(list(drafts), case["num_nodes"], -1), rows(list(parents), case["num_nodes"], -1)


def both_ways(
    tensors: tuple[torch.Tensor, ...], *, depth: int, device: torch.device
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    by_kernel = walk_tree(*(numbers.to(device) for numbers in tensors), depth=depth)
    expected = reference(*tensors, depth=depth)
    return [(name, getattr(expected, name), numbers.cpu()) for name, numbers in by_kernel._asdict().items()]


@settings(max_examples=30)
@given(batches())
def test_the_kernel_walks_where_the_definition_walks(kernel_device: torch.device, case: dict[str, Any]) -> None:
    slots = 1 + torch.arange(len(case["trees"]) * (case["num_nodes"] + 1)).view(len(case["trees"]), -1).flip(0)
    tensors = (*padded(case), slots)
    for name, expected, found in both_ways(tensors, depth=case["depth"], device=kernel_device):
        assert found.dtype == torch.int64 and torch.equal(found, expected), name


@given(batches(), st.integers(0, 3))
def test_compiled_for_a_cpu_it_walks_where_the_definition_walks(case: dict[str, Any], gap: int) -> None:
    """Requests may lie apart; of more places than a tree has nodes, the last one's slot is told."""
    slots = 1 + torch.arange(len(case["trees"]) * (case["num_nodes"] + 1)).view(len(case["trees"]), -1).flip(0)
    drawn, *of_nodes = (*padded(case), slots)
    lying_apart = [torch.nn.functional.pad(numbers, (0, gap), value=1)[:, : numbers.shape[1]] for numbers in of_nodes]
    found = on_cpu(drawn, *lying_apart, depth=case["depth"])
    for name, expected in reference(drawn, *of_nodes, depth=case["depth"])._asdict().items():
        assert torch.equal(getattr(found, name), expected), name


@settings(max_examples=40)
@given(batches())
def test_the_walk_is_the_verifiers_and_moves_what_it_moves(case: dict[str, Any]) -> None:
    """Absent requests apart, which the host leaves out as it does missing nodes."""
    assume(any(parents for parents, _ in case["trees"]))
    case["is_here"] = [True for _ in case["trees"]]
    num_requests, num_nodes, depth = len(case["trees"]), case["num_nodes"], case["depth"]
    num_drafts = [len(parents) for parents, _ in case["trees"]]
    drafts = DraftTokens(
        token_ids=torch.tensor([token for _, tokens in case["trees"] for token in tokens]),
        cu_num_draft_tokens=[0, *itertools.accumulate(num_drafts)],
        parent_indices=[parent for parents, _ in case["trees"] for parent in parents],
    )
    drawn = torch.tensor([token for own in case["drawn"] for token in own])
    tree = TreeBatch.build(drafts, sampled_rows(torch.zeros_like(drawn), torch.zeros_like(drawn), VOCAB_SIZE))
    last = follow_tokens(tree, drawn)
    paths = torch.where(tree.paths[last] >= 0, tree.paths[last] - tree.first_draft_idx.unsqueeze(1), -1)
    num_blocks = -(-(num_nodes + 9) // BLOCK_SIZE)
    requests = [
        Request(
            request_id=str(index),
            prompt_token_ids=[0] * (5 + index),
            sampling_params=SamplingParams(),
            seed=0,
            block_table=[1 + index + block * num_requests for block in range(num_blocks)],
        )
        for index in range(num_requests)
    ]
    slots = [
        [
            request.block_table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
            for place in range(request.num_tokens - 1, request.num_tokens + num_nodes)
        ]
        for request in requests
    ]
    tensors = (*padded(case), torch.tensor(slots))
    with NoReadback():  # type: ignore[no-untyped-call]
        walked = reference(*tensors, depth=depth)
    accepted = [[node for node in own if node >= 0] for own in paths.tolist()]
    following = drawn[last].tolist()
    for index, ((_, tokens), own) in enumerate(zip(case["trees"], accepted, strict=True)):
        rest, first = depth - len(own), index * (num_nodes + 1)
        told = [*(tokens[node] for node in own), following[index], *[-1] * rest]
        assert walked.token_ids[index].tolist() == told
        rows = [first, *(first + 1 + node for node in own), *[first] * rest]
        assert walked.rows.view(num_requests, -1)[index].tolist() == rows
    assert walked.num_accepted_tokens.tolist() == [len(own) for own in accepted]
    assert walked.num_draft_tokens.tolist() == num_drafts
    moves = slot_moves(paths, drafts, requests, BLOCK_SIZE)
    for found, expected in zip((walked.source_slots, walked.target_slots), moves, strict=True):
        assert torch.equal(found[:, : paths.shape[1]], expected) and not found[:, paths.shape[1] :].any()


@pytest.mark.parametrize("walk", [reference, on_cpu, walk_tree])
def test_no_draft_is_never_accepted(walk: Any, kernel_device: torch.device) -> None:
    """A branch, a chain that ends in no draft, and an absent request."""
    drawn = torch.tensor([[5, 8, 7, 6], [5, 6, 7, 8], [-1, -1, -1, -1]])
    drafts = torch.tensor([[4, 5, 7], [5, -1, 7], [-1, 5, -1]])
    parents = torch.tensor([[-1, -1, 1], [-1, 0, 1], [-1, 0, -1]])
    slots = torch.arange(10, 22).view(3, 4)
    device = kernel_device if walk is walk_tree else torch.device("cpu")
    tensors = [numbers.to(device) for numbers in (drawn.flatten(), drafts, parents, slots)]
    walked = walk(*tensors, depth=3)
    assert walked.token_ids.tolist() == [[5, 7, 6, -1], [5, 6, -1, -1], [-1, -1, -1, -1]]
    assert walked.num_accepted_tokens.tolist() == [2, 1, 0]
    assert walked.num_draft_tokens.tolist() == [3, 2, 0]
    assert walked.source_slots.tolist() == [[12, 13, 0], [15, 0, 0], [0, 0, 0]]
    assert walked.target_slots.tolist() == [[11, 12, 0], [15, 0, 0], [0, 0, 0]]
    assert walked.rows.view(3, 4).tolist() == [[0, 2, 3, 0], [4, 5, 4, 4], [8, 8, 8, 8]]
