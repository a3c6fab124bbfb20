"""The memory of an emulated GPU, and its stream (tests/emulated_cuda.py)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from tests.emulated_graphs import Recording

TOTAL_BYTES = 4 << 30


class EmulatedDevice:
    """Marks the storages that are its memory; what is queued on its stream is done at once.

    But for copies to the host, which are done when they have been waited for, so that reading them before shows.
    """

    def __init__(self) -> None:
        # A weak reference keeps a storage's identity from being given to another one.
        self._marks: dict[int, StorageWeakRef] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        self.allocated = self.peak = self._num_puts = 0  # bytes, and how often something was put
        self._downloads: list[tuple[torch.Tensor, torch.Tensor]] = []  # (to, values), in the stream's order
        self._num_delivered = 0
        self.recording: Recording | None = None  # what a capture under way has recorded
        self.recordings: WeakSet[Recording] = WeakSet()
        self.forbids_waiting = False
        self.variants: set[Hashable] = set()  # of kernels, as they were compiled
        self.ahead: set[Hashable] = set()  # of these, what was not launched to be compiled
        self.graph_sizes: list[int] = []  # operations and launches of each captured graph
        self.num_replays = 0

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._marks

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._marks:
            self._marks[storage._cdata] = StorageWeakRef(storage)
            self.allocated += storage.nbytes()
            self._num_puts += 1
            if self._num_puts % 64 == 0:
                self.count_allocated()
            self.peak = max(self.peak, self.allocated)
        return tensor

    def count_allocated(self) -> int:
        for marks in (self._marks, self._pinned):
            for key in [key for key, mark in marks.items() if mark.expired()]:
                del marks[key]
        self.allocated = sum(storage_of(mark).nbytes() for mark in self._marks.values())
        return self.allocated

    def reset_peak(self) -> None:
        self.peak = self.count_allocated()

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    def download(self, tensor: torch.Tensor, dtype: torch.dtype | None, non_blocking: bool) -> torch.Tensor:
        values = tensor.detach().clone().to(dtype or tensor.dtype)
        if not non_blocking:
            self.wait("a copy to the host")
            return values
        self.refuse_capture("a copy to the host")
        held = self.pin(fill_with_garbage(torch.empty_like(values)))
        self._downloads.append((held, values))
        return held

    def upload(self, tensor: torch.Tensor, dtype: torch.dtype | None, non_blocking: bool) -> torch.Tensor:
        self.refuse_capture("a copy from the host")  # a replay would take the values of the capture
        if not (non_blocking and self.is_pinned(tensor)):
            self.wait("a copy from the host")
        return self.put(tensor.detach().clone().to(dtype or tensor.dtype))

    def wait(self, why: str) -> None:
        """The host waits for all that is queued."""
        self.refuse_capture(why)
        if self.forbids_waiting:
            raise RuntimeError(f"called a synchronizing CUDA operation: {why}")
        self.deliver(self.num_queued)

    def refuse_capture(self, what: str) -> None:
        if self.recording is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")

    @property
    def num_queued(self) -> int:
        """Copies to the host, those that are there included."""
        return self._num_delivered + len(self._downloads)

    def deliver(self, end: int) -> None:
        """The stream's first `end` copies to the host."""
        while self._downloads and self._num_delivered < end:
            held, values = self._downloads.pop(0)
            with plainly(), torch.inference_mode():
                held.copy_(values)
            self._num_delivered += 1


def fill_with_garbage(tensor: torch.Tensor) -> torch.Tensor:
    """What memory holds that nobody wrote."""
    if tensor.dtype.is_floating_point:
        return tensor.fill_(float("nan"))
    return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max // 3)


def storage_of(mark: StorageWeakRef) -> torch.UntypedStorage:
    storage: torch.UntypedStorage = torch.UntypedStorage._new_with_weak_ptr(mark.cdata)
    return storage


@contextmanager
def plainly() -> Iterator[None]:
    """Operations are what they are without an emulated device."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield
