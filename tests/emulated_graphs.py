"""What a CUDA graph of an emulated GPU holds (tests/emulated_cuda.py): work, and the memory that it works on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map

from tests.emulated_device import EmulatedDevice, fill_with_garbage, plainly, storage_of


@dataclass(frozen=True)
class Outside:
    """An operand whose memory was there before the capture; the graph does not keep it."""

    mark: StorageWeakRef
    dtype: torch.dtype
    place: tuple[Any, ...]  # offset, size, stride

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Outside:
        place = (tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride()))
        return cls(StorageWeakRef(tensor.untyped_storage()), tensor.dtype, place)

    def found(self) -> torch.Tensor:
        if self.mark.expired():
            raise RuntimeError("the graph reads memory that was freed since it was captured")
        return torch.empty(0, dtype=self.dtype).set_(storage_of(self.mark), *self.place)


@dataclass(eq=False)
class Recording:
    """Operations and launches in their order, which a replay repeats with the operands of the capture."""

    device: EmulatedDevice
    pool: object  # of memory
    work: list[tuple[Callable[..., Any], Any, Any]] = field(default_factory=list)
    own: dict[int, torch.Tensor] = field(default_factory=dict)  # one tensor of every storage made by the capture

    def add(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.work.append((function, tree_map(self._kept, args), tree_map(self._kept, kwargs)))

    def allocate(self, shape: torch.Tensor) -> torch.Tensor:
        """shape: on the meta device."""
        made = torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype)
        self.own[made.untyped_storage()._cdata] = made
        return self.device.put(fill_with_garbage(made))

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.untyped_storage()._cdata in self.own:
            return value
        return Outside.of(value) if self.device.holds(value) else value.clone()  # a number of the host's

    def replay(self) -> None:
        def found(value: Any) -> Any:
            return value.found() if isinstance(value, Outside) else value

        with plainly(), torch.inference_mode():
            for recording in self.device.recordings:  # those of one pool use each other's memory
                for tensor in recording.own.values() if recording.pool is self.pool else ():
                    fill_with_garbage(tensor)
            for function, args, kwargs in self.work:
                function(*tree_map(found, args), **tree_map(found, kwargs))
