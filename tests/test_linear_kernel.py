"""Linear layers on the GPU: their error is torch's, and a row's bits are its own; interpreted where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import linear_plan
from kernels.reference.act_and_mul import LIMIT, Activation, LimitedSilu, act_and_mul
from kernels.reference.softcap import softcap
from runner.engine.start_check import _rows_agree
from tests.product_errors import assert_error_is_torchs
from tests.seeded import randn

kernel = pytest.importorskip("kernels.linear")
arrivals = pytest.importorskip("kernels.last_to_arrive")

ROWS = (1, 2, 5, 16, 17, 33, 130)


def rounding_between_steps(*shape: int, dtype: torch.dtype) -> Tensor:
    """Rows whose products with a weight of small integers are exact within a step, in whatever order it adds.

    The interpreter's step is one BLAS product, whose order may change with its shape; the kernel's own order, from
    step to step and from cut to cut, shows because what one step brings lies below what the next can hold.
    """
    generator = torch.Generator().manual_seed(0)
    step = linear_plan.LINE // dtype.itemsize
    scale = torch.tensor([2.0**10, 2.0**-10]).repeat_interleave(step).repeat(shape[-1])[: shape[-1]]
    return (torch.randint(-7, 8, shape, generator=generator) * scale).to(dtype)


def small_integers(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randint(-7, 8, shape, generator=torch.Generator().manual_seed(1)) / 1024).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "has_bias"),  # rows, out_features, in_features
    [((1, 70, 101), False), ((17, 130, 352), True), ((33, 64, 256), False), ((3, 65, 512), True)],
)
def test_the_error_of_a_product_is_that_of_torch(
    kernel_device: torch.device, small_cuts: None, dtype: torch.dtype, shape: tuple[int, int, int], has_bias: bool
) -> None:
    if dtype == torch.bfloat16 and kernel_device.type == "cpu":
        pytest.skip("Triton's interpreter knows no bfloat16")
    num_rows, out_features, in_features = shape
    weight = randn(out_features, in_features, dtype=dtype)
    x = randn(num_rows, in_features, dtype=dtype, seed=1)
    bias = randn(out_features, dtype=dtype, seed=2) if has_bias else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    by_torch = F.linear(x, weight, bias)
    x, weight, bias = (None if given is None else given.to(kernel_device) for given in (x, weight, bias))
    assert_error_is_torchs(kernel.linear(x, weight, bias), by_torch, exact)
    if num_rows < 17:  # the rounding of others is the same
        logits = kernel.linear(x, weight, bias, out_dtype=torch.float32)
        assert_error_is_torchs(logits, by_torch.float(), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("activation", "has_bias"),
    [("silu", False), ("silu", True), ("gelu_tanh", True), ("clamped_swiglu", True), (LimitedSilu(0.5), True)],
    ids=str,
)
def test_the_error_of_a_gated_product_is_that_of_torch(
    kernel_device: torch.device, dtype: torch.dtype, activation: Activation, has_bias: bool
) -> None:
    size = 2 if activation == "clamped_swiglu" else 4
    weight, x = randn(2 * 72, 101, dtype=dtype) / size, randn(5, 101, dtype=dtype, seed=1)
    bias = randn(2 * 72, dtype=dtype, seed=2) if has_bias else None
    sums = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert activation != "clamped_swiglu" or (sums.abs() > LIMIT).any(), "there is something to cut off"
    there = (None if t is None else t.to(kernel_device) for t in (x, weight, bias))
    by_torch = act_and_mul(F.linear(x, weight, bias), activation)
    assert_error_is_torchs(kernel.gated_linear(*there, activation), by_torch, act_and_mul(sums, activation))


@pytest.mark.parametrize("cap", [2.0, 30.0])
def test_capped_results_are_as_near_as_the_definitions(kernel_device: torch.device, cap: float) -> None:
    """Of any size, as logits are: of those far beyond the cap, and of small ones."""
    weight, x = randn(130, 64, dtype=torch.float32), randn(5, 64, dtype=torch.float32, seed=1)
    x *= torch.tensor([[1e-3], [0.1], [1.0], [3.0], [0.0]])
    exact = cap * (F.linear(x.double(), weight.double()) / cap).tanh()
    found = kernel.linear(x.to(kernel_device), weight.to(kernel_device), softcap=cap)
    for row in range(len(x)):
        assert_error_is_torchs(found[row], softcap(F.linear(x, weight), cap)[row], exact[row])


def assert_rows_keep_their_bits(product: Any, rows: Tensor, row: Tensor, sizes: tuple[int, ...]) -> None:
    """product(rows) gives `row` the same bits alone and first, in the middle and last among others."""
    alone = product(row.unsqueeze(0))[0]
    for num_rows in sizes:
        places = [0, num_rows // 2, num_rows - 1]
        launch = rows[:num_rows].clone()
        launch[places] = row
        for result in product(launch)[places]:
            assert torch.equal(result, alone), f"another result among {num_rows} rows"


@pytest.mark.parametrize(
    ("dtype", "wide_rows"),
    [(torch.float32, 512), (torch.float16, 512), (torch.float16, 100)],
    ids=["float32", "float16", "float16, two tiles of features to a program"],
)
def test_a_row_keeps_its_bits_among_any_number_of_rows(
    kernel_device: torch.device, small_cuts: None, dtype: torch.dtype, wide_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both partial sums of more than one tile are found by one program: of 130 rows, where tiles grow of 258."""
    monkeypatch.setattr(linear_plan, "WIDE_ROWS", wide_rows)
    width = 4 * linear_plan.LINE // dtype.itemsize - 3
    weight = small_integers(64, width, dtype=dtype).to(kernel_device)
    rows = rounding_between_steps(259, width, dtype=dtype).to(kernel_device)

    def product(x: Tensor) -> Tensor:
        result: Tensor = kernel.linear(x, weight, out_dtype=torch.float32)
        return result

    cut = product(rows[:5])
    assert_rows_keep_their_bits(product, rows, rows[-1], ROWS if wide_rows == 512 else (5, 120, 130, 258))
    monkeypatch.setattr(linear_plan, "PROGRAMS", 1)  # one sum from end to end: the data tell orders apart
    assert not torch.equal(product(rows[:5]), cut)


