"""The norm kernels against their definition: the same sums, an error no larger, each row on its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.reference import rms_norm as reference
from tests.seeded import randn

kernel = pytest.importorskip("kernels.rms_norm")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def assert_error_is_the_definitions(out: Tensor, by_reference: Tensor, exact: Tensor) -> None:
    """At most twice that of the definition in the same dtype, and a rounding of the largest value."""
    largest = exact.abs().max().to(out.dtype)
    ulp = float(torch.nextafter(largest, largest.new_tensor(float("inf"))) - largest)
    error, expected = ((values.double() - exact).abs().max().item() for values in (out.cpu(), by_reference))
    assert out.dtype == by_reference.dtype and out.shape == by_reference.shape and out.is_contiguous()
    assert error <= 2 * expected + ulp


@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=["weights of their dtype", "of float32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "eps"), [((3, 64), 1e-6), ((1, 100), 1e-5), ((2, 1), 0.5)])
def test_a_norm_is_as_near_as_its_definition(
    kernel_device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    eps: float,
    weight_dtype: torch.dtype | None,
) -> None:
    """And one of what another made of the rows that are added."""
    if dtype == torch.bfloat16 and kernel_device.type == "cpu":
        pytest.skip("Triton's interpreter knows no bfloat16")
    x, added = randn(*shape, dtype=dtype, seed=0), randn(*shape, dtype=dtype, seed=1)
    weight, x_weight = (randn(shape[-1], dtype=weight_dtype or dtype, seed=seed) for seed in (2, 3))
    epsilon = torch.tensor(eps)

    def exact(rows: Tensor) -> Tensor:
        wide = rows.double()
        return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()

    x_there, added_there, weight_there, x_weight_there, eps_there = (
        t.to(kernel_device) for t in (x, added, weight, x_weight, epsilon)
    )
    by_reference = reference.rms_norm(x, weight, epsilon)
    assert_error_is_the_definitions(kernel.rms_norm(x_there, weight_there, eps_there), by_reference, exact(x))
    normed, residual = kernel.add_rms_norm(x_there, added_there, weight_there, eps_there)
    by_reference, wanted_residual = reference.add_rms_norm(x, added, weight, epsilon)
    assert torch.equal(residual.cpu(), wanted_residual)
    assert_error_is_the_definitions(normed, by_reference, exact(wanted_residual))
    for x_eps in (None, torch.tensor(0.25, device=kernel_device)):
        own_eps = eps_there if x_eps is None else x_eps
        args = (x_there, added_there, weight_there, eps_there, x_weight_there)
        normed, residual = kernel.add_rms_norm(*args, x_eps=x_eps)
        assert torch.equal(residual, added_there + kernel.rms_norm(x_there, x_weight_there, own_eps))
        assert torch.equal(normed, kernel.rms_norm(residual, weight_there, eps_there))
        assert torch.equal(kernel.add_normed(x_there, added_there, x_weight_there, own_eps), residual)
        assert torch.equal(kernel.sum_beside_rms_norm(*args, x_eps=x_eps), torch.cat((residual, normed), dim=1))
        wanted = reference.add_rms_norm(x, added, weight, epsilon, x_weight, x_eps=own_eps.cpu())
        for found, expected in zip((normed, residual), wanted, strict=True):
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_sum_is_rounded_scaled_and_rounded_again(kernel_device: torch.device, dtype: torch.dtype) -> None:
    """Of rows that lie apart; what is normed is the scaled sum, and 1 is as none."""
    x, added = randn(9, 200, dtype=dtype, seed=0).to(kernel_device).chunk(2, dim=1)
    weight, x_weight = randn(2, 100, dtype=torch.float32, seed=1).to(kernel_device)
    eps, scale, one = (torch.tensor(number, device=kernel_device) for number in (1e-6, 0.7019, 1.0))
    for own in (None, x_weight):
        normed, total = kernel.add_rms_norm(x, added, weight, eps, own)
        scaled_norm, scaled = kernel.add_rms_norm(x, added, weight, eps, own, scale)
        assert torch.equal(scaled, (total.float() * scale).to(dtype))
        assert torch.equal(scaled_norm, kernel.rms_norm(scaled, weight, eps))
        for as_before, found in zip((normed, total), kernel.add_rms_norm(x, added, weight, eps, own, one), strict=True):
            assert torch.equal(found, as_before)
        if own is None:
            assert torch.equal(scaled, reference.add_rms_norm(x, added, weight, eps, scale=scale)[1])
        else:
            assert torch.equal(kernel.add_normed(x, added, own, eps, scale), scaled)
        for row in range(len(x)):
            alone = kernel.add_rms_norm(x[row : row + 1], added[row : row + 1], weight, eps, own, scale)
            assert torch.equal(torch.cat(alone), torch.stack((scaled_norm[row], scaled[row])))


def test_rows_that_their_norm_overwrites_may_lie_apart(kernel_device: torch.device) -> None:
    wide = randn(3, 200, dtype=torch.float16, seed=0).to(kernel_device)
    weight, eps = randn(60, dtype=torch.float16, seed=1).to(kernel_device), torch.tensor(1e-6, device=kernel_device)
    own, before = wide[:, 100:160], wide.clone()
    normed = kernel.rms_norm(own, weight, eps)
    kernel.norm_in_place(own, weight, eps)
    assert torch.equal(wide, torch.cat((before[:, :100], normed, before[:, 160:]), dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_keeps_its_bits_among_any_number_of_rows(kernel_device: torch.device, dtype: torch.dtype) -> None:
    rows, added = (randn(33, 100, dtype=dtype, seed=seed).to(kernel_device) for seed in (0, 1))
    weight, eps = randn(100, dtype=dtype, seed=2).to(kernel_device), torch.tensor(1e-6, device=kernel_device)
    alone = [kernel.add_rms_norm(rows[i : i + 1], added[i : i + 1], weight, eps) for i in range(33)]
    for num_rows in (2, 17, 33):
        together = kernel.add_rms_norm(rows[:num_rows], added[:num_rows], weight, eps)
        for of_all, of_each in zip(together, zip(*alone, strict=True), strict=True):
            assert torch.equal(of_all, torch.cat(of_each[:num_rows]))


def test_a_sum_and_its_norm_side_by_side_have_the_bits_of_both(kernel_device: torch.device) -> None:
    """Wherever the rows that are added lie, normed before and scaled behind or not."""
    wide = randn(3, 200, dtype=torch.float32, seed=0).to(kernel_device)
    weight, eps = randn(100, dtype=torch.float32, seed=1).to(kernel_device), torch.tensor(1e-6, device=kernel_device)
    x, residual = wide.chunk(2, dim=1)
    normed, total = kernel.add_rms_norm(x.contiguous(), residual.contiguous(), weight, eps)
    assert torch.equal(kernel.rms_norm(total, weight, eps), normed)
    for left, right in ((x, residual), (residual, x)):
        assert torch.equal(kernel.sum_beside_rms_norm(left, right, weight, eps), torch.cat((total, normed), dim=1))
    more = (x[0].contiguous(), torch.tensor(0.7019, device=kernel_device))
    normed, total = kernel.add_rms_norm(x, residual, weight, eps, *more)
    assert torch.equal(kernel.sum_beside_rms_norm(x, residual, weight, eps, *more), torch.cat((total, normed), dim=1))


@pytest.mark.parametrize("states_first", [False, True])
@pytest.mark.parametrize("token_ids", [[6, 0, 3, 6], None], ids=["a table", "rows"])
def test_a_pair_of_norms_has_the_bits_of_each(
    kernel_device: torch.device, token_ids: list[int] | None, states_first: bool
) -> None:
    """Rows of the embedding are gathered by token id, and states lie apart, as in a head's output."""
    embeddings = randn(7 if token_ids else 4, 100, dtype=torch.float16, seed=0).to(kernel_device)
    states = randn(4, 200, dtype=torch.float16, seed=1).to(kernel_device)[:, :100]
    weights = randn(2, 100, dtype=torch.float16, seed=2).to(kernel_device)
    eps = torch.tensor(1e-6, device=kernel_device)
    ids = None if token_ids is None else torch.tensor(token_ids, device=kernel_device)
    halves = [
        kernel.rms_norm(embeddings if ids is None else embeddings[ids], weights[0], eps),
        kernel.rms_norm(states, weights[1], eps),
    ]
    both = kernel.rms_norm_pair(embeddings, ids, states, *weights, eps, states_first=states_first)
    assert torch.equal(both, torch.cat(halves[::-1] if states_first else halves, dim=1))
    expected = reference.rms_norm_pair(embeddings, ids, states, *weights, eps, states_first=states_first)
    assert (both - expected).abs().max() <= 2 * torch.finfo(torch.float16).eps * expected.abs().max()


def test_no_rows_give_no_rows(kernel_device: torch.device) -> None:
    nothing, weight = torch.ones(0, 8, device=kernel_device), torch.ones(8, device=kernel_device)
    eps = torch.tensor(1e-6, device=kernel_device)
    assert [len(result) for result in kernel.add_rms_norm(nothing, nothing, weight, eps)] == [0, 0]
    assert kernel.add_normed(nothing, nothing, weight, eps).shape == (0, 8)
    assert kernel.sum_beside_rms_norm(nothing, nothing, weight, eps).shape == (0, 16)
    assert kernel.rms_norm_pair(nothing, None, nothing, weight, weight, eps).shape == (0, 16)
