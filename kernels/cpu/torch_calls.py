"""What torch itself computes in a recorded computation: refused, or written down, as a kernel or between the kernels.

A call that is written down is not made, for what it reads is not there yet: only shapes are known, which torch's "meta"
device computes. Where they depend on values, as where a value is read back, nothing can be recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from kernels.cpu.lowering import lower
from kernels.cpu.recording import Recording
from kernels.cpu.under_way import NotRecordableError

_aten = torch.ops.aten
PLACES = ("dtype", "layout", "device", "pin_memory")  # arguments that say what is to be made
# They leave what they make unwritten.
UNWRITTEN = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}


class TorchCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """It sees neither `tolist` nor `numpy`, which read what is not there yet, nor `from_numpy`.

    A tensor that nobody holds behind the recording is gone at its replay; runner/engine/upload.py refuses to make one.
    """

    def __init__(self, recorded: Recording, *, allowed: bool) -> None:
        """allowed: torch may compute, call by call; otherwise that is an error."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorded, self._allowed = recorded, allowed

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nobody traces a recording, and the wrapper that keeps tracers out takes as long as making a view."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _decomposes(func):  # into what it does, which may be nothing
            with self:
                return func.decompose(*args, **kwargs)
        if func.is_view:  # it makes a tensor of memory, and neither reads nor writes it
            return func(*args, **kwargs)
        if not self._allowed or torch.Tag.inplace_view in func.tags:
            raise NotRecordableError(str(func))
        written = _written(func, args, kwargs)
        if written:
            self._add(func, args, kwargs, None)
            return written[0] if len(func._schema.returns) == 1 else tuple(written)
        return self._with_results(func, args, kwargs)

    def _with_results(self, func: Any, args: Any, kwargs: Any) -> Any:
        with _disable_current_modes():
            results = tree_map_only(Tensor, self._room, _results_on_meta(func, args, kwargs))
        if func.overloadpacket not in UNWRITTEN:
            self._add(func, args, kwargs, results)
        return results

    def _room(self, shape: Tensor) -> Tensor:
        """Memory that the meta device's tensor would have."""
        span = 1 + sum((size - 1) * stride for size, stride in zip(shape.shape, shape.stride(), strict=True))
        flat = self._recorded.empty((span if shape.numel() else 0,), shape.dtype)
        return flat.as_strided(shape.shape, shape.stride())

    def _add(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        if any(isinstance(own, Tensor) and (own.is_neg() or own.is_conj()) for own in tree_leaves((args, kwargs))):
            raise NotRecordableError(f"{func} of a view that negates what it shows")
        outs = _written(func, args, kwargs) if results is None else [results]
        if len(outs) == 1 and isinstance(outs[0], Tensor) and lower(func, args, kwargs, outs[0], self._recorded.keep):
            return
        own_args, own_kwargs, own_results = tree_map_only(Tensor, self._recorded.unseen, (args, kwargs, results))
        targets = tree_leaves(own_results) if results is not None else []
        self._recorded.add_part(_call(func, own_args, own_kwargs, targets))


_known = dict[Any, Any]()  # results on the meta device, which takes as long as it takes to compute small ones
MOST_KNOWN = 4096


def _results_on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Tensors of the meta device, shaped as the call's results.

    Raises:
        NotRecordableError: the shapes depend on values, or the results are no tensors.
    """
    called = (func, torch.get_default_dtype(), _described(args), _described(kwargs))
    if called in _known:
        return _known[called]
    on_meta = tree_map_only(Tensor, _meta, (args, kwargs))
    if any(argument.name == "device" for argument in func._schema.arguments):
        on_meta[1]["device"] = "meta"
    try:
        shapes = func(*on_meta[0], **on_meta[1])
    except (RuntimeError, NotImplementedError) as error:
        raise NotRecordableError(f"{func}: {error}") from error
    if not all(isinstance(shape, Tensor) for shape in tree_leaves(shapes)):
        raise NotRecordableError(f"{func} is read back")
    if len(_known) == MOST_KNOWN:
        _known.clear()
    _known[called] = shapes
    return shapes


def _described(value: Any) -> Any:
    """What the meta device looks at, as a key; 1, 1.0 and True are three."""
    if isinstance(value, Tensor):
        return Tensor, value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return type(value), *map(_described, value)
    if isinstance(value, dict):
        return dict, *((key, _described(own)) for key, own in value.items())
    return type(value), value


@cache
def _decomposes(func: Any) -> bool:
    return bool(func._can_decompose())


def _call(func: Any, args: Any, kwargs: Any, targets: list[Tensor]) -> Callable[[], None]:
    def copy_results() -> None:
        for target, result in zip(targets, tree_leaves(func(*args, **kwargs)), strict=True):
            target.copy_(result)

    if not targets:
        return partial(func, *args, **kwargs)
    into = _into(func) if len(targets) == 1 else None
    if into is None:
        return copy_results
    known = {argument.name for argument in into._schema.arguments}
    return partial(into, *args, **{name: value for name, value in kwargs.items() if name in known}, out=targets[0])


@cache
def _into(func: Any) -> Any | None:
    """The overload that takes the same and writes its result to `out`, in half the time of a call and a copy."""
    # What makes a tensor says also where; a tensor to write to is somewhere.
    wanted = [_kind(argument) for argument in func._schema.arguments if argument.name not in PLACES]
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        *arguments, last = overload._schema.arguments or [None]
        if last is not None and last.name == "out" and [_kind(argument) for argument in arguments] == wanted:
            return overload
    return None


def _kind(argument: Any) -> tuple[str, str]:
    return argument.name, str(argument.type)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that a call writes to."""
    if not func._schema.is_mutable:
        return []
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    return [
        given[argument.name]
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in given
    ]


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