def test_partial_sums_add_up_alike_whoever_finds_them(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_plan, "MIN_STEPS", 1)
    weight = small_integers(64, 128, dtype=torch.float32).to(kernel_device)
    x = rounding_between_steps(5, 128, dtype=torch.float32).to(kernel_device)
    plan = linear_plan.plan_linear(5, 64, 128, element_size=4, gated=False)
    assert plan.splits == 4 and plan.is_spread
    spread = kernel.linear(x, weight)
    monkeypatch.setattr(kernel, "plan_linear", lambda *_, **__: replace(plan, is_spread=False))
    assert torch.equal(kernel.linear(x, weight), spread)


def test_a_row_of_a_gated_product_keeps_its_bits(kernel_device: torch.device) -> None:
    weight = small_integers(2 * 64, 96, dtype=torch.float32).to(kernel_device) / 64
    rows = rounding_between_steps(max(ROWS) + 1, 96, dtype=torch.float32).to(kernel_device)
    assert_rows_keep_their_bits(lambda x: kernel.gated_linear(x, weight), rows, rows[-1], ROWS)


def test_rows_may_lie_apart(kernel_device: torch.device) -> None:
    weight = randn(64, 40, dtype=torch.float32).to(kernel_device)
    packed = randn(3, 100, dtype=torch.float32, seed=1).to(kernel_device)
    x = packed[:, 30:70]
    assert torch.equal(kernel.linear(x, weight), kernel.linear(x.contiguous(), weight))


def test_the_counters_of_a_cut_product_are_zero_again(kernel_device: torch.device, small_cuts: None) -> None:
    """The next launch, which may be a replay of a graph, counts with them."""
    weight = randn(64, 128, dtype=torch.float32).to(kernel_device)
    x = randn(2, 128, dtype=torch.float32, seed=1).to(kernel_device)
    first = kernel.linear(x, weight)
    assert not arrivals.arrival_counters(1, weight.device).any()
    assert torch.equal(kernel.linear(x, weight), first)


