"""A norm that rides in the products around it is the norm, and a row's bits are its own in both of its halves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels import linear_plan
from kernels.quantized_weight import quantize
from kernels.reference import weighed_rows as reference
from kernels.reference.act_and_mul import act_and_mul
from kernels.reference.weighed_rows import PART, WeighedRows
from tests.product_errors import assert_error_is_torchs
from tests.test_linear_kernel import normal, rounding_between_steps, small_integers

kernel = pytest.importorskip("kernels.linear")
weigh_rows = pytest.importorskip("kernels.weigh_rows").weigh_rows

EPS = torch.tensor(1e-5)
HIDDEN = (1, 40, PART, 130, 5 * PART + 1)  # one part and several, whole ones and not
DTYPES = [torch.float32, torch.float16]


def parts_of(*tensors: Tensor | None, device: torch.device) -> list[Any]:
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def same_bits(found: WeighedRows, expected: WeighedRows) -> bool:
    return torch.equal(found.rows, expected.rows) and torch.equal(found.squares, expected.squares)


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.double(), x.shape[-1:], weight.double(), EPS.item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide_weight", [False, True], ids=["", "a weight of float32"])
def test_rows_are_weighed_as_the_definition_says(
    kernel_device: torch.device, dtype: torch.dtype, wide_weight: bool
) -> None:
    """To the bit; and rows may lie apart."""
    for hidden in HIDDEN:
        x = normal(3, hidden + 7, dtype=dtype)[:, :hidden]
        weight = normal(hidden, dtype=torch.float32 if wide_weight else dtype, seed=1)
        found = weigh_rows(*parts_of(x, weight, EPS, device=kernel_device))
        assert same_bits(found, reference.weigh_rows(*parts_of(x, weight, EPS, device=kernel_device)))
        assert found.squares.shape == (3, -(-hidden // PART)) and found.rows.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 5, 70, 130])
@pytest.mark.parametrize("has_bias", [False, True])
def test_what_a_product_leaves_is_what_its_sum_would(
    kernel_device: torch.device, small_cuts: None, dtype: torch.dtype, num_rows: int, has_bias: bool
) -> None:
    """The sum as near as the definition's; and of it the bits that weigh_rows has, whoever ends a tile."""
    hidden, in_features = 130, 4 * linear_plan.LINE // dtype.itemsize
    x, weight = normal(num_rows, in_features, dtype=dtype), normal(hidden, in_features, dtype=dtype, seed=1)
    bias = normal(hidden, dtype=dtype, seed=2) if has_bias else None
    stream, norm = normal(num_rows, 2 * hidden, dtype=dtype, seed=3)[:, hidden:], normal(hidden, dtype=dtype, seed=4)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double()) + stream.double()
    _, by_torch = reference.linear_to_norm(x, weight, bias, stream, norm, EPS)
    there = parts_of(x, weight, bias, stream, norm, EPS, device=kernel_device)
    weighed, total = kernel.linear_to_norm(*there)
    assert_error_is_torchs(total, by_torch, exact)
    assert same_bits(weighed, weigh_rows(total, *there[-2:]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 17, 130])
