"""Which layouts of a computation are captured, and which graphs are kept."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.engine.graphs import Compute, Graph, GraphMemory, GraphStore, Tensors, record_cuda_graph
from tests.graphs_for_tests import recorded


def test_a_layout_is_captured_when_it_comes_again_and_replayed_from_then_on() -> None:
    calls: list[str] = []

    def record(compute: Compute, inputs: Tensors) -> Graph:
        calls.append("recorded")
        return recorded(compute, inputs)

    def compute(numbers: torch.Tensor) -> Tensors:
        calls.append("computed")
        return (numbers * 2,)

    store = GraphStore(record)
    first, second, third = (store("a", compute, torch.tensor([number]))[0].clone() for number in (1, 2, 3))
    assert [int(first), int(second), int(third)] == [2, 4, 6]
    assert calls == ["computed", "recorded", "computed", "computed"]
    assert int(store("b", compute, torch.tensor([5]))[0]) == 10 and calls.count("recorded") == 1


def test_a_layout_whose_first_call_was_interrupted_is_not_captured_yet() -> None:
    """A capture compiles nothing, and an interrupt comes where the wait is long: while the first call compiles."""
    interrupts = iter([KeyboardInterrupt])

    def compute() -> Tensors:
        for interrupt in interrupts:
            raise interrupt
        return (torch.zeros(1),)

    store = GraphStore(lambda *_: pytest.fail("it was captured"))
    with pytest.raises(KeyboardInterrupt):
        store("a", compute)
    store("a", compute)


def test_the_layouts_that_were_used_last_are_kept() -> None:
    """Outputs of 8 bytes each, room for two of them."""
    recordings: list[int] = []

    def record(compute: Compute, inputs: Tensors) -> Graph:
        recordings.append(int(inputs[0]))
        return Graph(inputs=inputs, outputs=compute(*inputs), replay=lambda: None)

    store = GraphStore(record, max_output_bytes=16)
    for key in (1, 2, 3):
        store(key, lambda number: (number,), torch.tensor(key))
    for key in (1, 2, 1, 3, 1, 2):  # 3 takes the place of 2, which is new again
        assert int(store(key, lambda number: (number,), torch.tensor(key))[0]) == key
    assert recordings == [1, 2, 3]
    store(2, lambda number: (number,), torch.tensor(2))
    assert recordings == [1, 2, 3, 2]
    recordings.clear()
    store = GraphStore(record, max_graphs=2)
    for key in (1, 2, 3, 1, 2, 3):
        store(key, lambda number: (number,), torch.tensor(key))
    assert recordings == [1, 2, 3] and len(store._graphs) == 2


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Those that were captured into, one after another; a capture beside another one is told."""
    entered, under_way, handles = list[int](), list[object](), iter(range(9))

    @contextmanager
    def capture(graph: object, *, pool: int, **_: Any) -> Iterator[None]:
        assert not under_way, "two captures at a time"
        under_way.append(graph)
        entered.append(pool)
        yield
        under_way.remove(graph)

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return entered


def test_graphs_of_an_engine_share_a_pool_while_one_of_them_lives(pools: list[int]) -> None:
    """torch refuses to capture into a pool whose graphs are all gone: those of a cache that another one replaced."""
    memory, other = GraphMemory(), GraphMemory()
    first = record_cuda_graph(lambda: (), (), memory=memory)
    second = record_cuda_graph(lambda: (), (), memory=memory)
    of_another_engine = record_cuda_graph(lambda: (), (), memory=other)
    del first
    third = record_cuda_graph(lambda: (), (), memory=memory)
    del second, third
    record_cuda_graph(lambda: (), (), memory=memory)
    assert pools == [0, 0, 1, 0, 2] and of_another_engine.pool is not None


def test_engines_in_threads_of_their_own_capture_one_after_another(pools: list[int]) -> None:
    def capture(memory: GraphMemory) -> Graph:
        return record_cuda_graph(lambda: time.sleep(0.01) or (), (), memory=memory)  # type: ignore[func-returns-value]

    with ThreadPoolExecutor(4) as threads:
        graphs = list(threads.map(capture, [GraphMemory() for _ in range(8)]))
    assert len({graph.pool for graph in graphs}) == 8 and sorted(pools) == list(range(8))
