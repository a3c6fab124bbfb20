"""KV blocks are owned once, the null block by nobody, and keys and values lie where the block table says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.engine.block_manager import BlockManager
from runner.engine.forward_batch import ForwardBatch
from runner.engine.kv_cache import PagedKVCache
from runner.engine.segment import Family, Segment
from runner.engine.tile_shape import ROW_INVARIANT_TILES

CPU = torch.device("cpu")


@given(
    num_blocks=st.integers(2, 20),
    block_size=st.integers(1, 5),
    events=st.lists(st.tuples(st.integers(0, 3), st.just(-1) | st.integers(0, 40)), max_size=40),
)
def test_every_block_is_free_or_owned_exactly_once(
    num_blocks: int, block_size: int, events: list[tuple[int, int]]
) -> None:
    """Four tables grow (to that many tokens) and give back (-1) in any order."""
    manager = BlockManager(num_blocks, block_size)
    tables: list[list[int]] = [[] for _ in range(4)]
    for place, num_tokens in events:
        table, before, num_free = tables[place], list(tables[place]), manager.num_free_blocks
        missing = max(0, -(-num_tokens // block_size) - len(table))
        if num_tokens < 0:
            manager.release(table)
            assert table == [] and manager.num_free_blocks == num_free + len(before)
        elif manager.grow(table, num_tokens):
            assert len(table) == len(before) + missing and manager.num_free_blocks == num_free - missing
            assert table[: len(before)] == before, "what is in the cache stays where it is"
        else:
            assert missing > num_free and table == before and manager.num_free_blocks == num_free
        assert all(1 <= block < num_blocks for block in table), "the null block is nobody's"
        manager.check_integrity(tables)
    for table in tables:
        manager.release(table)
    assert manager.num_free_blocks == manager.num_usable_blocks == num_blocks - 1


def test_blocks_are_enough_for_the_tokens_and_not_one_more() -> None:
    manager = BlockManager(9, 4)
    assert [manager.num_blocks_for(num_tokens) for num_tokens in (0, 1, 4, 5, 8, 32)] == [0, 1, 1, 2, 2, 8]
    table: list[int] = []
    assert manager.grow(table, 32) and not manager.grow(table, 33)
    assert sorted(table) == list(range(1, 9))


def test_a_table_never_shrinks_by_growing() -> None:
    """A request that drafts less than in the step before keeps the blocks that it has."""
    manager = BlockManager(9, 4)
    table: list[int] = []
    assert manager.grow(table, 12)
    assert manager.grow(table, 5)
    assert len(table) == 3


@pytest.mark.parametrize(
    "tables",
    [[], [[1]], [[1, 2], [2]], [[1, 2], [2, 1]], [[1, 2, 3]], [[0, 1, 2]]],
    ids=["all lost", "one lost", "shared", "owned twice", "free and owned", "the null block owned"],
)
def test_the_integrity_check_sees_a_leak_and_a_double_owner(tables: list[list[int]]) -> None:
    manager = BlockManager(6, 4)
    table: list[int] = []
    assert manager.grow(table, 8)
    assert table == [1, 2]
    manager.check_integrity([[2], [1]])
    with pytest.raises(AssertionError, match="a KV block"):
        manager.check_integrity(tables)


def test_a_cache_of_the_null_block_alone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_blocks must be >= 2 \(block 0 is reserved\), got 1"):
        BlockManager(1, 16)


def test_a_new_cache_is_zero_everywhere() -> None:
    """A masked key contributes 0 * value, which is NaN where memory nobody wrote happens to hold one."""
    cache = PagedKVCache([6, 4], 3, 2, torch.bfloat16, CPU)
    assert [tuple(layer.shape) for layer in cache.layers] == [(3, 2, 6), (3, 2, 4)]
    assert all(layer.dtype == torch.bfloat16 and not layer.any() for layer in cache.layers)


def test_a_write_lands_in_its_slots_and_nowhere_else() -> None:
    cache = PagedKVCache([3, 3], 4, 2, torch.float32, CPU)
    kv = torch.arange(1.0, 10.0).view(3, 3)
    cache.write(1, torch.tensor([5, 2, 7]), kv)
    assert torch.equal(cache.layers[1][2, 1], kv[0])
    assert torch.equal(cache.layers[1][1, 0], kv[1])
    assert torch.equal(cache.layers[1][3, 1], kv[2])
    assert int(cache.layers[1].count_nonzero()) == 9
    assert not cache.layers[0].any()


def test_a_second_write_to_a_slot_replaces_the_first() -> None:
    """How a rejected draft leaves the cache: the next token of its position is written over it."""
    cache = PagedKVCache([2], 3, 2, torch.float32, CPU)
    for value in (1.0, 2.0):
        cache.write(0, torch.tensor([3]), torch.full((1, 2), value))
    assert cache.layers[0].flatten().tolist() == [0.0] * 6 + [2.0] * 2 + [0.0] * 4


@given(data=st.data(), block_size=st.integers(1, 6), family=st.sampled_from(["prefill", "decode"]))
def test_a_launch_writes_each_token_where_its_block_table_says(
    data: st.DataObject, block_size: int, family: Family
) -> None:
    """Every position of every request is found through its table; padding rows reach the null block only."""
    manager = BlockManager(40, block_size)
    segments = []
    for _ in range(data.draw(st.integers(1, 3))):
        start, num_tokens = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 7))
        table: list[int] = []
        assert manager.grow(table, start + num_tokens)
        segments.append(Segment(start=start, num_tokens=num_tokens, block_table=table))
    num_tokens = sum(segment.num_tokens for segment in segments)
    batch = ForwardBatch.build(
        family, segments, list(range(num_tokens)), shape=ROW_INVARIANT_TILES[family], block_size=block_size, device=CPU
    )
    cache = PagedKVCache([1], 40, block_size, torch.float32, CPU)
    num_rows = len(batch.token_ids)
    cache.write(0, batch.slot_mapping, torch.arange(1.0, num_rows + 1).view(num_rows, 1))
    row = 0
    for segment in segments:
        for position in range(segment.start, segment.start + segment.num_tokens):
            row += 1
            block = segment.block_table[position // block_size]
            assert cache.layers[0][block, position % block_size].item() == row
            assert batch.positions[row - 1].item() == position
    assert int(cache.layers[0][1:].count_nonzero()) == num_tokens
