"""The modes in which tensor operations meet an emulated GPU (tests/emulated_cuda.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from tests.emulated_device import EmulatedDevice, fill_with_garbage, plainly
from tests.emulated_graphs import Recording

CUDA = torch.device("cuda", 0)
# The shapes or host values of what they give depend on data of the device.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "_unique2", "unique_dim"}
# Over the last dimension of floats: in which order a GPU adds goes by how many rows there are, or where they lie.
UNSTEADY = {"sum", "mean", "cumsum", "logcumsumexp", "cumprod", "logsumexp", "_log_softmax"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
UNWRITTEN = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}


class Functions(TorchFunctionMode):
    """Says where tensors are, and moves them between host and device."""

    def __init__(self, device: EmulatedDevice, operations: Operations) -> None:
        super().__init__()
        self.device, self.operations = device, operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs, device = getattr(func, "__name__", ""), dict(kwargs or {}), self.device
        if name == "__get__":
            return self._attribute(func, args[0])
        if name in ("to", "cuda", "cpu") and isinstance(args[0], torch.Tensor):
            return self._moved(name, *args, **kwargs)
        if name == "pin_memory":
            return device.pin(args[0].clone())
        if name == "is_pinned":
            return device.is_pinned(args[0])
        if name in ("numpy", "__array__") and device.holds(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if name == "tolist" and device.holds(args[0]):
            device.wait(name)
        where = kwargs.get("device")
        if name in ("as_tensor", "asarray") and isinstance(args[0], torch.Tensor):
            return self._moved("to", args[0], where or self._where(args[0]), kwargs.get("dtype"))
        is_there = None if where is None else torch.device(where).type == "cuda"
        if is_there:
            kwargs["device"] = "cpu"
        if name == "new_tensor" and where is None:
            is_there = device.holds(args[0])
        if is_there and name in ("tensor", "as_tensor", "asarray", "new_tensor"):  # of the host's values
            with plainly():
                return device.upload(func(*args, **kwargs), None, False)
        before, self.operations.creates_there = self.operations.creates_there, is_there
        try:
            return func(*args, **kwargs)
        finally:
            self.operations.creates_there = before

    def _where(self, tensor: torch.Tensor) -> torch.device:
        return CUDA if self.device.holds(tensor) else tensor.device

    def _attribute(self, getter: Any, tensor: torch.Tensor) -> Any:
        attribute = getter.__self__
        if attribute is torch.Tensor.device:
            return self._where(tensor)
        if attribute in (torch.Tensor.is_cuda, torch.Tensor.is_cpu):
            return self._where(tensor).type == attribute.__name__.removeprefix("is_")
        return getter(tensor)

    def _moved(self, name: str, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        is_there, copies = self.device.holds(tensor), kwargs.pop("copy", False)
        where: torch.device | None
        dtype, non_blocking = None, kwargs.get("non_blocking", False)
        if name != "to":
            where = torch.device(name)
        elif args and isinstance(args[0], torch.Tensor):
            where, dtype = self._where(args[0]), args[0].dtype
        else:
            where, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if where is None or (where.type == "cuda") == is_there:
            stays = where is None or is_there
            return torch.Tensor.to(tensor, None if stays else where, dtype=dtype or tensor.dtype, copy=copies)
        move = self.device.download if is_there else self.device.upload
        with plainly():
            return move(tensor, dtype, non_blocking)


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Those of an operation, and of its lists: nothing lies deeper."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [own for own in value if isinstance(own, torch.Tensor)]
    return found


def _refuse_unsteady(name: str, values: Any) -> None:
    """Numbers that a text hangs on must not depend on the rows beside theirs."""
    if name == "_softmax" and values.shape[-1] * values.itemsize % 16:
        raise RuntimeError(f"a GPU's softmax of rows of {values.shape[-1]} goes by where each of them begins")
    if name in UNSTEADY and values.is_floating_point() and values.shape[-1] > 1:
        raise RuntimeError(f"a GPU's {name} of {list(values.shape)} goes by the number of rows")


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Does what is done on the device, or records it, and refuses what a device refuses."""

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__()
        self.device = device
        self.creates_there: bool | None = None  # None: where the operands are

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs, device = func.overloadpacket.__name__, kwargs or {}, self.device
        operands = _tensors((*args, *kwargs.values()))
        there = [device.holds(operand) for operand in operands]
        if name == "copy_" and there[0] != there[1]:
            return self._copied(*args, **kwargs)
        if any(there):
            allowed = {id(own) for own in operands if own.dim() == 0}
            if name in INDEXING and there[0]:
                allowed |= {id(index) for index in args[1]}
            if not all(is_there or id(own) in allowed for own, is_there in zip(operands, there, strict=True)):
                shapes = ", ".join(f"{list(own.shape)} {own.device}" for own in operands)
                raise RuntimeError(f"Expected all tensors to be on the same device: {func} of {shapes}")
            self._refuse_waiting(name, args, kwargs)
            _refuse_unsteady(name, args[0])
        if not (any(there) if self.creates_there is None else self.creates_there):
            return func(*args, **kwargs)
        if device.recording is None:
            results = func(*args, **kwargs)
            for result in _tensors(results if isinstance(results, list | tuple) else (results,)):
                self._put(name, result)
            return results
        if func._can_decompose():  # reshape and its like: views, or copies, as it comes
            with self:
                return func.decompose(*args, **kwargs)
        return _recorded(device.recording, func, name, args, kwargs)

    def _put(self, name: str, result: torch.Tensor) -> None:
        if not self.device.holds(result):
            self.device.put(fill_with_garbage(result) if name in UNWRITTEN else result)

    def _refuse_waiting(self, name: str, args: Any, kwargs: Any) -> None:
        if name in WAITING:
            self.device.wait(name)
        if name in INDEXING:
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype in (torch.bool, torch.uint8) or not self.device.holds(index) for index in indices):
                self.device.wait("indexing by a mask, or by numbers of the host")
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            self.device.wait("repeat_interleave without output_size")

    def _copied(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        device = self.device
        device.refuse_capture("a copy between host and device")
        if not non_blocking or not device.is_pinned(target if device.holds(source) else source):
            device.wait("a copy between host and device")
        return target.copy_(source)


def _recorded(recording: Recording, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """What an operation gives to a capture: memory that nobody has written yet."""
    schema = func._schema
    written = [
        kwargs[argument.name] if argument.name in kwargs else args[place]
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if written:
        recording.add(func, args, kwargs)
        return None if not schema.returns else written[0] if len(schema.returns) == 1 else tuple(written)
    if any(result.alias_info is not None for result in schema.returns):
        return func(*args, **kwargs)  # a view, which the device has no part in
    on_meta = {**tree_map(_without_data, kwargs), **({"device": "meta"} if "device" in kwargs else {})}
    shapes = func(*tree_map(_without_data, args), **on_meta)
    made = tree_map(lambda own: recording.allocate(own) if isinstance(own, torch.Tensor) else own, shapes)
    if name not in UNWRITTEN:
        recording.add(_computed_into, (func, args, kwargs, made), {})
    return made


def _without_data(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _computed_into(func: Callable[..., Any], args: Any, kwargs: Any, targets: Any) -> None:
    for target, value in zip(tree_flatten(targets)[0], tree_flatten(func(*args, **kwargs))[0], strict=True):
        target.copy_(value)
