"""What a captured step works out on the device: its rows, against the host's plan, and what becomes of its requests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.chain_rows import chain_rows as chain_rows_on_cpu
from kernels.cpu.fit_drafts import fit_drafts as fit_on_cpu
from kernels.cpu.follow_verified import follow_verified as follow_on_cpu
from kernels.reference.chain_rows import chain_rows as reference
from kernels.reference.fit_drafts import fit_drafts as fit_reference
from kernels.reference.follow_verified import follow_verified as follow_reference
from runner.engine.forward_batch import PackedLaunch
from runner.engine.paged_shape import PagedShape
from runner.engine.segment import Segment

pytest.importorskip("triton")
from kernels.chain_rows import chain_rows
from kernels.fit_drafts import fit_drafts
from kernels.follow_verified import follow_verified

FIT = {"definition": fit_reference, "kernel": fit_drafts, "compiled": fit_on_cpu}
FOLLOW = {"definition": follow_reference, "kernel": follow_verified, "compiled": follow_on_cpu}


@st.composite
def chains(draw: st.DrawFn) -> dict[str, Any]:
    block_size, num_rows = draw(st.sampled_from([4, 16])), draw(st.integers(1, 17))
    lengths = draw(st.lists(st.integers(0, 26), min_size=1, max_size=4))
    max_blocks = 60 // block_size
    order = draw(st.permutations(range(1, 1 + max_blocks * len(lengths))))
    return {
        "lengths": [length and length + 2 for length in lengths],
        "tables": [list(order[i * max_blocks : (i + 1) * max_blocks]) for i in range(len(lengths))],
        "shape": {
            "offset": draw(st.integers(-3, 1)),
            "num_rows": num_rows,
            "block_size": block_size,
            "rows_per_tile": draw(st.sampled_from([1, 4, 16])),
        },
    }


def both_ways(case: dict[str, Any], device: torch.device) -> tuple[Any, Any]:
    lengths = torch.tensor(case["lengths"], dtype=torch.int64)
    tables = torch.tensor(case["tables"], dtype=torch.int32)
    by_kernel = chain_rows(lengths.to(device), tables.to(device), **case["shape"])
    return reference(lengths, tables, **case["shape"]), [numbers.cpu() for numbers in by_kernel]


@settings(max_examples=25)
@given(chains())
def test_the_kernel_says_what_the_definition_says(kernel_device: torch.device, case: dict[str, Any]) -> None:
    for expected, found in zip(*both_ways(case, kernel_device), strict=True):
        assert torch.equal(found, expected)


@settings(max_examples=60)
@given(chains(), st.integers(1, 3))
def test_compiled_for_a_cpu_it_says_the_same_in_int64(case: dict[str, Any], table_stride: int) -> None:
    lengths = torch.tensor(case["lengths"], dtype=torch.int64)
    tables = torch.tensor(case["tables"]).repeat(1, table_stride)[:, : len(case["tables"][0])]  # rows apart
    expected = reference(lengths, tables.to(torch.int32), **case["shape"])
    for found, wanted in zip(chain_rows_on_cpu(lengths, tables, **case["shape"]), expected, strict=True):
        assert found.dtype == torch.int64 and torch.equal(found, wanted.long())


@settings(max_examples=60)
@given(chains())
def test_rows_and_tiles_are_those_that_the_host_plans(case: dict[str, Any]) -> None:
    """Absent requests apart, which the host leaves out."""
    case["lengths"] = [max(length, 3) for length in case["lengths"]]
    shape, num_rows = case["shape"], case["shape"]["num_rows"]
    segments = [
        Segment(start=length + shape["offset"], num_tokens=num_rows, block_table=table)
        for length, table in zip(case["lengths"], case["tables"], strict=True)
    ]
    planned = PagedShape(rows_per_tile=shape["rows_per_tile"], split_keys=512, max_context=1024)
    token_ids = [0] * num_rows * len(segments)
    packed = PackedLaunch.of(
        "decode",
        segments,
        token_ids,
        shape=planned,
        block_size=shape["block_size"],
    )
    batch = packed.unpack(torch.tensor(packed.numbers))
    found = reference(torch.tensor(case["lengths"]), torch.tensor(case["tables"], dtype=torch.int32), **case["shape"])
    tiles = batch.attention.segments
    assert torch.equal(found.positions, batch.positions)
    assert torch.equal(found.slots, batch.slot_mapping)
    assert torch.equal(found.predicted, batch.positions + 1)
    for name in ("tile_segments", "tile_rows", "tile_sizes", "tile_positions", "last_keys"):
        assert torch.equal(getattr(found, name), getattr(tiles, name)), name


def test_rows_behind_the_last_block_of_a_table_go_to_the_null_block(kernel_device: torch.device) -> None:
    case = {
        "lengths": [7],
        "tables": [[5, 3]],
        "shape": {"offset": -1, "num_rows": 4, "block_size": 4, "rows_per_tile": 16},
    }
    for found in both_ways(case, kernel_device):
        assert found[0].tolist() == [6, 7, 8, 9]
        assert found[1].tolist() == [14, 15, 0, 0]


@pytest.mark.parametrize("how", FIT)
def test_drafts_that_could_not_be_committed_are_none(how: str, kernel_device: torch.device) -> None:
    """Room for all, for one of them, for none, and a request that has one draft from the start."""
    drafts = torch.tensor([[10, 11, 12], [13, 14, 15], [16, 17, 18], [19, -1, -1]])
    last = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])[:, 1]
    lengths, limits = torch.tensor([5, 8, 9, 3]), torch.tensor([9, 10, 10, 20])
    device = kernel_device if how == "kernel" else torch.device("cpu")
    arguments = [t.to(device) for t in (drafts, last, lengths, limits)]
    fitting, rows = FIT[how](*arguments)
    assert fitting.tolist() == [[10, 11, 12], [13, -1, -1], [-1, -1, -1], [19, -1, -1]]
    assert rows.tolist() == [[2, 10, 11, 12], [4, 13, 0, 0], [6, 0, 0, 0], [8, 19, 0, 0]]
    nothing, rows = FIT[how](arguments[0][:, :0].contiguous(), *arguments[1:])
    assert nothing.shape == (4, 0) and rows.tolist() == [[2], [4], [6], [8]]


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("how", FOLLOW)
def test_requests_move_on_by_what_was_verified(how: str, counts: bool, kernel_device: torch.device) -> None:
    """All drafts accepted, some, none, and a place without a request, which has padding; one says a token twice."""
    lengths = torch.tensor([9, 5, 7, 0])
    last = torch.tensor([[1, 2], [3, 4], [5, 6], [0, 0]])
    token_ids = torch.tensor([[10, 11, 10], [13, 14, -1], [15, -1, -1], [-1, -1, -1]])
    num_accepted, num_drafts = torch.tensor([2, 1, 0, 0]), torch.tensor([2, 2, 1, 0])
    device = kernel_device if how == "kernel" else torch.device("cpu")
    arguments = [t.to(device) for t in (lengths, last, token_ids, num_accepted, num_drafts)]
    said = torch.zeros(4, 20, dtype=torch.int32, device=device) if counts else None
    packed = FOLLOW[how](*arguments, said)
    assert packed.tolist() == [[10, 11, 10, 2, 2], [13, 14, -1, 1, 2], [15, -1, -1, 0, 1], [-1, -1, -1, 0, 0]]
    assert arguments[0].tolist() == [12, 7, 8, 0]
    assert arguments[1].tolist() == [[11, 10], [13, 14], [6, 15], [0, 0]]
    if said is not None:
        found = {(request, token): int(said[request, token]) for request, token in said.nonzero().tolist()}
        assert found == {(0, 10): 2, (0, 11): 1, (1, 13): 1, (1, 14): 1, (2, 15): 1}
