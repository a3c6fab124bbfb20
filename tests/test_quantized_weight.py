"""Products with quantized weights are those of the weights that numbers and scales stand for, a row's bits its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels import linear_plan, quantized_weight
from kernels.cpu.panels import can_pack, pack, unpack
from kernels.quantized_weight import (
    DTYPES,
    LARGEST,
    QuantizedWeight,
    num_groups,
    quantize,
)
from kernels.reference.act_and_mul import act_and_mul
from kernels.words import Kind
from runner.engine.start_check import _rows_agree
from tests.product_bits import (
    FEW,
    OF_AN_8B_MODEL,
    assert_a_row_keeps_its_bits,
    assert_panels_of_every_width_agree,
    multiply_no_pairs,
)
from tests.product_errors import assert_error_is_torchs
from tests.seeded import randn

KINDS: list[Kind] = ["fp8", "int8"]
CODES = torch.arange(256, dtype=torch.uint8)


def every_number(kind: Kind, *shape: int) -> Tensor:
    """Every finite number of the type in turns, of either sign, those below the smallest normal one included."""
    codes = CODES.view(DTYPES[kind])
    codes = codes[codes.float().isfinite()]
    return (
        codes.view(torch.uint8)
        .repeat(-(-shape[0] * shape[1] // len(codes)))[: shape[0] * shape[1]]
        .view(shape)
        .view(DTYPES[kind])
    )


def random_weight(
    out_features: int, in_features: int, kind: Kind, *, group_size: int | None = None, dtype: torch.dtype
) -> QuantizedWeight:
    """Numbers of all sizes, scales that differ from group to group, products of order one."""
    generator = torch.Generator().manual_seed(0)
    size = group_size or in_features
    scales = torch.rand(out_features, num_groups(in_features, size), generator=generator) + 0.5
    return QuantizedWeight(
        kind=kind,
        in_features=in_features,
        numbers=every_number(kind, out_features, in_features),
        scales=scales / LARGEST[kind] / in_features**0.5,
        group_size=size,
        dtype=dtype,
    )


@pytest.mark.parametrize("kind", KINDS)
@given(
    values=st.lists(st.floats(-100, 100, width=32, allow_subnormal=False), min_size=1, max_size=40),
    size=st.sampled_from([1e-6, 1e-2, 1.0]),
)
def test_a_number_is_the_nearest_to_its_weight(kind: Kind, values: list[float], size: float) -> None:
    """No other number of the type, times the scale, is nearer; the largest weight becomes the largest number."""
    weight = torch.tensor([values]) * size
    found = quantize(weight, kind)
    numbers, scales = found.numbers, found.scales
    assert numbers.dtype == DTYPES[kind] and scales.shape == (1, 1)
    every = CODES.view(DTYPES[kind]).float()
    every = every[every.isfinite()].double() * scales.double()
    distances = (every.reshape(-1, 1) - weight.double()).abs()
    off = (numbers.double() * scales.double() - weight.double()).abs()
    assert (off <= distances.amin(dim=0) * (1 + 1e-5) + 1e-6 * scales.double() * LARGEST[kind]).all()
    if weight.abs().max() > 0:
        assert numbers.float().abs().max() == LARGEST[kind]


def test_many_outputs_are_quantized_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = randn(50, 16, dtype=torch.bfloat16)
    together = quantize(weight, "int8")
    in_words = together.in_words().numbers
    monkeypatch.setattr(quantized_weight, "ROWS_AT_ONCE", 16)
    apart = quantize(weight, "int8")
    assert torch.equal(apart.numbers, together.numbers) and torch.equal(apart.scales, together.scales)
    assert torch.equal(apart.in_words().numbers, in_words)
    assert torch.equal(apart.scales[:, 0], weight.float().abs().amax(dim=1) / 127)


def test_weights_that_are_hardly_any_become_numbers() -> None:
    found = quantize(torch.full((1, 4), 1e-44), "fp8")
    assert found.scales.gt(0).all() and found.dense().isfinite().all()


def test_an_output_without_weights_has_a_scale_all_the_same() -> None:
    found = quantize(torch.zeros(3, 4), "int8")
    assert not found.numbers.any() and found.scales.eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cpu_multiplies_by_what_the_numbers_stand_for(
    kind: Kind, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every bit the products of float32 rows with the expanded weight, in launches of any number of rows; where it
    multiplies no pairs of bfloat16."""
    from kernels.cpu.linear import linear

    multiply_no_pairs(monkeypatch)
    for out_features, in_features, group_size in ((130, 96, None), (64, 200, 64), (33, 1030, None), (48, 300, 128)):
        weight = random_weight(out_features, in_features, kind, group_size=group_size, dtype=dtype)
        if not can_pack(weight):
            pytest.skip("this machine has no panels")
        packed, bias = pack(weight), randn(out_features, dtype=dtype)
        assert torch.equal(unpack(packed), weight.dense())
        exact = pack(weight.exact())
        x = randn(70, in_features, dtype=dtype, seed=2)
        together = linear(x, packed, bias, out_dtype=torch.float32)
        assert torch.equal(together, linear(x.float(), exact, bias.float()))
        assert torch.equal(linear(x, packed, bias), together.to(dtype))
        for count in (1, 2, 6, 7, 33):
            assert torch.equal(linear(x[-count:], packed, bias, out_dtype=torch.float32), together[-count:]), count


