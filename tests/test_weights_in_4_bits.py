"""Products with codes of 4 bits are those of the numbers that the codes stand for, on a CPU in every bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernels import linear_plan
from kernels.cpu.panels import can_pack, pack, tensors_of, unpack
from kernels.quantized_weight import (
    FP4_GROUP,
    FP4_NUMBERS,
    QuantizedWeight,
    as_block_scales,
    block_columns,
    block_scales_of,
    fits_codes,
    num_groups,
    numbers_of,
)
from kernels.reference.act_and_mul import act_and_mul
from kernels.words import Kind
from tests.product_bits import (
    FEW,
    OF_AN_8B_MODEL,
    assert_a_row_keeps_its_bits,
    assert_panels_of_every_width_agree,
    multiply_no_pairs,
)
from tests.product_errors import assert_error_is_torchs
from tests.seeded import randn
from tests.test_quantized_weight import on

KINDS: list[tuple[Kind, bool]] = [("int4", False), ("int4", True), ("fp4", False)]  # and whether it has zero points
of_every_kind = pytest.mark.parametrize(("kind", "has_zeros"), KINDS, ids=["int4", "int4 with zero points", "fp4"])


def random_codes(
    out_features: int,
    in_features: int,
    kind: Kind,
    *,
    has_zeros: bool = False,
    group_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> QuantizedWeight:
    """Scales and zero points that differ from group to group, products of order one. Groups are those of an int4."""
    generator = torch.Generator().manual_seed(0)
    size = FP4_GROUP if kind == "fp4" else group_size or in_features
    groups = (out_features, 1 if kind == "fp4" else num_groups(in_features, size))
    blocks = (out_features, block_columns(in_features))
    return QuantizedWeight(
        kind=kind,
        in_features=in_features,
        numbers=torch.randint(0, 256, (out_features, in_features // 2), generator=generator, dtype=torch.uint8),
        scales=((torch.rand(groups, generator=generator) + 0.5) / 8 / in_features**0.5).half().float(),
        group_size=size,
        dtype=dtype,
        zeros=torch.randint(0, 16, groups, generator=generator).to(torch.int8) if has_zeros else None,
        block_scales=torch.randint(224, 248, blocks, generator=generator, dtype=torch.uint8) if kind == "fp4" else None,
    )


def test_an_fp4_stands_for_twice_its_float() -> None:
    """Of OCP's type E2M1: a sign, two bits of exponent with bias 1, one of mantissa."""
    for code, number in enumerate(FP4_NUMBERS):
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
        assert number == 2 * (-size if sign else size)


def test_an_int4_is_its_code_less_the_zero_point_of_its_group() -> None:
    codes = torch.tensor([[0, 15, 8, 7], [1, 2, 3, 4]], dtype=torch.uint8)
    zeros = torch.tensor([[0, 15], [3, 8]], dtype=torch.int8)
    assert numbers_of(codes, "int4", zeros, 2).tolist() == [[0, 15, -7, -8], [-2, -1, -5, -4]]
    assert numbers_of(codes, "int4", None, 2).tolist() == [[-8, 7, 0, -1], [-7, -6, -5, -4]]


def test_a_span_lies_in_one_group_of_an_int4() -> None:
    assert fits_codes("int4", 96, 32) and fits_codes("int4", 96, 96) and fits_codes("int4", 256, 64)
    assert fits_codes("int4", 96, 128) and not fits_codes("int4", 80, 32) and not fits_codes("int4", 96, 48)
    assert not fits_codes("int4", 96, 16) and fits_codes("fp4", 96, 16) and not fits_codes("fp4", 80, 16)


