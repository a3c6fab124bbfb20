"""Which layouts of a computation are captured, and which graphs are kept."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.engine import graphs
from runner.engine.graphs import Compute, Graph, GraphStore, Tensors
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


def test_graphs_share_a_pool_while_one_of_them_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses to capture into a pool whose graphs are all gone: those of an engine that another one replaced."""
    entered = list[int]()
    handles = iter(range(9))

    def capture(graph: Any, *, pool: int, **_: Any) -> Any:
        entered.append(pool)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    first = graphs.record_cuda_graph(lambda: (), ())
    second = graphs.record_cuda_graph(lambda: (), ())
    del first
    third = graphs.record_cuda_graph(lambda: (), ())
    del second, third
    graphs.record_cuda_graph(lambda: (), ())
    assert entered == [0, 0, 0, 1]
