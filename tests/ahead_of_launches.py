"""Compiles ahead for a GPU of compute capability 9.0 that is not there: launches are asked for, none can be made.

    python -m tests.ahead_of_launches 1 2 4

says how long the products of Llama-3-8B's layers and head take, in every kind of program that a start asks about, by so
many threads, each time with an empty cache. Without numbers it says as JSON what tests/test_compile_ahead.py claims. A
process of its own: Triton's interpreter must not be on.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kernels.kernel import Kernel, compile_ahead
from kernels.linear import gated_linear, linear, linear_in_parts, linear_kernel
from kernels.linear_plan import rows_of_each_kind

SMALL = [(64, 64), (64, 128), (128, 64)]  # out_features, in_features


@Kernel
@triton.jit
def broken_kernel(out_ptr):  # type: ignore[no-untyped-def]
    tl.static_assert(False, "no program")


def ask_for(shapes: list[tuple[int, int]], product: Callable[[torch.Tensor, torch.Tensor], Any] = linear) -> None:
    """For products in every kind of program; no number is ever read, so memory for them is not taken."""
    gated = product is gated_linear
    for out_features, in_features in shapes:
        weight = torch.empty((1 + gated) * out_features, in_features, dtype=torch.bfloat16)
        for num_rows in rows_of_each_kind(out_features, in_features, element_size=2, gated=gated):
            product(torch.empty(num_rows, in_features, dtype=torch.bfloat16), weight)


def ask_for_llama() -> None:
    """As an 8B engine's start does: qkv, o and down in parts, gate and up, and the head."""
    ask_for([(6144, 4096), (4096, 4096), (4096, 14336)], linear_in_parts)
    ask_for([(14336, 4096)], gated_linear)
    ask_for([(128256, 4096)])


@contextmanager
def empty_cache() -> Iterator[None]:
    """In memory and on disk."""
    # A thread that an interrupt has left behind may still write.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory, knobs.cache.scope():
        knobs.cache.dir = directory
        for kernel in (broken_kernel, linear_kernel):
            kernel.fn.device_caches.clear()
        yield


class Compilations:
    """Those that Triton tells of, by the thread that makes them."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def __call__(self, **_: Any) -> None:
        self.threads.append(threading.current_thread().name)


def seconds(num_threads: int) -> float:
    with empty_cache():
        began = time.perf_counter()
        compile_ahead(ask_for_llama, num_threads=num_threads)
        return time.perf_counter() - began


def raised(work: Callable[[], None], **options: Any) -> str:
    try:
        compile_ahead(work, **options)
    except BaseException as error:
        return type(error).__name__
    return ""


def held() -> list[str]:
    """What the products' kernel has in memory for its launches."""
    caches = linear_kernel.fn.device_caches.values()
    return [type(program).__name__ for programs, *_ in caches for program in programs.values()]


def ask_for_broken() -> None:
    broken_kernel[(1,)](torch.empty(1))


def interrupted() -> None:
    ask_for(SMALL)
    raise KeyboardInterrupt


def launched() -> str:
    """What comes of a launch, where there is no GPU."""
    try:
        linear(*(torch.empty(64, 64, dtype=torch.bfloat16) for _ in range(2)))
    except AttributeError as error:
        return str(error)
    return ""


def claims() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with empty_cache(), knobs.compilation.scope():
        knobs.compilation.listener = first = Compilations()
        compile_ahead(lambda: ask_for(SMALL), num_threads=2)
        found["first"] = {"threads": sorted(set(first.threads)), "count": len(first.threads), "held": held()}
        knobs.compilation.listener = again = Compilations()
        compile_ahead(lambda: ask_for(SMALL))
        found["again"] = {"count": len(again.threads), "held": held()}
        found["launched"] = launched()
    with empty_cache():
        found["broken"] = [raised(ask_for_broken), raised(ask_for_broken)]
    with empty_cache(), knobs.compilation.scope():
        under_way = threading.Event()
        knobs.compilation.listener = lambda **_: under_way.wait()
        found["interrupted"] = {"raised": raised(interrupted, num_threads=1), "held": held()}
        under_way.set()
        compile_ahead(lambda: ask_for(SMALL))
        found["mended"] = {"held": held()}
    return found


if __name__ == "__main__":
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
        )
    )
    numbers = [int(argument) for argument in sys.argv[1:]]
    for num_threads in numbers:
        print(f"{num_threads} threads: {seconds(num_threads):.1f} s, {len(held())} programs")
    if not numbers:
        json.dump(claims(), sys.stdout)