def test_a_block_scale_is_a_float_of_8_bits() -> None:
    """Five of exponent and three of mantissa; every float8_e4m3fn above 0 is one, times a power of two."""
    octets = torch.arange(248, dtype=torch.uint8)
    found = block_scales_of(octets)
    assert found.tolist() == [(1 + octet % 8 / 8) * 2.0 ** (octet // 8 - 30) for octet in range(248)]
    assert torch.equal(as_block_scales(found), octets)
    published = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float() * 2.0**-9
    assert torch.equal(block_scales_of(as_block_scales(published)), published)
    for dtype in (torch.bfloat16, torch.float16):
        products = torch.tensor(FP4_NUMBERS)[:, None] * published
        assert torch.equal(products.to(dtype).float(), products), "numbers times them are exact"


# --- CPU ------------------------------------------------------------------------------------------------------------


SHAPES = [(130, 96, None), (64, 192, 64), (33, 1056, None), (48, 320, 128), (40, 352, 32)]


@of_every_kind
@pytest.mark.parametrize(
    ("dtype", "in_pairs"),
    [(torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, False)],
    ids=str,
)
def test_a_cpu_gives_the_bits_of_the_numbers_in_8(
    dtype: torch.dtype, in_pairs: bool, kind: Kind, has_zeros: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """in_pairs: where it has an instruction for them."""
    from kernels.cpu.linear import linear

    if not in_pairs:
        multiply_no_pairs(monkeypatch)
    for out_features, in_features, group_size in SHAPES:
        weight = random_codes(out_features, in_features, kind, has_zeros=has_zeros, group_size=group_size, dtype=dtype)
        if not can_pack(weight):
            pytest.skip("this machine has no panels")
        packed, wide, bias = pack(weight), pack(weight.in_8_bits()), randn(out_features, dtype=dtype)
        assert torch.equal(unpack(packed), weight.dense()) and torch.equal(unpack(wide), weight.dense())
        assert tensors_of(packed)[0].nbytes * 2 == tensors_of(wide)[0].nbytes
        x = randn(70, in_features, dtype=dtype, seed=2)
        together = linear(x, packed, bias, out_dtype=torch.float32)
        assert torch.equal(together, linear(x, wide, bias, out_dtype=torch.float32))
        for count in (1, 2, 6, 7, 33):
            assert torch.equal(linear(x[-count:], packed, bias, out_dtype=torch.float32), together[-count:]), count


def test_scales_that_times_a_zero_point_would_be_rounded_take_their_numbers_in_8() -> None:
    """None that is published: they come from 16 bits."""
    weight = random_codes(48, 64, "int4", has_zeros=True, group_size=32)
    if not can_pack(weight):
        pytest.skip("this machine has no panels")
    assert tensors_of(pack(weight))[0].dtype == torch.uint8
    precise = replace(weight, scales=weight.scales / 3)
    packed = pack(precise)
    assert tensors_of(packed)[0].dtype == torch.int8 and torch.equal(unpack(packed), precise.dense())


@of_every_kind
def test_panels_of_every_width_give_the_same_bits(kind: Kind, has_zeros: bool) -> None:
    weight = random_codes(200, 96, kind, has_zeros=has_zeros, group_size=32)
    assert_panels_of_every_width_agree(weight, randn(9, 96, dtype=torch.float32))


@of_every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_on_a_cpu_give_the_bits_of_each_ones_product(dtype: torch.dtype, kind: Kind, has_zeros: bool) -> None:
    from kernels.cpu.experts_linear import PanelsOfExperts, linear_of_experts
    from kernels.cpu.linear import linear
    from tests.test_experts_on_cpu import routing_of

    whole = random_codes(3 * 40, 96, kind, has_zeros=has_zeros, group_size=32, dtype=dtype)
    weights = [whole.rows(slice(40 * expert, 40 * (expert + 1))) for expert in range(3)]
    if not can_pack(weights[0]):
        pytest.skip("this machine has no panels")
    routing = routing_of(45, 3, 2)
    x = randn(45, 96, dtype=dtype).index_select(0, routing.rows)
    packed = PanelsOfExperts(pack(weight) for weight in weights)
    starts = routing.starts.tolist()
    own = [linear(x[start:end], weight) for weight, start, end in zip(packed, starts, starts[1:], strict=False)]
    assert torch.equal(linear_of_experts(x, packed, routing), torch.cat(own))


# --- Triton ---------------------------------------------------------------------------------------------------------

CASES = [(1, 262, 96, None), (17, 130, 352, None), (5, 64, 256, 128), (3, 66, 224, 32)]


@pytest.fixture
def kernel() -> Any:
    return pytest.importorskip("kernels.linear")


@of_every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_kernel_multiplies_by_what_codes_stand_for(
    dtype: torch.dtype, kind: Kind, has_zeros: bool, kernel: Any, kernel_device: torch.device, small_cuts: None
) -> None:
    for num_rows, out_features, in_features, group_size in CASES:
        weight = random_codes(out_features, in_features, kind, has_zeros=has_zeros, group_size=group_size, dtype=dtype)
        x, bias = randn(num_rows, in_features, dtype=dtype), randn(out_features, dtype=dtype, seed=3)
        exact, by_torch = (F.linear(*(t.to(to) for t in (x, weight.exact(), bias))) for to in (torch.float64, dtype))
        rows, biases, there = x.to(kernel_device), bias.to(kernel_device), on(kernel_device, weight)
        assert_error_is_torchs(kernel.linear(rows, there, biases), by_torch, exact)
        assert_error_is_torchs(kernel.gated_linear(rows, there, biases), act_and_mul(by_torch), act_and_mul(exact))


@of_every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_code_is_exact(
    dtype: torch.dtype, kind: Kind, has_zeros: bool, kernel: Any, kernel_device: torch.device
) -> None:
    """Of rows that look at one input each: results are numbers, with nothing to round."""
    weight = random_codes(16, 192, kind, has_zeros=has_zeros, dtype=dtype)
    codes = torch.arange(16, dtype=torch.uint8)  # each output has all of them, in another order
    weight = replace(weight, scales=torch.ones(16, 1))
    weight.hold(codes.repeat(16, 12) ^ codes[:, None])
    if weight.block_scales is not None:  # powers of two as MXFP4 may have them, then those of float8
        octets = torch.cat((torch.arange(48, 248, 8), torch.arange(96, 240))).to(torch.uint8)
        weight.block_scales[:, :12] = octets.repeat(2)[: 16 * 12].view(16, 12)
    found = kernel.linear(torch.eye(192, dtype=dtype, device=kernel_device), on(kernel_device, weight))
    assert torch.equal(found.float().cpu().T, weight.exact())


@of_every_kind
def test_a_row_keeps_its_bits_in_company(
    kind: Kind, has_zeros: bool, kernel: Any, kernel_device: torch.device, small_cuts: None
) -> None:
    """Of rows whose products are exact within a step, so that the interpreter's BLAS hides no order."""
    weight = random_codes(64, 352, kind, has_zeros=has_zeros, group_size=32)
    powers = 2.0 ** torch.randint(-22, -16, weight.scales.shape, generator=torch.Generator().manual_seed(0))
    weight = on(kernel_device, replace(weight, scales=powers))
    sizes = torch.tensor([2.0**10, 2.0**-10]).repeat_interleave(128).repeat(2)[:352]
    rows = torch.randint(-7, 8, (131, 352), generator=torch.Generator().manual_seed(1)) * sizes
    rows = rows.to(kernel_device)
    for product in (kernel.linear, kernel.gated_linear):
        assert_a_row_keeps_its_bits(product, weight, rows, FEW)


@of_every_kind
@pytest.mark.parametrize("group_size", [None, 32])
def test_experts_are_multiplied_by(
    group_size: int | None, kind: Kind, has_zeros: bool, kernel_device: torch.device, small_cuts: None
) -> None:
    products = pytest.importorskip("kernels.experts_linear")
    from tests.test_experts_kernels import CASES, assert_is_references, to, to_experts

    routing = to_experts(CASES["many"], 5)
    whole = random_codes(5 * 70, 96, kind, has_zeros=has_zeros, group_size=group_size)
    there, x = to(kernel_device, routing), randn(39, 96, dtype=torch.float32)
    together = on(kernel_device, whole)
    experts = [together.rows(slice(70 * expert, 70 * (expert + 1))) for expert in range(5)]
    for op, rows in (("linear_of_experts", x[routing.rows]), ("gated_linear_of_experts", x)):
        found = getattr(products, op)(rows.to(kernel_device), experts, there)
        assert_is_references(found, op, rows, torch.stack(list(whole.exact().chunk(5))), routing)


@pytest.mark.parametrize("group_size", [None, 32, 128])
def test_the_order_of_a_sum_is_a_matter_of_the_weight(group_size: int | None) -> None:
    """And a step is of whole spans, which lie in one group."""
    for element_size in (2, 4):
        plans = [
            linear_plan.plan_linear(
                rows, 4096, 14336, element_size=element_size, gated=False, number_bits=4, group_size=group_size
            )
            for rows in (*range(1, 1200), 8192)
        ]
        assert len({(plan.block_k, plan.splits, plan.split_width) for plan in plans}) == 1
        assert all(plan.block_k % 32 == 0 == (group_size or plan.block_k) % plan.block_k for plan in plans)
        assert {plan.step_groups for plan in plans} == {group_size is not None}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@of_every_kind
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
    has_zeros: bool,
    dtype: torch.dtype,
    kernel: Any,
) -> None:
    """And are the products of the numbers; no interpreter can tell how the instructions for few and many agree."""
    device = torch.device("cuda")
    weight = random_codes(out_features, in_features, kind, has_zeros=has_zeros, group_size=group_size, dtype=dtype)
    weight = on(device, weight)
    rows = torch.randn(1089, in_features, device=device).to(dtype)
    product = getattr(kernel, op)
    assert_a_row_keeps_its_bits(product, weight, rows, OF_AN_8B_MODEL)
    if op == "linear":
        exact, by_torch = (F.linear(*(t.to(to) for t in (rows, weight.exact()))) for to in (torch.float64, dtype))
        assert_error_is_torchs(product(rows, weight), by_torch.cpu(), exact.cpu())
