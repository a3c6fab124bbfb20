"""Products of rows that are sorted by expert with their experts' weights, from panels.

Each is the product that kernels/cpu/linear.py, or linear_amx.py, makes of an expert's rows, bit for bit: its kernel is
called panel by panel. Which experts have rows, and how many, is read inside, and threads share what there is to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from kernels.cpu import linear, linear_amx
from kernels.cpu.act_and_mul import act_and_mul
from kernels.cpu.float_kinds import TURN_ROWS
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import call, integers
from kernels.cpu.number_kinds import KINDS
from kernels.cpu.panels import Panels
from kernels.cpu.recording import empty
from kernels.cpu.rows import take_rows
from kernels.cpu.threads import parts_of
from kernels.reference.act_and_mul import Activation
from kernels.reference.experts import Routing

MORE = (
    *("kernel", "kernel_of_many", "addresses", "starts", "calls"),
    *("many_rows", "num_experts", "x_bytes", "out_bytes", "bias_bytes", "thread_bytes"),  # thread_bytes: of room
)


@cache
def experts_multiplying(names: tuple[str, ...]) -> Kernel:
    """names: of what the kernel of one product takes, which this one takes first."""
    fields, own = arguments_of(*names, *MORE), {name: index for index, name in enumerate(names)}
    count = len(names)
    out, bias, x, panels, room, num_rows = (own[name] for name in ("out", "bias", "x", "panels", "room", "num_rows"))
    scales, block_scales = own.get("scales", -1), own.get("block_scales", -1)  # of quantized weights

    def multiply(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, fields)[0]
        given = carray(arguments, count, np.int64)
        starts, addresses = integers(a.starts, a.num_experts + 1), integers(a.addresses, 3 * a.num_experts)
        own_call = a.calls + 8 * count * thread
        taken = integers(own_call, count)
        for index in range(count):
            taken[index] = given[index]
        # A kernel finds a thread's room by its own number of rows, and experts have unlike ones.
        taken[room] = given[room] + a.thread_bytes * thread
        busy = 0  # experts with rows, each of which has num_panels panels to be gone over
        for expert in range(a.num_experts):
            busy += starts[expert + 1] > starts[expert]
        first, end = busy * a.num_panels * part // num_parts, busy * a.num_panels * (part + 1) // num_parts
        before = 0  # panels of the experts that came by
        for expert in range(a.num_experts):
            rows = starts[expert + 1] - starts[expert]
            if rows == 0:
                continue
            taken[out], taken[x] = given[out] + starts[expert] * a.out_bytes, given[x] + starts[expert] * a.x_bytes
            taken[panels], taken[num_rows] = addresses[3 * expert], rows
            taken[bias] = given[bias] + expert * a.bias_bytes  # without biases 0
            if scales >= 0:
                taken[scales], taken[block_scales] = addresses[3 * expert + 1], addresses[3 * expert + 2]
            kernel = a.kernel if rows < a.many_rows else a.kernel_of_many
            for panel in range(max(first - before, 0), min(end - before, a.num_panels)):
                call(kernel, own_call, (panel, a.num_panels, 0))
            before += a.num_panels

    return Kernel(multiply, fields)


class PanelsOfExperts(tuple[Panels, ...]):
    """The weights of one product, of each expert, all of one layout; to be kept as long as a recorded step may run."""

    addresses: Tensor  # [num_experts, 3] int64: where each weight's numbers lie, its scales, and its block scales

    def __new__(cls, weights: Iterable[Panels]) -> PanelsOfExperts:
        own = super().__new__(cls, weights)
        assert len({(weight.numbers.shape, weight.kind, weight.has_zeros, weight.group_size) for weight in own}) == 1
        found = [(weight.numbers.data_ptr(), *linear.addresses_of_scales(weight)) for weight in own]
        with _disable_current_modes():  # it is no part of a step that is recorded
            own.addresses = torch.tensor(found, dtype=torch.int64)
        return own


def linear_of_experts(x: Tensor, weights: PanelsOfExperts, routing: Routing, biases: Tensor | None = None) -> Tensor:
    """[num_places, in_features], and of each expert [out_features, in_features] -> [num_places, out_features].

    biases: [num_experts, out_features], in the dtype of x.
    """
    return linear_of_sorted(x, weights, routing.starts, biases, most_rows=len(routing.places))  # once to an expert


def linear_of_sorted(
    x: Tensor,  # [num_places, in_features]
    weights: PanelsOfExperts,
    starts: Tensor,  # [num_experts + 1] int64: the first place of each expert, and how many there are
    biases: Tensor | None = None,
    *,
    most_rows: int,  # that an expert may have
) -> Tensor:  # [num_places, out_features]
    """linear_of_experts, of rows wherever they come from."""
    weight = weights[0]
    out_features, in_features = weight.shape
    assert x.dtype == weight.dtype and x.shape[1] == in_features
    assert biases is None or (biases.dtype == x.dtype and biases.is_contiguous())
    assert biases is None or biases.shape == (len(weights), out_features)
    num_places = len(x)
    out = empty(num_places, out_features, dtype=x.dtype)
    if linear_amx.multiplies_tiles(weight):
        rows, room, names = x.contiguous(), linear_amx.room_of(weight), linear_amx.Arguments.names
        arguments = linear_amx.arguments_for(rows, weight, biases, out, room)
        kernels, many_rows = [linear_amx.kernel_of(weight)] * 2, 0
    else:
        kind = linear.kind_of_panels(weight)
        many_rows = KINDS[kind].widens_from
        widens = most_rows >= many_rows  # some expert may have as many
        rows, room = linear.readable(x, weight), linear.room_of(weight, most_rows, widens=widens)
        names, arguments = linear.Arguments.names, linear.arguments_for(rows, weight, biases, out, room)
        kernels = [linear.kernel_of(weight, kind, widens=own) for own in (False, widens)]
    assert names is not None
    calls = empty(torch.get_num_threads() * len(names), dtype=torch.int64)
    num_panels, busy = len(weight.numbers), min(len(weights), num_places)  # experts with rows, at most
    work = (num_places + TURN_ROWS * busy) * out_features * in_features
    experts_multiplying(names)(
        *arguments,
        *(kernel.address for kernel in kernels),
        *(weights.addresses.data_ptr(), starts.data_ptr(), calls.data_ptr()),
        *(many_rows, len(weights), rows.stride(0) * rows.element_size(), out_features * out.element_size()),
        0 if biases is None else out_features * biases.element_size(),
        room.nbytes // torch.get_num_threads(),
        parts=parts_of(work, linear.PART_WORK, max(busy * num_panels, 1)),
    )
    return out


def gated_linear_of_experts(
    x: Tensor,
    weights: PanelsOfExperts,
    routing: Routing,
    biases: Tensor | None = None,
    activation: Activation = "silu",
) -> Tensor:
    """[num_rows, in_features], and of each expert [2 * intermediate, in_features] -> [num_places, intermediate].

    biases: [num_experts, 2 * intermediate].
    """
    return act_and_mul(linear_of_experts(take_rows(x, routing.rows), weights, routing, biases), activation)
