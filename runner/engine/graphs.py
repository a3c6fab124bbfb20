"""Graphs of a computation: captured once for every layout of its inputs, then replayed. CUDA's, or a CPU's programs.

A computation that is launched kernel by kernel waits for Python between them; a replay is one call. Inputs are copied
into the tensors that were captured, so a graph serves every launch that unpacks alike (PackedLaunch.key).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any
from weakref import ReferenceType, ref

import torch

from kernels.garbage import uncollected

MAX_OUTPUT_BYTES = 1 << 30  # of the graphs of a store: outputs of other layouts lie idle
MAX_GRAPHS = 128  # of a store: a graph of hundreds of kernels takes about a megabyte

Tensors = tuple[torch.Tensor, ...]
Compute = Callable[..., Tensors]  # of tensors; waits for nothing and reads nothing back


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    inputs: Tensors  # what a replay reads
    outputs: Sequence[torch.Tensor]  # what a replay writes
    replay: Callable[[], None]
    pool: GraphPool | None = None  # of its memory; None: it has no other than these tensors


class GraphPool:
    """Memory that graphs share, for as long as one of them lives: torch opens no pool again that all have left."""

    def __init__(self) -> None:
        self.handle: Any = torch.cuda.graph_pool_handle()


class GraphMemory:
    """Of one engine's graphs, whose replays follow one another: another's may be made in a thread beside this one's."""

    def __init__(self) -> None:
        self._latest: ReferenceType[GraphPool] | None = None

    def pool(self) -> GraphPool:
        pool = self._latest() if self._latest is not None else None
        if pool is None:
            pool = GraphPool()
            self._latest = ref(pool)
        return pool


class GraphStore:
    """The graphs of one computation, the latest used; beyond the bounds the others are forgotten."""

    num_first_calls = 0  # of all stores: calls that were no replays, and took as long as they like

    def __init__(
        self,
        record: Callable[[Compute, Tensors], Graph],
        *,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
        max_graphs: int = MAX_GRAPHS,
        at_once: bool = False,
    ) -> None:
        """
        Args:
            record: captures a call, which is not made by that.
            at_once: a capture costs no more than a call, and compiles what is not compiled yet.
        """
        self._at_once = at_once
        self._record = record
        self._max_output_bytes, self._max_graphs = max_output_bytes, max_graphs
        self._graphs: OrderedDict[Hashable, Graph] = OrderedDict()  # the one that was used last comes last
        self._seen: set[Hashable] = set()

    def __call__(self, key: Hashable, compute: Compute, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        """compute(*inputs); calls of one key differ in what the inputs hold, and in nothing else.

        Unless captures are cheap, the first call of a key is made kernel by kernel: it compiles what is not compiled
        yet, and a layout that never comes again is not worth a capture. The outputs of a captured one lie in memory
        that all graphs of an engine share: they hold until the next replay of any of them.
        """
        graph = self._graphs.get(key)
        if graph is None:
            GraphStore.num_first_calls += 1
            if not self._at_once and key not in self._seen:
                outputs = compute(*inputs)
                self._seen.add(key)  # not before: an interrupt in it may leave kernels that are not compiled
                return outputs
            graph = self._graphs[key] = self._record(compute, inputs)
            self._forget_oldest()
        self._graphs.move_to_end(key)
        for held, given in zip(graph.inputs, inputs, strict=True):
            held.copy_(given)
        graph.replay()
        return graph.outputs

    def _forget_oldest(self) -> None:
        sizes = [sum(output.nbytes for output in graph.outputs) for graph in self._graphs.values()]
        kept = sum(sizes)
        for size in sizes[:-1]:
            if kept <= self._max_output_bytes and len(self._graphs) <= self._max_graphs:
                return
            kept -= size
            # Nothing replays it now: capturing has just waited for the device.
            forgotten, _ = self._graphs.popitem(last=False)
            # Where more layouts take turns than are kept, captures alone would cost more than launches one by one.
            self._seen.discard(forgotten)


def record_cuda_graph(compute: Compute, inputs: Tensors, *, memory: GraphMemory) -> Graph:
    held = tuple(tensor.clone() for tensor in inputs)
    # Garbage may be a graph of another engine, which is no work to capture.
    with _one_at_a_time, uncollected():
        graph, pool = torch.cuda.CUDAGraph(), memory.pool()
        with torch.cuda.graph(graph, pool=pool.handle, capture_error_mode="thread_local"):
            outputs = compute(*held)
    return Graph(inputs=held, outputs=outputs, replay=graph.replay, pool=pool)


_one_at_a_time = RLock()  # captures of all threads: torch has one stream for them, and an error for one within another
