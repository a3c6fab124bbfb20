"""The graphs that a device has: CUDA's on a GPU, and their counterpart on a CPU, programs, which are recorded here.

A program is a computation's kernels, recorded once and then made in few calls.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import torch

from kernels.cpu.panels import Panels, Weight
from kernels.cpu.under_way import NotRecordableError
from kernels.garbage import uncollected
from runner.engine.backend import runs_kernels
from runner.engine.graphs import Compute, Graph, GraphMemory, GraphStore, Tensors, record_cuda_graph

if TYPE_CHECKING:
    from kernels.cpu.recording import Pool

MAX_PROGRAM_OUTPUT_BYTES = 1 << 28  # of those of a store
MAX_PROGRAMS = 512  # of a store: one takes some ten kilobytes beside its outputs, a rule's tensors as many again
_one_at_a_time = threading.Lock()  # recordings of all threads: torch notes for all of them that a mode is on


def graph_store(device: torch.device, memory: GraphMemory) -> GraphStore:
    """For one computation, whose calls follow one another. memory: of CUDA graphs; programs have pools of their own."""
    if runs_kernels(device):
        return GraphStore(partial(record_cuda_graph, memory=memory))
    from kernels.cpu.recording import Pool  # numba, of no use on a GPU

    record = partial(record_program, pool=Pool())
    return GraphStore(record, at_once=True, max_output_bytes=MAX_PROGRAM_OUTPUT_BYTES, max_graphs=MAX_PROGRAMS)


def step_graph_store(device: torch.device, memory: GraphMemory) -> GraphStore:
    """For whole steps: what a call changes it would change again, so the first of a layout is made and not recorded."""
    if runs_kernels(device):
        return GraphStore(partial(record_cuda_graph, memory=memory))
    from kernels.cpu.recording import Pool

    record = partial(record_prepared, pool=Pool())
    return GraphStore(record, max_output_bytes=MAX_PROGRAM_OUTPUT_BYTES, max_graphs=MAX_PROGRAMS)


def can_record(weight: Weight) -> bool:
    """Whether passes over such weights can be captured."""
    return isinstance(weight, Panels) or runs_kernels(weight.device)


def record_program(compute: Compute, inputs: Tensors, *, pool: Pool) -> Graph:
    """Kernels alone become one call. Where torch does a part of it, the computation is first made once, for torch may
    prepare what stays, a table of rotations say; then it is recorded with torch's calls between the kernels.
    """
    held = tuple(tensor.clone() for tensor in inputs)
    try:
        return _recorded(compute, held, pool)
    except NotRecordableError:
        compute(*held)
    return _recorded_or_eager(compute, held, pool)


def record_prepared(compute: Compute, inputs: Tensors, *, pool: Pool) -> Graph:
    """Of a computation that has been made before: torch prepares nothing any more.

    One that reads values back, or takes some from the host, is not recorded: each replay computes it anew.
    """
    return _recorded_or_eager(compute, tuple(tensor.clone() for tensor in inputs), pool)


def _recorded_or_eager(compute: Compute, held: Tensors, pool: Pool) -> Graph:
    try:
        return _recorded(compute, held, pool, calls_torch=True)
    except NotRecordableError:
        return _eager(compute, held)


def _recorded(compute: Compute, held: Tensors, pool: Pool, *, calls_torch: bool = False) -> Graph:
    from kernels.cpu.recording import recording
    from kernels.cpu.torch_calls import TorchCalls

    # Garbage may be torch's to finish, and no kernel.
    with _one_at_a_time, uncollected(), recording(pool) as recorded, TorchCalls(recorded, allowed=calls_torch):
        outputs = compute(*held)
    return Graph(inputs=held, outputs=outputs, replay=recorded.program())


def _eager(compute: Compute, held: Tensors) -> Graph:
    outputs: list[torch.Tensor] = []

    def replay() -> None:
        computed = compute(*held)
        if not outputs:
            outputs.extend(computed)
        for output, fresh in zip(outputs, computed, strict=True):
            if output is not fresh:
                output.copy_(fresh)

    return Graph(inputs=held, outputs=outputs, replay=replay)
