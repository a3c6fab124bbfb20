"""The norm kernel against its definition: the same residual, an error no larger, each row on its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.reference import rms_norm as reference

kernel = pytest.importorskip("kernels.rms_norm")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_error_is_the_definitions(out: Tensor, by_reference: Tensor, exact: Tensor) -> None:
    """At most twice that of the definition in the same dtype, and a rounding of the largest value."""
    largest = exact.abs().max().to(out.dtype)
    ulp = float(torch.nextafter(largest, largest.new_tensor(float("inf"))) - largest)
    error, expected = ((values.double() - exact).abs().max().item() for values in (out.cpu(), by_reference))
    assert out.dtype == by_reference.dtype and out.shape == by_reference.shape and out.is_contiguous()
    assert error <= 2 * expected + ulp


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "eps"), [((3, 64), 1e-6), ((1, 100), 1e-5), ((5, 3, 16), 1e-6), ((2, 1), 0.5)])
def test_a_norm_is_as_near_as_its_definition(
    kernel_device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], eps: float
) -> None:
    if dtype == torch.bfloat16 and kernel_device.type == "cpu":
        pytest.skip("Triton's interpreter knows no bfloat16")
    x, added = normal(*shape, dtype=dtype, seed=0), normal(*shape, dtype=dtype, seed=1)
    weight, epsilon = normal(shape[-1], dtype=dtype, seed=2), torch.tensor(eps)

    def exact(rows: Tensor) -> Tensor:
        wide = rows.double()
        return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()

    x_there, added_there, weight_there, eps_there = (t.to(kernel_device) for t in (x, added, weight, epsilon))
    by_reference = reference.rms_norm(x, weight, epsilon)
    assert_error_is_the_definitions(kernel.rms_norm(x_there, weight_there, eps_there), by_reference, exact(x))
    normed, residual = kernel.add_rms_norm(x_there, added_there, weight_there, eps_there)
    by_reference, wanted_residual = reference.add_rms_norm(x, added, weight, epsilon)
    assert torch.equal(residual.cpu(), wanted_residual)
    assert_error_is_the_definitions(normed, by_reference, exact(wanted_residual))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_keeps_its_bits_among_any_number_of_rows(kernel_device: torch.device, dtype: torch.dtype) -> None:
    rows, added = (normal(33, 100, dtype=dtype, seed=seed).to(kernel_device) for seed in (0, 1))
    weight, eps = normal(100, dtype=dtype, seed=2).to(kernel_device), torch.tensor(1e-6, device=kernel_device)
    alone = [kernel.add_rms_norm(rows[i : i + 1], added[i : i + 1], weight, eps) for i in range(33)]
    for num_rows in (2, 17, 33):
        together = kernel.add_rms_norm(rows[:num_rows], added[:num_rows], weight, eps)
        for of_all, of_each in zip(together, zip(*alone, strict=True), strict=True):
            assert torch.equal(of_all, torch.cat(of_each[:num_rows]))


def test_heads_are_normed_where_they_lie_in_a_fused_projection(kernel_device: torch.device) -> None:
    qkv = normal(3, 6 * 16, dtype=torch.float32, seed=0).to(kernel_device).view(3, 6, 16)
    weight, eps = normal(16, dtype=torch.float32, seed=1).to(kernel_device), torch.tensor(1e-6, device=kernel_device)
    for heads in qkv.split_with_sizes((4, 2), dim=1):
        assert torch.equal(kernel.rms_norm(heads, weight, eps), kernel.rms_norm(heads.contiguous(), weight, eps))


def test_no_rows_give_no_rows(kernel_device: torch.device) -> None:
    nothing, weight = torch.ones(0, 8, device=kernel_device), torch.ones(8, device=kernel_device)
    eps = torch.tensor(1e-6, device=kernel_device)
    assert [len(result) for result in kernel.add_rms_norm(nothing, nothing, weight, eps)] == [0, 0]
