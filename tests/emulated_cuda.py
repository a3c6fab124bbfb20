"""A CUDA device emulated on the CPU, so that the engine's GPU path runs where there is no GPU.

Its tensors are ordinary tensors whose storages are marked, so Triton's interpreter takes them as they are. On top of
that it holds what code that was written on a CPU gets wrong without noticing:

- tensors of host and device do not mix, and a kernel takes the device's alone;
- a capture computes nothing, and a replay repeats what was captured, on the same memory and with the same numbers,
  whatever Python holds by then;
- what waits for the device, and every copy between it and the host, is an error while capturing, and on request
  (torch.cuda.set_sync_debug_mode) at any time;
- kernels are not compiled while capturing: every variant that Triton would compile has been launched before;
- memory that nobody wrote holds NaN or absurd numbers, that of a pool's graphs again at every replay of one of them;
- a graph whose inputs are gone fails, instead of reading what took their place;
- a copy to the host is there when its event has been waited for, and not before.

A row's bits are its own where the kernels' tiles, cuts and orders make them so, as interpreted products have none of
their own (tests/emulated_kernels.py). What it cannot tell: what compiled kernels compute, how long they take, and
whether they race.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

import kernels.last_to_arrive
import runner.engine.download
import runner.engine.memory
from tests.emulated_device import TOTAL_BYTES, EmulatedDevice
from tests.emulated_graphs import Recording
from tests.emulated_kernels import dot_in_any_company, launcher
from tests.emulated_operations import Functions, Operations


@contextmanager
def emulated_cuda() -> Iterator[EmulatedDevice]:
    """There is a GPU in this context: one before Hopper, as launches that overlap cannot be interpreted."""
    device = EmulatedDevice()
    operations = Operations(device)
    kernels.last_to_arrive._counters.cache_clear()  # another device had them
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**_functions(device), **_classes(device)}.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(runner.engine.download, "Event", torch.cuda.Event)
        # Its memory is large enough for what nobody refers to; to look for that takes a quarter of a second here.
        patch.setattr(runner.engine.memory, "gc", SimpleNamespace(collect=lambda: 0))
        patch.setattr(torch, "Generator", _Generator)
        patch.setattr(InterpretedFunction, "run", launcher(device, InterpretedFunction.run))
        patch.setattr(InterpreterBuilder, "create_dot", dot_in_any_company)
        with operations, Functions(device, operations):
            yield device


def _functions(device: EmulatedDevice) -> dict[str, Callable[..., Any]]:
    def set_sync_debug_mode(mode: str) -> None:
        device.forbids_waiting = mode == "error"

    properties = SimpleNamespace(total_memory=TOTAL_BYTES, L2_cache_size=1 << 20, shared_memory_per_block_optin=166912)
    return {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (8, 0),
        "get_device_name": lambda device=None: "an emulated GPU",
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda _=None: (TOTAL_BYTES - device.count_allocated(), TOTAL_BYTES),
        "memory_allocated": lambda _=None: device.count_allocated(),
        "max_memory_allocated": lambda _=None: device.peak,
        "reset_peak_memory_stats": lambda _=None: device.reset_peak(),
        "empty_cache": lambda: None,
        "synchronize": lambda _=None: device.wait("synchronize"),
        "set_sync_debug_mode": set_sync_debug_mode,
        "graph_pool_handle": object,
    }


def _classes(device: EmulatedDevice) -> dict[str, Any]:
    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self._end, self._seconds = 0, 0.0

        def record(self) -> None:
            self._end, self._seconds = device.num_queued, time.perf_counter()

        def synchronize(self) -> None:
            device.refuse_capture("an event is waited for")
            device.deliver(self._end)

        def elapsed_time(self, end: Event) -> float:
            return 1000 * (end._seconds - self._seconds)

    class CUDAGraph:
        recording: Recording | None = None

        def replay(self) -> None:
            assert self.recording is not None
            device.refuse_capture("a replay")
            device.num_replays += 1
            self.recording.replay()

    @contextmanager
    def graph(captured: CUDAGraph, pool: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
        device.wait("a capture begins")
        captured.recording = device.recording = Recording(device, pool)
        device.recordings.add(captured.recording)
        try:
            yield
        finally:
            device.recording = None
        device.graph_sizes.append(len(captured.recording.work))

    return {"Event": Event, "CUDAGraph": CUDAGraph, "graph": graph}


class _Generator(torch.Generator):
    """On the host, whatever device it is for."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, device="cpu")

    def __init__(self, device: Any = "cpu") -> None:
        pass
