"""Rows times a function of others: kernels against the definition in float64, and rows on their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.act_and_mul import act_and_mul as act_and_mul_on_cpu
from kernels.cpu.gate import gate as on_cpu
from kernels.reference.gate import GateFunction
from kernels.reference.gate import gate as reference
from tests.seeded import randn
from tests.test_rms_norm_kernel import assert_error_is_the_definitions

triton_ops = pytest.importorskip("kernels.gate")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
Op = Callable[[Tensor, Tensor, GateFunction], Tensor]
EXACT: Mapping[GateFunction, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softplus": lambda x: torch.logaddexp(x, x.new_zeros(())),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "identity": lambda x: x,
}


@pytest.fixture(params=["reference", "on a CPU", "Triton"])
def op_and_device(request: pytest.FixtureRequest, kernel_device: torch.device) -> tuple[Op, torch.device]:
    if request.param == "Triton":
        return triton_ops.gate, kernel_device
    return (reference if request.param == "reference" else on_cpu), torch.device("cpu")


def rows_and_gates(dtype: torch.dtype, device: torch.device, width: int) -> tuple[Tensor, Tensor]:
    """Rows of 100 that lie 500 apart, and what gates them."""
    x, by = randn(9, 500, dtype=dtype, seed=0), randn(9, width, dtype=dtype, seed=1)
    return x.to(device)[:, 200:300], 3 * by.to(device)


@pytest.mark.parametrize("function", EXACT)
@pytest.mark.parametrize("width", [100, 4, 1], ids=["a gate each", "one gate a head", "one gate a row"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_gated_with_one_rounding_and_each_on_its_own(
    op_and_device: tuple[Op, torch.device], dtype: torch.dtype, width: int, function: GateFunction
) -> None:
    op, device = op_and_device
    if dtype == torch.bfloat16 and op is triton_ops.gate and device.type == "cpu":
        pytest.skip("Triton's interpreter knows no bfloat16")
    x, by = rows_and_gates(dtype, device, width)
    found, exact = op(x, by, function), x.double() * EXACT[function](by.double()).repeat_interleave(100 // width, dim=1)
    assert_error_is_the_definitions(found, reference(x, by, function).cpu(), exact.cpu())
    assert torch.equal(found, op(x.float(), by.float(), function).to(dtype))
    if by.dtype != torch.float32:
        assert torch.equal(op(x, by.float(), function), found), "factors may have more digits"
    if op is reference and function in ("sigmoid", "softplus"):
        return  # torch's own, with other bits where a tensor ends
    for row in range(len(x)):
        assert torch.equal(op(x[row : row + 1], by[row : row + 1], function)[0], found[row])
    assert torch.equal(op(x.contiguous(), by, function), found), "wherever rows lie"


@pytest.mark.parametrize("op", [reference, on_cpu], ids=["reference", "on a CPU"])
@pytest.mark.parametrize("function", EXACT)
def test_great_gates_let_through_all_or_nothing(op: Op, function: GateFunction) -> None:
    by = torch.tensor([[0.0, -0.0, 90.0, -90.0, 1e20, -1e20]])
    found, exact = op(torch.full((1, 6), 2.0), by, function), 2 * EXACT[function](by.double())
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(torch.float32).eps, atol=1e-16)


def test_a_gelu_of_rows_is_that_of_an_mlp(kernel_device: torch.device) -> None:
    x, by = rows_and_gates(torch.float32, torch.device("cpu"), 100)
    expected = act_and_mul_on_cpu(torch.cat((by, x), dim=1), "gelu_tanh")
    assert torch.equal(on_cpu(x, by, "gelu_tanh"), expected)
    found = triton_ops.gate(x.to(kernel_device), by.to(kernel_device), "gelu_tanh")
    assert_error_is_the_definitions(found, expected, x.double() * EXACT["gelu_tanh"](by.double()))


def test_no_rows_give_no_rows(op_and_device: tuple[Op, torch.device]) -> None:
    op, device = op_and_device
    for function in EXACT:
        assert op(torch.ones(0, 8, device=device), torch.ones(0, 8, device=device), function).shape == (0, 8)
