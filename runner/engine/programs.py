"""A CPU's counterpart of a CUDA graph: a computation's kernels, recorded once and then made in one call."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.cpu.panels import Panels, Weight
from runner.engine.backend import runs_kernels
from runner.engine.graphs import Compute, Graph, GraphStore, Tensors

_aten = torch.ops.aten
# What a recording leaves out without harm: they make tensors of memory, and neither read nor write it;
MAKE_TENSORS = {
    *(_aten.alias, _aten.as_strided, _aten.chunk, _aten.detach, _aten.empty, _aten.expand, _aten.narrow, _aten.select),
    *(_aten.slice, _aten.split, _aten.split_with_sizes, _aten.squeeze, _aten.t, _aten.transpose, _aten.unsqueeze),
    _aten.view,
}
# these only where there is nothing to be done.
MAY_COPY = {_aten.contiguous, _aten.flatten, _aten.reshape, _aten.to}


def graph_store(device: torch.device) -> GraphStore:
    return GraphStore() if runs_kernels(device) else GraphStore(record_program, at_once=True)


def can_record(weight: Weight) -> bool:
    """Whether passes over such weights can be captured."""
    return isinstance(weight, Panels) or runs_kernels(weight.device)


class NotRecordableError(Exception):
    """torch computes something itself, which a program would not."""


class _KernelsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, kwargs = func.overloadpacket, kwargs or {}
        if kind in MAKE_TENSORS:
            return func(*args, **kwargs)
        if kind in MAY_COPY:
            result = func(*args, **kwargs)
            if result.untyped_storage()._cdata == args[0].untyped_storage()._cdata:
                return result
        raise NotRecordableError(str(func))


def record_program(compute: Compute, inputs: Tensors) -> Graph:
    """What torch computes a part of stays as it is: it is computed anew at each replay."""
    from kernels.cpu.recording import Pool, recording  # numba, of no use on a GPU

    held = tuple(tensor.clone() for tensor in inputs)
    pool = _pools.get("shared") or Pool()
    _pools["shared"] = pool
    try:
        with recording(pool) as recorded, _KernelsOnly():  # type: ignore[no-untyped-call]
            outputs = compute(*held)
    except NotRecordableError:
        return _eager(compute, held)
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


_pools: WeakValueDictionary[str, Any] = WeakValueDictionary()
