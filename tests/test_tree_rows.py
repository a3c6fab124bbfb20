"""Rows of draft trees on the device: the definition against the host's segments, the kernels against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.tree_rows import tree_rows as on_cpu
from kernels.reference.tree_rows import NO_BRANCH
from kernels.reference.tree_rows import tree_rows as reference
from runner.engine.draft_trees import tree_shape
from runner.engine.launch import Part, StepLaunches
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from tests.no_readback import NoReadback

pytest.importorskip("triton")
from kernels.tree_rows import tree_rows

BLOCK_SIZE = 4


def depth_of(parents: list[int]) -> int:
    """Of the deepest node."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    return max(depths)


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """Any request may be absent; `depth` may be more than any of them needs."""
    num_nodes = draw(st.integers(0, 20))
    lengths = draw(st.lists(st.integers(0, 26), min_size=1, max_size=4))
    own = []
    for _ in lengths:
        parents: list[int] = []
        for node in range(num_nodes):
            parents.append(draw(st.sampled_from([-1, *range(node), *[node - 1] * 4])))
        own.append(parents)
    return {
        "lengths": [length and length + 2 for length in lengths],
        "parents": own,
        "shape": {
            "first": draw(st.integers(0, num_nodes)),
            "offset": draw(st.integers(-3, 1)),
            "depth": max(map(depth_of, own)) + draw(st.integers(0, 2)),
            "rows_per_tile": draw(st.sampled_from([1, 4, 16])),
            "split_keys": draw(st.sampled_from([None, 4, 16])),
        },
    }