@pytest.mark.parametrize("kind", KINDS)
def test_panels_of_every_width_give_the_same_bits(kind: Kind) -> None:
    weight, x = random_weight(200, 96, kind, group_size=32, dtype=torch.float32), randn(9, 96, dtype=torch.float32)
    assert_panels_of_every_width_agree(weight, x)


# --- Triton ---------------------------------------------------------------------------------------------------------

CASES = [(1, 70, 101, None), (17, 130, 352, None), (5, 64, 256, 128), (3, 66, 200, 32)]


@pytest.fixture
def kernel() -> Any:
    return pytest.importorskip("kernels.linear")


def on(device: torch.device, weight: QuantizedWeight) -> QuantizedWeight:
    """As kernels read it."""
    weight = weight.in_words()
    parts: dict[str, Any] = {name: tensor.to(device) for name, tensor in weight.tensors.items()}
    return replace(weight, **parts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_kernel_multiplies_by_what_the_numbers_stand_for(
    dtype: torch.dtype, kind: Kind, kernel: Any, kernel_device: torch.device, small_cuts: None
) -> None:
    """One scale to an output or several, sums in one part or two."""
    for num_rows, out_features, in_features, group_size in CASES:
        weight = random_weight(out_features, in_features, kind, group_size=group_size, dtype=dtype)
        x, bias = randn(num_rows, in_features, dtype=dtype), randn(out_features, dtype=dtype, seed=3)
        dense, there = weight.exact(), on(kernel_device, weight)
        exact, by_torch = (F.linear(*(t.to(to) for t in (x, dense, bias))) for to in (torch.float64, dtype))
        rows, biases = x.to(kernel_device), bias.to(kernel_device)
        assert_error_is_torchs(kernel.linear(rows, there, biases), by_torch, exact)
        assert_error_is_torchs(kernel.gated_linear(rows, there, biases), act_and_mul(by_torch), act_and_mul(exact))


@pytest.mark.parametrize("group_size", [None, 32])
def test_a_row_keeps_its_bits_in_company(
    group_size: int | None, kernel: Any, kernel_device: torch.device, small_cuts: None
) -> None:
    """Of numbers and rows whose products are exact within a step, so that the interpreter's BLAS hides no order."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-7, 8, (64, 96), generator=generator).to(torch.int8)
    powers = 2.0 ** torch.randint(-22, -16, (64, num_groups(96, group_size or 96)), generator=generator)
    weight = on(
        kernel_device,
        QuantizedWeight(
            kind="int8",
            in_features=96,
            numbers=numbers,
            scales=powers,
            group_size=group_size or 96,
            dtype=torch.float32,
        ),
    )
    sizes = torch.tensor([2.0**10, 2.0**-10]).repeat_interleave(32).repeat(2)[:96]
    rows = (torch.randint(-7, 8, (131, 96), generator=generator) * sizes).to(kernel_device)
    for product in (kernel.linear, kernel.gated_linear):
        assert_a_row_keeps_its_bits(product, weight, rows, FEW)


@pytest.mark.parametrize("group_size", [None, 32, 128])
def test_the_order_of_a_sum_is_a_matter_of_the_weight(group_size: int | None) -> None:
    """And a step never lies in two groups."""
    plans = [
        linear_plan.plan_linear(
            num_rows, 4096, 14336, element_size=2, gated=gated, number_bits=8, group_size=group_size
        )
        for gated in (False, True)
        for num_rows in (*range(1, 1200), 8192)
    ]
    assert len({(plan.block_k, plan.splits, plan.split_width) for plan in plans[: len(plans) // 2]}) == 1
    assert all((group_size or plan.block_k) % plan.block_k == 0 for plan in plans)


def test_an_engine_asks_for_a_row_in_every_kind_of_program_of_a_weight_in_8_bits() -> None:
    """Which are not a dense one's: its tiles grow later, and hold fewer tokens."""
    asked = set[int]()

    def product(rows: Tensor) -> Tensor:
        asked.add(len(rows))
        return rows

    def kinds(counts: Iterable[int]) -> set[tuple[int, bool, int]]:
        plans = [linear_plan.plan_linear(n, 4096, 14336, element_size=2, gated=False, number_bits=8) for n in counts]
        return {(plan.tokens, plan.is_spread, plan.features) for plan in plans}

    weight = QuantizedWeight(
        kind="int8",
        in_features=14336,
        numbers=torch.ones(1, 1, dtype=torch.int8).expand(4096, 14336),
        scales=torch.ones(1, 1).expand(4096, 1),
        group_size=14336,
        dtype=torch.float16,
    )
    assert _rows_agree(product, [weight])
    assert kinds(asked) == kinds(range(1, 4097))
    assert len(kinds(asked)) == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", [None, 128])
@pytest.mark.parametrize(
    ("op", "out_features", "in_features"),
    [("linear", 6144, 4096), ("linear", 4096, 14336), ("gated_linear", 28672, 4096)],
)
def test_rows_of_an_8b_model_keep_their_bits(
    op: str,
    out_features: int,
    in_features: int,
    group_size: int | None,
    kind: Kind,
    dtype: torch.dtype,
    kernel: Any,
) -> None:
    """The instructions for few and for many tokens agree in every bit; no interpreter can tell."""
    device = torch.device("cuda")
    weight = on(device, random_weight(out_features, in_features, kind, group_size=group_size, dtype=dtype))
    rows = torch.randn(1089, in_features, device=device).to(dtype)
    product = getattr(kernel, op)
    assert_a_row_keeps_its_bits(product, weight, rows, OF_AN_8B_MODEL)
