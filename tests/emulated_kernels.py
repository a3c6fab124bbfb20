"""Launches on an emulated GPU (tests/emulated_cuda.py): kernels are interpreted, and counted as if compiled."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

from tests.emulated_device import EmulatedDevice, plainly

ALIGNED_TO = 16  # bytes of an address, or what divides a number: Triton compiles variants for those that are


def launcher(device: EmulatedDevice, run: Callable[..., None]) -> Callable[..., None]:
    """What InterpretedFunction.run is on the device."""

    def launched(kernel: InterpretedFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        for name, value in _arguments(kernel, args, kwargs).items():
            if isinstance(value, torch.Tensor) and not device.holds(value):
                raise ValueError(f"Pointer argument {name} of {kernel.__name__} cannot be accessed (cpu tensor?)")
        variant = _variant(kernel, args, kwargs)
        if warmup:  # compiled ahead
            device.refuse_capture("a compilation")
            device.variants.add(variant)
            device.ahead.add(variant)
            return
        if device.recording is None:
            device.variants.add(variant)
            with plainly():
                run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
            return
        if variant not in device.variants:
            raise RuntimeError(f"{kernel.__name__} would be compiled while capturing, in the variant {variant}")
        device.recording.add(run, (kernel, *args), {"grid": grid, "warmup": warmup, **kwargs})

    return launched


def dot_in_any_company(
    builder: InterpreterBuilder, a: TensorHandle, b: TensorHandle, sums: TensorHandle, *_: Any
) -> TensorHandle:
    """What InterpreterBuilder.create_dot is on the device: a row's bits do not depend on the tile's other rows.

    The interpreter's own products are a BLAS's, whose order of summation follows from the shape. In float64 no order
    moves a sum across the border between two float32 numbers, but for chances of one in many millions.
    """
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
    return TensorHandle(product.astype(sums.data.dtype) + sums.data, sums.dtype.scalar)


def _arguments(kernel: InterpretedFunction[Any], args: Any, kwargs: Any) -> dict[str, Any]:
    return {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}


def _variant(kernel: InterpretedFunction[Any], args: Any, kwargs: Any) -> Hashable:
    """What Triton's JITFunction compiles anew for: constants, types, and what it specialises on."""
    general, any_alignment = (
        kernel.kwargs.get(option) or () for option in ("do_not_specialize", "do_not_specialize_on_alignment")
    )
    annotations = kernel.fn.__annotations__
    kinds: list[Hashable] = [kernel.fn]
    for name, value in _arguments(kernel, args, kwargs).items():
        if isinstance(value, torch.Tensor):
            is_aligned = name not in any_alignment and value.data_ptr() % ALIGNED_TO == 0
            kinds.append((name, value.dtype, is_aligned))
        elif "constexpr" in str(annotations.get(name)):
            kinds.append((name, type(value), value))
        elif _is_constant(value) or name not in kernel.arg_names:
            kinds.append((name, type(value), value if not isinstance(value, float) else None))
        elif name not in general:
            kinds.append((name, value == 1, value % ALIGNED_TO == 0, value >= 2**31))
        else:
            kinds.append((name, value >= 2**31))
    return tuple(kinds)


def _is_constant(value: Any) -> bool:
    return isinstance(value, bool) or not isinstance(value, int)