def test_no_rows_give_no_rows(kernel_device: torch.device) -> None:
    weight = torch.ones(6, 8, device=kernel_device)
    assert kernel.linear(weight.new_empty(0, 8), weight).shape == (0, 6)
    assert kernel.gated_linear(weight.new_empty(0, 8), weight).shape == (0, 3)


@pytest.mark.parametrize(
    ("out_features", "in_features", "gated", "element_size", "splits"),
    [
        (6144, 4096, False, 2, 2),  # qkv, o, gate and up, down and head of Llama-3-8B
        (4096, 4096, False, 2, 4),
        (14336, 4096, True, 2, 1),
        (4096, 14336, False, 2, 4),
        (128256, 4096, False, 2, 1),
        (64, 1100, False, 4, 4),
    ],
)
def test_the_order_of_a_sum_is_a_matter_of_the_weight(
    out_features: int, in_features: int, gated: bool, element_size: int, splits: int
) -> None:
    """And spread tiles are never more than there are counters."""
    plans = [
        linear_plan.plan_linear(num_rows, out_features, in_features, element_size=element_size, gated=gated)
        for num_rows in (*range(1, 1200), 8192)
    ]
    (order,) = {(plan.block_k, plan.splits, plan.split_width) for plan in plans}
    assert order[1] == splits and order[2] * (splits - 1) < in_features <= order[2] * splits
    assert all(plan.num_tiles < linear_plan.PROGRAMS for plan in plans if plan.is_spread)


@pytest.mark.parametrize("capacity", [99, 163, 227])
@pytest.mark.parametrize("gated", [False, True])
def test_a_program_fits_the_shared_memory_of_its_gpu(gated: bool, capacity: int) -> None:
    """In KB: of a consumer's, an A100 and an H100; with loads on their way in each of them."""
    for num_rows in (*range(1, 1200), 8192):
        plan = linear_plan.plan_linear(num_rows, 14336, 4096, element_size=2, gated=gated, capacity=capacity * 1024)
        step_bytes = 2 * plan.block_k * (plan.features * (1 + gated) + plan.tokens)
        assert plan.num_stages >= 2 and plan.num_stages * step_bytes <= capacity * 1024


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("op", "out_features", "in_features"),
    [("linear", 6144, 4096), ("linear", 4096, 14336), ("gated_linear", 28672, 4096), ("linear", 128256, 4096)],
)
def test_rows_of_an_8b_model_keep_their_bits(op: str, out_features: int, in_features: int, dtype: torch.dtype) -> None:
    """The instructions for few and for many tokens agree in every bit; no interpreter can tell."""
    weight = (torch.randn(out_features, in_features, device="cuda") / in_features**0.5).to(dtype)
    rows = torch.randn(1089, in_features, device="cuda").to(dtype)
    product = getattr(kernel, op)
    assert_rows_keep_their_bits(lambda x: product(x, weight), rows, rows[-1], (1, 2, 8, 17, 33, 64, 65, 130, 520, 1088))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_engine_asks_for_a_row_in_every_kind_of_program(dtype: torch.dtype) -> None:
    """Of an MLP of 14336 features of 4096: tiles of all sizes, partial sums of `down` spread over programs or not.

    What adds up its own partial sums, as `down` does from 385 rows on, nobody asked at the start.
    """
    asked = set[int]()

    def product(rows: Tensor) -> Tensor:
        asked.add(len(rows))
        return rows

    def kinds(counts: Iterable[int], weight: Tensor, gated: bool) -> set[tuple[int, bool, int]]:
        shape = (len(weight) // (1 + gated), weight.shape[1])
        plans = [linear_plan.plan_linear(n, *shape, element_size=dtype.itemsize, gated=gated) for n in counts]
        return {(plan.tokens, plan.is_spread, plan.features) for plan in plans}

    gate_up, down = (torch.ones(1, 1, dtype=dtype).expand(*size) for size in ((28672, 4096), (4096, 14336)))
    assert _rows_agree(product, [gate_up, down])
    for weight, gated, count, of_float32 in ((gate_up, True, 6, 3), (down, False, 7, 4)):
        there_are = kinds(range(1, 4097), weight, gated)
        assert kinds(asked, weight, gated) == there_are
        assert len(there_are) == (count if dtype == torch.float16 else of_float32)
