"""Launches for the kernels: which tiles their rows make, and that launches of one bucket are laid out alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.linear_plan import plan_linear
from kernels.reference.tree_rows import NO_BRANCH
from runner.engine import launch_shapes
from runner.engine.bucket import OF_GENERATED_TOKENS, OF_PROMPTS, Buckets, bucket, rows_of_prompts
from runner.engine.forward_batch import PackedLaunch
from runner.engine.paged_shape import PagedShape
from runner.engine.segment import Segment

pytest.importorskip("triton")

EAGER = PagedShape(rows_per_tile=4, split_keys=64, max_context=200)
OF_SHORT_PROMPTS = replace(OF_PROMPTS, most_rows=128, least_context=100)
BUCKETED = PagedShape(rows_per_tile=4, split_keys=64, max_context=200, buckets=OF_GENERATED_TOKENS)


def segment(start: int, num_tokens: int, first_block: int = 1) -> Segment:
    return Segment(start=start, num_tokens=num_tokens, block_table=range(first_block, first_block + 13))


def packed(segments: list[Segment], shape: PagedShape, **options: Any) -> PackedLaunch:
    count = sum(own.num_tokens for own in segments)
    return PackedLaunch.of("decode", segments, [7] * count, shape=shape, block_size=16, **options)


def attention(launch: PackedLaunch) -> dict[str, Any]:
    """The fields of its PagedSegments, tensors as lists."""
    fields = vars(launch.unpack(torch.tensor(launch.numbers)).attention.segments)
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in fields.items()}


def test_rows_become_tiles_and_positions_their_own() -> None:
    found = attention(packed([segment(30, 6), segment(2, 1, first_block=40)], EAGER))
    assert found["tile_segments"] == [0, 0, 1]
    assert found["tile_rows"] == [0, 4, 6] and found["tile_sizes"] == [4, 2, 1]
    assert found["tile_positions"] == [30, 34, 2] and found["last_keys"] == [33, 35, 2]
    assert found["block_tables"] == [[1, 2, 3], [40, 0, 0]]
    assert found["branch_starts"] == [NO_BRANCH, NO_BRANCH]
    assert (found["max_context"], found["max_tile_size"]) == (36, 4)


def test_rows_of_a_block_see_its_end() -> None:
    assert attention(packed([segment(30, 6)], EAGER, is_causal=False))["last_keys"] == [35, 35]


def test_a_branch_leads_to_the_slots_of_its_own_path() -> None:
    """Nodes at places 33 and 36 of a request whose drafts begin at 32."""
    branch = Segment(start=33, num_tokens=1, block_table=[5, 6, 7], branch_start=32, branch=[33, 36])
    launch = packed([branch, segment(3, 1)], EAGER)
    found = attention(launch)
    assert found["branch_starts"] == [32, NO_BRANCH]
    assert found["branch_slots"] == [[7 * 16 + 1, 7 * 16 + 4], [0, 0]]
    assert launch.unpack(torch.tensor(launch.numbers)).slot_mapping.tolist() == [7 * 16 + 4, 16 + 3]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 180), st.integers(1, 18)), min_size=1, max_size=12),
    st.sampled_from([OF_GENERATED_TOKENS, OF_SHORT_PROMPTS]),
)
def test_a_bucket_holds_what_eager_tiles_hold_and_tiles_without_rows(
    shape: list[tuple[int, int]], buckets: Buckets
) -> None:
    segments = [segment(start, count, first_block=20 * index + 1) for index, (start, count) in enumerate(shape)]
    launch = packed(segments, replace(BUCKETED, buckets=buckets))
    eager, padded = attention(packed(segments, EAGER)), attention(launch)
    if sum(count for _, count in shape) > buckets.most_rows:
        assert launch.key is None and padded == eager
        return
    count = len(eager["tile_rows"])
    for name in ("tile_segments", "tile_rows", "tile_sizes", "tile_positions", "last_keys"):
        assert padded[name][:count] == eager[name], name
    assert not any(padded["tile_sizes"][count:])
    for own, wider in zip(eager["block_tables"], padded["block_tables"], strict=False):
        assert wider[: len(own)] == own and not any(wider[len(own) :])
    assert eager["max_context"] <= padded["max_context"] <= 256
    assert eager["max_tile_size"] <= padded["max_tile_size"]


def test_launches_of_one_key_differ_in_numbers_alone() -> None:
    one, other = (
        packed([segment(40, 5), segment(9, 5, 30)], BUCKETED),
        packed([segment(57, 5), segment(1, 5)], BUCKETED),
    )
    assert one.key == other.key and len(one.numbers) == len(other.numbers)
    assert one.key != packed([segment(64, 5), segment(1, 5)], BUCKETED).key, "the context has left its bucket"
    assert packed([segment(40, 5)], EAGER).key is None


def test_prompts_of_one_size_share_a_layout_whoever_comes_together() -> None:
    shape = PagedShape(rows_per_tile=16, split_keys=None, max_context=2048, buckets=OF_PROMPTS)
    keys = {
        packed([segment(0, count, 1 + 13 * index) for index, count in enumerate(counts)], shape).key
        for counts in ([129], [200], [180, 30], [64] * 4, [20] * 8)
    }
    assert len(keys) == 1
    assert packed([segment(0, 120)], shape).key not in keys
    alone, together = (
        packed([segment(0, 8, 1 + 13 * index) for index in range(count)], shape, reads_segments=True)
        for count in (1, 2)
    )
    assert alone.key != together.key or len(alone.numbers) == len(together.numbers), "states are listed by request"


def test_a_prompts_rows_are_padded_to_tokens_of_a_products_tiles() -> None:
    sizes = {number: rows_of_prompts(number) for number in range(1, OF_PROMPTS.most_rows + 1)}
    assert all(size >= number and rows_of_prompts(size) == size for number, size in sizes.items())
    assert sorted(set(sizes.values())) == [16, 32, 64, *range(128, 1025, 128)]
    for number, size in sizes.items():
        plans = [plan_linear(rows, 4096, 4096, element_size=2, gated=False) for rows in (max(number, 9), size)]
        assert plans[0] == plans[1], f"{number} rows take as many tiles as {size}"


@pytest.mark.parametrize(("hidden_size", "most_rows"), [(2048, 1024), (4096, 1024), (8192, 256), (16384, 64)])
def test_of_larger_models_shorter_prompts_are_replayed(hidden_size: int, most_rows: int) -> None:
    """The others are computed for longer than launched, and what graphs hold for them would push others out."""
    weight = torch.empty(hidden_size, hidden_size, dtype=torch.bfloat16, device="meta")
    buckets = launch_shapes._buckets("prefill", weight)
    assert buckets.most_rows == most_rows
    assert buckets.hold(most_rows) and not buckets.hold(most_rows + 1)
    assert launch_shapes._buckets("decode", weight).hold(100_000)


def test_a_launch_that_would_be_padded_beyond_the_largest_is_not_padded() -> None:
    shape = PagedShape(rows_per_tile=16, split_keys=None, max_context=2048, buckets=replace(OF_PROMPTS, most_rows=300))
    assert [shape.padded_rows(count) for count in (129, 256, 257, 300)] == [256, 256, 257, 300]
    assert packed([segment(0, 120), segment(0, 137, 14)], shape).key is None


def test_buckets_are_at_most_a_quarter_too_large() -> None:
    sizes = [bucket(number) for number in range(1, 1200)]
    assert sizes == sorted(sizes) and all(bucket(size) == size for size in sizes)
    assert all(number <= size <= number * 1.25 for number, size in enumerate(sizes, start=1))
    assert len(set(sizes)) < 40