def test_a_product_of_weighed_rows_is_one_of_normed_ones(
    kernel_device: torch.device, small_cuts: None, dtype: torch.dtype, num_rows: int
) -> None:
    """Cut into partial sums, with a bias, gated, with a weight in 8 bits: as near as norm and product of torch's."""
    for hidden in (101, 4 * linear_plan.LINE // dtype.itemsize):
        x, norm = normal(num_rows, hidden, dtype=dtype) * 3, normal(hidden, dtype=dtype, seed=1)
        weight = normal(2 * 70, hidden, dtype=dtype, seed=2) / hidden**0.5
        bias, exact = normal(2 * 70, dtype=dtype, seed=3), exact_norm(x, norm)
        by_torch = F.rms_norm(x.float(), (hidden,), None, EPS.item()).to(dtype) * norm
        there = parts_of(x, norm, EPS, device=kernel_device)
        rows = weigh_rows(*there)
        x, weight, bias = parts_of(x, weight, bias, device=kernel_device)
        sums = F.linear(exact, weight.cpu().double(), bias.cpu().double())
        torchs = F.linear(by_torch, weight.cpu(), bias.cpu())
        assert_error_is_torchs(kernel.linear(rows, weight, bias), torchs, sums)
        gated = kernel.gated_linear(rows, weight, bias)
        assert_error_is_torchs(gated, act_and_mul(torchs), act_and_mul(sums))
        if num_rows < 130:
            held = quantize(weight, torch.int8)
            exact_weight, dense = held.exact().cpu().double(), held.dense().cpu()
            torchs = F.linear(by_torch, dense, bias.cpu())
            sums = F.linear(exact, exact_weight, bias.cpu().double())
            assert_error_is_torchs(kernel.linear(rows, held, bias), torchs, sums)


@given(st.integers(1, 400), st.integers(0, 5))
def test_halves_of_a_norm_are_as_near_as_a_norm_in_bfloat16(hidden: int, seed: int) -> None:
    """By the definition alone, since the interpreter knows no bfloat16; residual streams are large in places."""
    x = normal(4, hidden, dtype=torch.float32, seed=seed)
    x[:, :: max(hidden // 3, 1)] *= 300
    x, norm = x.bfloat16(), normal(hidden, dtype=torch.bfloat16, seed=seed + 1)
    weighed = reference.weigh_rows(x, norm, EPS)
    by_torch = F.rms_norm(x.float(), (hidden,), None, EPS.item()).bfloat16() * norm
    assert_error_is_torchs((weighed.rows.float() * weighed.factors()).bfloat16(), by_torch, exact_norm(x, norm))


def leaves(x: Tensor, weight: Tensor, stream: Tensor, norm: Tensor) -> Tensor:
    weighed, total = kernel.linear_to_norm(x, weight, None, stream, norm, EPS.to(x.device))
    return torch.cat((total.float(), weighed.rows.float(), weighed.squares), dim=1)


@pytest.mark.parametrize("wide_rows", [512, 100], ids=["", "two tiles of features to a program"])
def test_a_row_keeps_its_bits_in_what_is_left_of_a_norm(
    kernel_device: torch.device, small_cuts: None, wide_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_plan, "WIDE_ROWS", wide_rows)
    dtype, hidden, width = torch.float16, 130, 200
    weight, norm = small_integers(hidden, width, dtype=dtype), normal(hidden, dtype=dtype)
    rows, stream = rounding_between_steps(259, width, dtype=dtype, seed=0), normal(259, hidden, dtype=dtype, seed=1)
    weight, norm, rows, stream = parts_of(weight, norm, rows, stream, device=kernel_device)
    alone = leaves(rows[-1:], weight, stream[-1:], norm)
    for count in (5, 17, 33, 70, 120, 130, 258):
        assert torch.equal(leaves(rows[-count:], weight, stream[-count:], norm)[-1:], alone), count


def test_a_row_keeps_its_factor_among_any_number_of_rows(kernel_device: torch.device, small_cuts: None) -> None:
    """Of tiles that ask for squares before their sums, and of larger ones, which add them by eighths."""
    hidden = 9 * PART + 5
    x = normal(300, hidden, dtype=torch.float32).to(kernel_device)
    x[:, ::7] *= 1000.0  # squares whose sums depend on their order
    eps, ones = EPS.to(kernel_device), torch.ones(hidden, device=kernel_device)
    weighed = weigh_rows(x, ones, eps)
    # Each row the same, so that products are; what tells rows apart is their factor.
    weighed = replace(weighed, rows=torch.ones_like(x))
    weight = torch.ones(1, hidden, device=kernel_device)

    def product(count: int) -> Tensor:
        some = replace(weighed, rows=weighed.rows[-count:], squares=weighed.squares[-count:])
        result: Tensor = kernel.linear(some, weight)
        return result

    alone = product(1)
    assert alone.item() == pytest.approx(weighed.factors()[-1].item() * hidden, rel=1e-6)
    for count in (2, 17, 40, 64, 65, 130, 257, 300):
        assert torch.equal(product(count)[-1:], alone), count


def test_no_rows_leave_nothing(kernel_device: torch.device) -> None:
    weight = torch.ones(PART, 8, device=kernel_device)
    none, stream = weight.new_empty(0, 8), weight.new_empty(0, PART)
    weighed, total = kernel.linear_to_norm(none, weight, None, stream, weight[:, 0].clone(), EPS.to(kernel_device))
    assert total.shape == weighed.rows.shape == (0, PART) and kernel.linear(weighed, weight.T.contiguous()).numel() == 0
    assert weigh_rows(stream, weight[:, 0].clone(), EPS.to(kernel_device)).squares.shape == (0, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_of_an_8b_model_keep_their_bits_from_norm_to_norm(dtype: torch.dtype) -> None:
    """No interpreter can tell."""

    def normal_there(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device="cuda") * scale).to(dtype)

    hidden, inner, count = 4096, 14336, 1089 if dtype == torch.bfloat16 else 130
    up, down = normal_there(2 * inner, hidden, scale=hidden**-0.5), normal_there(hidden, inner, scale=inner**-0.5)
    norm, eps, stream = normal_there(hidden), EPS.cuda(), normal_there(count, hidden, scale=20.0)

    def layer(rows: Tensor) -> Tensor:
        inner_rows = kernel.gated_linear(weigh_rows(rows, norm, eps), up)
        weighed, total = kernel.linear_to_norm(inner_rows, down, None, rows, norm, eps)
        assert same_bits(weighed, weigh_rows(total, norm, eps))
        return torch.cat((total, kernel.linear(weighed, up[:6144])), dim=1)

    alone = layer(stream[-1:])
    for rows in (2, 8, 17, 33, 64, 65, 130, 257, 520, 1088):
        if rows <= count:
            assert torch.equal(layer(stream[-rows:])[-1:], alone), rows
