"""A CPU's counterpart of a CUDA graph: a computation's kernels, recorded once and then made in one call."""

from __future__ import annotations

import gc
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.cpu.panels import Panels, Weight
from runner.engine.backend import runs_kernels
from runner.engine.graphs import Compute, Graph, GraphStore, Tensors

if TYPE_CHECKING:
    from kernels.cpu.recording import Pool

MAX_OUTPUT_BYTES = 1 << 28  # of the graphs of a store
MAX_GRAPHS = 512  # of a store: one takes some ten kilobytes beside its outputs
_aten = torch.ops.aten
# What a recording leaves out without harm: they make tensors of memory, and neither read nor write it;
MAKE_TENSORS = {
    *(_aten.alias, _aten.as_strided, _aten.chunk, _aten.detach, _aten.expand, _aten.narrow, _aten.select),
    *(_aten.slice, _aten.split, _aten.split_with_sizes, _aten.squeeze, _aten.t, _aten.transpose, _aten.unsqueeze),
    _aten.view,
}
# these only where there is nothing to be done.
MAY_COPY = {_aten.contiguous, _aten.flatten, _aten.reshape, _aten.to}


def graph_store(device: torch.device) -> GraphStore:
    """For one computation, whose calls follow one another."""
    if runs_kernels(device):
        return GraphStore()
    from kernels.cpu.recording import Pool  # numba, of no use on a GPU

    record = partial(record_program, pool=Pool())
    return GraphStore(record, at_once=True, max_output_bytes=MAX_OUTPUT_BYTES, max_graphs=MAX_GRAPHS)


def can_record(weight: Weight) -> bool:
    """Whether passes over such weights can be captured."""
    return isinstance(weight, Panels) or runs_kernels(weight.device)


class NotRecordableError(Exception):
    """torch computes something itself, which a program would not."""


class _KernelsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what torch would compute. It sees neither `tolist` nor `numpy`, which read what is not there yet."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, kwargs = func.overloadpacket, kwargs or {}
        if kind in MAKE_TENSORS:
            return func(*args, **kwargs)
        if kind in MAY_COPY:
            result = func(*args, **kwargs)
            if result.untyped_storage()._cdata == args[0].untyped_storage()._cdata:
                return result
        raise NotRecordableError(str(func))


def record_program(compute: Compute, inputs: Tensors, *, pool: Pool) -> Graph:
    """A computation of which torch does a part is not recorded: each replay computes it anew, kernel by kernel.

    torch may prepare what stays, a table of rotations say: then a second attempt finds it there.
    """
    held = tuple(tensor.clone() for tensor in inputs)
    try:
        return _recorded(compute, held, pool)
    except NotRecordableError:
        compute(*held)
    try:
        return _recorded(compute, held, pool)
    except NotRecordableError:
        return _eager(compute, held)


def _recorded(compute: Compute, held: Tensors, pool: Pool) -> Graph:
    from kernels.cpu.recording import recording

    collects = gc.isenabled()
    gc.disable()  # what it frees may be torch's to finish, and no kernel
    try:
        with recording(pool) as recorded, _KernelsOnly():  # type: ignore[no-untyped-call]
            outputs = compute(*held)
    finally:
        if collects:
            gc.enable()
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
