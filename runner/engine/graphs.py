"""CUDA graphs of a pass over a model: captured once for every layout of its inputs, then replayed.

A pass that is launched kernel by kernel waits for Python between them; a replay is one call. Inputs are copied into the
tensors that were captured, so a graph serves every launch that unpacks alike (PackedLaunch.key).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]
Compute = Callable[..., Tensors]  # of tensors; waits for nothing and reads nothing back


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    inputs: Tensors  # what a replay reads
    outputs: Sequence[torch.Tensor]  # what a replay writes
    replay: Callable[[], None]


class GraphStore:
    """The graphs of one model."""

    def __init__(self, record: Callable[[Compute, Tensors], Graph] | None = None) -> None:
        """record: captures a call, which is not made by that; None: as a CUDA graph."""
        self._record = record or CudaRecorder()
        self._graphs: dict[Hashable, Graph] = {}
        self._seen: set[Hashable] = set()

    def __call__(self, key: Hashable, compute: Compute, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        """compute(*inputs); calls of one key differ in what the inputs hold, and in nothing else.

        The first call of a key is made kernel by kernel: it compiles what is not compiled yet, and a layout that never
        comes again is not worth a capture. The outputs of a later one are overwritten by the next of its key.
        """
        graph = self._graphs.get(key)
        if graph is None:
            if key not in self._seen:
                self._seen.add(key)
                return compute(*inputs)
            graph = self._graphs[key] = self._record(compute, inputs)
        for held, given in zip(graph.inputs, inputs, strict=True):
            held.copy_(given)
        graph.replay()
        return graph.outputs


class CudaRecorder:
    """Captures calls as CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, compute: Compute, inputs: Tensors) -> Graph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        held = tuple(tensor.clone() for tensor in inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = compute(*held)
        return Graph(inputs=held, outputs=outputs, replay=graph.replay)
