"""Short convolutions within each request's rows: kernels against the definition in float64, and rows on their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu.block_conv import block_conv as on_cpu
from kernels.recurrent_segments import RecurrentSegments
from kernels.reference.block_conv import block_conv as reference
from kernels.reference.partial_sums import PartialSums
from tests.seeded import randn
from tests.test_rms_norm_kernel import assert_error_is_the_definitions

triton_ops = pytest.importorskip("kernels.block_conv")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
Op = Callable[[Any, Tensor, Tensor, RecurrentSegments], Tensor]
COUNTS = (4, 1, 3, 70, 2)  # rows of each request
NUM_ROWS = sum(COUNTS)


@pytest.fixture(params=["reference", "on a CPU", "Triton"])
def op_and_device(request: pytest.FixtureRequest, kernel_device: torch.device) -> tuple[Op, torch.device]:
    if request.param == "Triton":
        return triton_ops.block_conv, kernel_device
    return (reference if request.param == "reference" else on_cpu), torch.device("cpu")


def segments_of(counts: tuple[int, ...], device: torch.device | str) -> RecurrentSegments:
    """As a launch in parts has them: those behind the last, and the rows of nobody, begin where it ends."""
    first_rows = [sum(counts[:index]) for index in range(len(counts))] + [sum(counts)] * 90
    numbers = torch.tensor(first_rows, device=device)
    return RecurrentSegments(starts=numbers, ends=numbers, slots=numbers, first_rows=numbers, counts=numbers)


def exact_conv(x: Tensor, deltas: Tensor, base: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Number by number, in float64."""
    x, deltas, base = x.double(), deltas.double(), base.double()
    taps, width = base.shape
    own = deltas.reshape(len(x), taps, -1)
    own = own.repeat_interleave(width // own.shape[2], dim=2)
    out, row = torch.zeros_like(x), 0
    for count in counts:
        for place in range(count):
            for tap in range(min(taps, place + 1)):
                out[row] += (base[tap] + own[row, tap]) * x[row - tap]
            row += 1
    return out


@pytest.mark.parametrize(("taps", "width", "group"), [(2, 70, 10), (3, 600, 1), (1, 16, 16)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_see_those_before_them_within_their_own_request(
    op_and_device: tuple[Op, torch.device], dtype: torch.dtype, taps: int, width: int, group: int
) -> None:
    op, device = op_and_device
    if dtype == torch.bfloat16 and op is triton_ops.block_conv and device.type == "cpu":
        pytest.skip("Triton's interpreter knows no bfloat16")
    x, base = randn(NUM_ROWS, width, dtype=dtype, seed=0), randn(taps, width, dtype=dtype, seed=1)
    both = randn(NUM_ROWS, 2 * taps * width // group, dtype=dtype, seed=2)  # rows that lie further apart
    deltas = both[:, both.shape[1] // 2 :]
    x[4] = float("nan")  # no other request sees it
    there = x.to(device), both.to(device)[:, both.shape[1] // 2 :], base.to(device)
    found = op(*there, segments_of(COUNTS, device)).cpu()
    alone = torch.arange(NUM_ROWS) == 4
    assert found[alone].isnan().all()
    exact = exact_conv(x, deltas, base, COUNTS)[~alone]
    by_reference = reference(x, deltas, base, segments_of(COUNTS, "cpu"))[~alone]
    assert_error_is_the_definitions(found[~alone], by_reference, exact)
    for first, count in ((5, 3), (78, 2)):  # each by itself, said the other way
        own = slice(first, first + count)
        each = RecurrentSegments(**dict.fromkeys(("starts", "ends", "slots"), torch.zeros(1)), num_rows=count)
        assert torch.equal(op(*(part[own] for part in there[:2]), there[2], each).cpu(), found[own])


def test_a_product_s_partial_sums_are_added_up_first(kernel_device: torch.device) -> None:
    parts, bias = randn(3, 5, 70, dtype=torch.float32, seed=0), randn(70, dtype=torch.float16, seed=1)
    deltas, base = (randn(rows, 140 // rows * rows, dtype=torch.float16, seed=2) for rows in (5, 1))
    base = base.view(2, 70)
    rows = PartialSums(parts=parts.to(kernel_device), scales=None, bias=bias.to(kernel_device), dtype=torch.float16)
    arguments = (deltas[:, :20].to(kernel_device), base.to(kernel_device), segments_of((2, 3), kernel_device))
    found = triton_ops.block_conv(rows, *arguments)
    assert torch.equal(found, triton_ops.block_conv(rows.total(), *arguments))


def test_no_rows_give_no_rows(op_and_device: tuple[Op, torch.device]) -> None:
    op, device = op_and_device
    nothing, base = torch.ones(0, 8, device=device), torch.ones(2, 8, device=device)
    assert op(nothing, torch.ones(0, 4, device=device), base, segments_of((), device)).shape == (0, 8)