def arguments(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lengths, parents = torch.tensor(case["lengths"]), torch.tensor(case["parents"])
    slots = 1 + torch.arange(len(lengths) * (parents.shape[1] + 1)).view(len(lengths), -1).flip(0, 1)
    return lengths, slots, parents


def both_ways(case: dict[str, Any], device: torch.device) -> list[dict[str, torch.Tensor]]:
    by_kernel = tree_rows(*(numbers.to(device) for numbers in arguments(case)), **case["shape"])
    found = {name: numbers.cpu() for name, numbers in by_kernel._asdict().items()}
    return [reference(*arguments(case), **case["shape"])._asdict(), found]


@settings(max_examples=15)
@given(trees())
def test_the_kernel_says_what_the_definition_says(kernel_device: torch.device, case: dict[str, Any]) -> None:
    expected, found = both_ways(case, kernel_device)
    for name, numbers in expected.items():
        assert found[name].dtype == numbers.dtype and torch.equal(found[name], numbers), name


@given(trees())
def test_compiled_for_a_cpu_it_says_the_same_in_int64(case: dict[str, Any]) -> None:
    """Requests lie apart, as those of a cache's slots and of a growing tree do."""
    case["shape"]["split_keys"] = None
    lengths, *of_nodes = arguments(case)
    found = on_cpu(lengths, *(apart(numbers) for numbers in of_nodes), **case["shape"])
    for name, numbers in reference(lengths, *of_nodes, **case["shape"])._asdict().items():
        assert torch.equal(getattr(found, name), numbers.long()), name


def apart(numbers: torch.Tensor) -> torch.Tensor:
    """The same, with columns of others behind each row."""
    return torch.cat((numbers, torch.full((len(numbers), 3), 10**9)), dim=1)[:, : numbers.shape[1]]


@st.composite
def planned_trees(draw: st.DrawFn) -> dict[str, Any]:
    """Requests that are there, with whole trees in any order; the host knows their block tables."""
    num_nodes = draw(st.integers(1, 12))
    lengths = draw(st.lists(st.integers(2, 20), min_size=1, max_size=3))
    max_blocks = -(-(20 + num_nodes) // BLOCK_SIZE)
    return {
        "lengths": lengths,
        "tables": [
            [1 + i + len(lengths) * block for block in reversed(range(max_blocks))] for i in range(len(lengths))
        ],
        "parents": [[draw(st.integers(-1, node - 1)) for node in range(num_nodes)] for _ in lengths],
        "first": draw(st.integers(0, num_nodes)),
    }


@settings(max_examples=25)
@given(planned_trees())
def test_rows_are_where_the_host_plans_them_and_see_the_same_slots(case: dict[str, Any]) -> None:
    """The host lays a tree out as runs of nodes; rows from a later node on follow on the others in the cache."""
    lengths, trees, first = case["lengths"], case["parents"], case["first"]
    requests = [
        Request(
            request_id=str(index),
            prompt_token_ids=[0] * (length - 1),
            sampling_params=SamplingParams(),
            seed=0,
            output_token_ids=[0],
            block_table=table,
        )
        for index, (length, table) in enumerate(zip(lengths, case["tables"], strict=True))
    ]
    num_rows = len(trees[0]) + 1 - first
    parts = [
        Part(
            request=request,
            start=request.num_tokens - (first == 0),
            end=request.num_tokens,
            num_draft_tokens=num_rows - (first == 0),
            parent_indices=parents,
        )
        for request, parents in zip(requests, trees, strict=True)
    ]
    planned = [  # position, and the slots of all that the row sees, its own last
        (position, segment.slots(0, position + 1, BLOCK_SIZE))
        for segment in StepLaunches.of(parts).decode.segments
        for position in range(segment.start, segment.start + segment.num_tokens)
    ]
    tables = [[block * BLOCK_SIZE + i for block in table for i in range(BLOCK_SIZE)] for table in case["tables"]]
    own = [table[length - 1 : length + len(trees[0])] for length, table in zip(lengths, tables, strict=True)]
    depth = max(tree_shape(parents).depth for parents in trees)
    tensors = [torch.tensor(numbers) for numbers in (lengths, own, trees)]
    with NoReadback():  # type: ignore[no-untyped-call]
        found = reference(*tensors, first=first, offset=-1, depth=depth, rows_per_tile=1, split_keys=None)
    assert found.positions.tolist() == found.tile_positions.tolist() == found.last_keys.tolist()
    assert found.positions.tolist() == [position for position, _ in planned]
    assert found.slots.tolist() == [slots[-1] for _, slots in planned]
    assert torch.equal(found.predicted, found.positions + 1)
    for row, (position, slots) in enumerate(planned):
        start = int(found.branch_starts[row])
        branch = found.branch_slots[row].tolist()
        assert [*tables[row // num_rows][:start], *branch][: position + 1] == slots
        assert not any(branch[position + 1 - start :])
        assert (found.tile_segments[row], found.tile_rows[row], found.tile_sizes[row]) == (row, row, 1)


def test_rows_of_nobody_are_stored_in_the_null_block_and_attend_to_it(kernel_device: torch.device) -> None:
    """An absent request, whatever its tree was, beside one that is there."""
    case = {
        "lengths": [7, 0],
        "parents": [[-1, 0], [-1, 0]],
        "shape": {"first": 0, "offset": -1, "depth": 3, "rows_per_tile": 2, "split_keys": 3},
    }
    nothing = [0, 0, 0]
    for found in both_ways(case, kernel_device):
        assert found["positions"].tolist() == [6, 7, 8, 0, 0, 0]
        assert found["slots"].tolist() == [6, 5, 4, 0, 0, 0]
        assert found["predicted"].tolist() == [7, 8, 9, -1, -1, -1]
        shared, own = [2, 1, 0, 0], [1] * 6
        assert found["tile_sizes"].tolist() == [*shared, *own]
        assert found["tile_rows"].tolist() == [0, 2, 3, 5, *range(6)]
        assert found["first_keys"].tolist() == [*[0] * 4, 6, 6, 6, 0, 0, 0]  # two splits of three keys
        assert found["last_keys"].tolist() == [5, 5, 0, 0, 6, 7, 8, 0, 0, 0]
        assert found["branch_starts"].tolist() == [7, 7, 7, *[NO_BRANCH] * 3]
        assert found["branch_slots"].tolist() == [nothing, [5, 0, 0], [5, 4, 0], *[nothing] * 3]
