"""A mixture of experts in Triton: the reference's routing, its products and sums, and bits that are a row's own."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import linear_plan
from kernels.quantized_weight import QuantizedWeight
from kernels.reference import experts as reference
from kernels.reference.act_and_mul import Activation, LimitedSilu
from kernels.reference.experts import Routing, RoutingRule, Scores
from kernels.words import Kind
from tests.emulated_device import EmulatedDevice
from tests.no_readback import NoReadback
from tests.product_errors import assert_error_is_torchs
from tests.seeded import randn
from tests.test_linear_kernel import rounding_between_steps, small_integers
from tests.test_quantized_weight import on, random_weight

ops = pytest.importorskip("kernels.experts")
products = pytest.importorskip("kernels.experts_linear")
linears = pytest.importorskip("kernels.linear")


def logits_of(num_rows: int, num_experts: int, *, seed: int = 0) -> Tensor:
    """Of few sizes, so that many are equal and no two others are a rounding apart, nor sums of two of their sigmoids.

    Those of a number and its negative add up to 1: groups of such pairs were chosen by how each sigmoid is rounded.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, (num_rows, num_experts), generator=generator) / 2 + 0.125


def to(device: torch.device, routing: Routing) -> Routing:
    return Routing(*(part.to(device) for part in routing))


def experts_of(routing: Routing) -> Tensor:
    """[num_rows, choices]: whom each row goes to."""
    return torch.searchsorted(routing.starts, routing.places, right=True) - 1


def to_experts(chosen: list[list[int]], num_experts: int) -> Routing:
    """Of rows that go to experts as listed, with weights that differ."""
    numbers, choices = torch.tensor(chosen), len(chosen[0])
    logits = torch.full((len(chosen), num_experts), -30.0)
    logits.scatter_(1, numbers, -0.3 * torch.arange(choices).expand_as(numbers))
    return reference.route(logits, RoutingRule(choices, is_normalized=True))


@given(
    num_rows=st.integers(0, 20),
    num_experts=st.sampled_from([1, 2, 3, 5, 8, 13, 60]),
    groups=st.sampled_from([(1, 1), (2, 1), (4, 1), (4, 3), (5, 2)]),  # where so many experts lie in so many
    choices=st.integers(1, 8),
    scores=st.sampled_from(["softmax", "sigmoid"]),
    is_normalized=st.booleans(),
    is_corrected=st.booleans(),
    has_factors=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=30)
def test_rows_go_where_the_reference_sends_them(
    kernel_device: torch.device,
    num_rows: int,
    num_experts: int,
    groups: tuple[int, int],
    choices: int,
    scores: Scores,
    is_normalized: bool,
    is_corrected: bool,
    has_factors: bool,
    seed: int,
) -> None:
    """With many ties, and goings that are looked at in several chunks."""
    if num_experts % groups[0] or num_experts < 2 * groups[0]:
        groups = (1, 1)
    open_to_rows = num_experts // groups[0] * groups[1]
    scale = 2.5 if is_corrected else 1.0
    rule = RoutingRule(min(choices, open_to_rows), is_normalized, scores, scale, *groups)
    logits = logits_of(num_rows, num_experts, seed=seed)
    # Larger than any score, of either sign, and the same of some experts: scores decide among these.
    corrections = 8 * logits_of(1, num_experts, seed=seed + 1)[0].round() if is_corrected else None
    factors = randn(num_experts, dtype=torch.float32, seed=seed) if has_factors else None
    on_device = (None if given is None else given.to(kernel_device) for given in (corrections, factors))
    with pytest.MonkeyPatch.context() as patch, NoReadback():
        patch.setattr(ops, "CHUNK", 16)
        found = to(torch.device("cpu"), ops.route(logits.to(kernel_device), rule, *on_device))
    wanted = reference.route(logits, rule, corrections, factors)
    for name in ("places", "rows", "starts"):
        part, other = getattr(found, name), getattr(wanted, name)
        assert part.dtype == other.dtype and torch.equal(part, other), name
    exact = reference.route(logits.double(), rule, corrections, factors).weights
    if num_rows:
        assert_error_is_torchs(found.weights, wanted.weights, exact)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_rows_whose_experts_are_chosen_elsewhere_are_sorted_as_the_reference_sorts_them(
    kernel_device: torch.device, dtype: torch.dtype
) -> None:
    chosen = logits_of(21, 7, seed=1).argsort(dim=1)[:, :3].contiguous()  # in no order
    weights = randn(21, 3, dtype=torch.float32, seed=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "CHUNK", 16)
        found = ops.sort_by_expert(chosen.to(kernel_device, dtype), weights.to(kernel_device), 9)
    wanted = reference.sort_by_expert(chosen, weights, 9)
    assert torch.equal(experts_of(wanted), chosen)
    for own, theirs in zip(to(torch.device("cpu"), found), wanted, strict=True):
        assert own.dtype == theirs.dtype and torch.equal(own, theirs)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_rows_of_no_numbers_go_to_as_many_experts_as_others(kernel_device: torch.device, scores: Scores) -> None:
    """To other experts each, so that every place has a row: a place that nobody wrote would be read all the same."""
    logits = logits_of(5, 5)
    logits[1], logits[2, :3], logits[3, :3] = float("nan"), float("nan"), float("nan")
    corrections = torch.tensor([-7.0, -1e3, -5.0, -90.0, -3.0], device=kernel_device)
    found = ops.route(logits.to(kernel_device), RoutingRule(3, True, scores), corrections)
    assert found.weights[1:4].isnan().all() and not found.weights[[0, 4]].isnan().any()
    assert torch.equal(experts_of(found)[1:4].cpu(), torch.arange(3).expand(3, 3))
    assert torch.equal(found.places.flatten().sort().values.cpu(), torch.arange(15))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, of the interpreter
def test_scores_too_small_for_a_number_are_weights_of_nothing(kernel_device: torch.device) -> None:
    logits = torch.full((2, 4), -200.0)
    logits[1, 2] = 1.0
    found = ops.route(logits.to(kernel_device), RoutingRule(2, True, "sigmoid", scale=3.0)).weights.cpu()
    assert found.tolist() == [[0.0, 0.0], [3.0, 0.0]]


@given(
    num_rows=st.integers(0, 5),
    width=st.integers(1, 40),
    choices=st.integers(1, 8),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    has_shared=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=30)
def test_results_are_added_in_the_order_of_the_choices_and_a_shared_one_last(
    kernel_device: torch.device,
    num_rows: int,
    width: int,
    choices: int,
    dtype: torch.dtype,
    has_shared: bool,
    seed: int,
) -> None:
    """In every bit, of numbers of very unlike size."""
    if dtype == torch.bfloat16 and kernel_device.type == "cpu":
        dtype = torch.float32  # Triton's interpreter knows no bfloat16
    routing = reference.route(logits_of(num_rows, 9, seed=seed), RoutingRule(choices, is_normalized=False))
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-4, 4, (num_rows * choices, width), generator=generator)
    results = (randn(num_rows * choices, width, dtype=torch.float32, seed=seed) * sizes).to(dtype)
    shared = randn(num_rows, width, dtype=torch.float32, seed=seed + 1).to(dtype) if has_shared else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "BLOCK", 16)
        own = None if shared is None else shared.to(kernel_device)
        found = ops.sum_of_experts(results.to(kernel_device), to(kernel_device, routing), own).cpu()
    assert found.dtype == dtype and torch.equal(found, reference.sum_of_experts(results, routing, shared))


def assert_is_references(
    found: Tensor,
    op: str,
    x: Tensor,
    weights: Tensor,
    routing: Routing,
    biases: Tensor | None = None,
    *activation: Activation,
) -> None:
    """As far off as the reference is in the dtype of x."""
    by_torch, exact = (
        getattr(reference, op)(
            x.to(dtype),
            weights.to(dtype).unbind(),
            routing,
            None,
            None if biases is None else biases.to(dtype),
            *activation,
        )
        for dtype in (x.dtype, torch.float64)
    )
    assert_error_is_torchs(found, by_torch, exact)


# Whom rows go to, of five: experts with no rows, with one, and with more than a tile holds.
CASES = {
    "one row": [[3, 1]],
    "some without rows": [[0, 4], [4, 0], [0, 2]],
    "all to the last": [[4]] * 20,
    "many": [[0, 2, 4], [2, 0, 3], [2, 4, 3]] * 13,
}


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, of the interpreter, where a gelu is nothing
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu", LimitedSilu(0.5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_error_of_experts_products_is_that_of_torch(
    kernel_device: torch.device, small_cuts: None, dtype: torch.dtype, case: str, activation: Activation
) -> None:
    if dtype == torch.bfloat16 and kernel_device.type == "cpu":
        pytest.skip("Triton's interpreter knows no bfloat16")
    routing = to_experts(CASES[case], 5)
    there, num_rows = to(kernel_device, routing), len(routing.places)
    up, x = randn(5, 2 * 70, 101, dtype=dtype) / 4, randn(num_rows, 101, dtype=dtype, seed=1)
    down, hidden = randn(5, 66, 72, dtype=dtype, seed=2), randn(len(routing.rows), 72, dtype=dtype, seed=3)
    cases = (("gated_linear_of_experts", x, up, (activation,)), ("linear_of_experts", hidden, down, ()))
    for op, rows, weights, gate in cases:
        biases = (
            randn(5, weights.shape[1], dtype=dtype, seed=4) * 3 if activation == "clamped_swiglu" else None
        )  # gpt-oss's
        on_device = (None if given is None else given.to(kernel_device) for given in (rows, weights, biases))
        own_rows, own_weights, own_biases = on_device
        found = getattr(products, op)(own_rows, own_weights.unbind(), there, own_biases, *gate)
        assert_is_references(found, op, rows, weights, routing, biases, *gate)


def quantized_experts(
    num_experts: int,
    out_features: int,
    in_features: int,
    kind: Kind,
    group_size: int | None,
    device: torch.device,
) -> list[QuantizedWeight]:
    """Views of one weight whose rows are all the experts'."""
    rows = num_experts * out_features
    whole = on(device, random_weight(rows, in_features, kind, group_size=group_size, dtype=torch.float32))
    return [whole.rows(slice(expert * out_features, (expert + 1) * out_features)) for expert in range(num_experts)]


@pytest.mark.parametrize("group_size", [None, 32])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_weights_in_8_bits_are_multiplied_by(
    kernel_device: torch.device, small_cuts: None, kind: Kind, group_size: int | None
) -> None:
    routing = to_experts(CASES["many"], 5)
    there, x = to(kernel_device, routing), randn(39, 101, dtype=torch.float32)
    weights = quantized_experts(5, 2 * 35, 101, kind, group_size, kernel_device)
    dense = torch.stack([weight.exact().cpu() for weight in weights])
    for op, rows in (("linear_of_experts", x[routing.rows]), ("gated_linear_of_experts", x)):
        assert_is_references(getattr(products, op)(rows.to(kernel_device), weights, there), op, rows, dense, routing)


def test_a_product_that_nothing_gates_may_be_of_rows(kernel_device: torch.device, small_cuts: None) -> None:
    routing = to(kernel_device, to_experts(CASES["many"], 5))
    x, weights = (randn(*size, dtype=torch.float32).to(kernel_device) for size in ((39, 101), (5, 66, 101)))
    expected = products.linear_of_experts(x[routing.rows], weights.unbind(), routing)
    assert torch.equal(products.linear_of_experts(x, weights.unbind(), routing, of_rows=True), expected)


@cache
def operands_apart(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """Rows that lie apart, of which an example has the first ones, and weights and biases of three experts."""
    width = 4 * linear_plan.LINE // dtype.itemsize - 3
    rows = rounding_between_steps(30, width + 8, dtype=dtype).to(device)[:, :width]
    weights = (small_integers(3, 66, width, dtype=dtype) / 64).to(device).unbind()
    return rows, weights, randn(3, 66, dtype=dtype, seed=1).to(device)


@cache
def products_alone(device: torch.device, dtype: torch.dtype, row: int, expert: int) -> tuple[Tensor, Tensor]:
    """Of one row with one weight, and gated: most examples ask for the same ones."""
    rows, weights, biases = operands_apart(device, dtype)
    own = rows[row : row + 1], weights[expert], biases[expert]
    return linears.linear(*own)[0], linears.gated_linear(*own, "clamped_swiglu")[0]


@given(
    chosen=st.lists(st.permutations(range(3)).map(lambda order: order[:2]), min_size=1, max_size=30),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    wide_rows=st.sampled_from([512, 4]),
)
@settings(max_examples=25)
def test_a_product_has_the_bits_of_the_row_alone_with_the_weight_alone(
    kernel_device: torch.device, chosen: list[list[int]], dtype: torch.dtype, wide_rows: int
) -> None:
    """Of rows that lie apart, where kernels.linear spreads partial sums; one feature tile to a program, and two."""
    rows, weights, biases = operands_apart(kernel_device, dtype)
    rows, routing = rows[: len(chosen)], to(kernel_device, to_experts(chosen, 3))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("MIN_STEPS", 1), ("PROGRAMS", 4), ("LATE_WIDE_ROWS", wide_rows)):
            patch.setattr(linear_plan, name, value)
        found = products.linear_of_experts(rows[routing.rows], weights, routing, biases)
        gated = products.gated_linear_of_experts(rows, weights, routing, biases, "clamped_swiglu")
        for row, (experts, places) in enumerate(zip(chosen, routing.places.tolist(), strict=True)):
            for expert, place in zip(experts, places, strict=True):
                alone, gated_alone = products_alone(kernel_device, dtype, row, expert)
                assert torch.equal(found[place], alone) and torch.equal(gated[place], gated_alone)


def test_an_expert_writes_to_its_own_places_alone(emulated_gpu: EmulatedDevice) -> None:
    """Those behind are others', whose programs may have been there before; here nobody's, and as empty as at first."""
    weights = randn(2, 6, 8, dtype=torch.float32).to("cuda").unbind()
    routing = to(torch.device("cuda"), to_experts([[0], [0], [1], [1], [1]], 2))
    routing.starts.copy_(torch.tensor([0, 2, 3]).to("cuda"))
    x = randn(5, 8, dtype=torch.float32).to("cuda")
    for op in (products.linear_of_experts, products.gated_linear_of_experts):
        assert torch.equal(op(x, weights, routing).isnan().all(dim=1).cpu(), torch.tensor([False] * 3 + [True] * 2))


def mixture(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    routing = ops.route(linears.linear(x, router, out_dtype=torch.float32), RoutingRule(2, is_normalized=True))
    hidden = products.gated_linear_of_experts(x, up.unbind(), routing)
    results: Tensor = ops.sum_of_experts(products.linear_of_experts(hidden, down.unbind(), routing), routing)
    return results


def weights_of_mixture(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Router, gates and ups, and downs of five experts."""
    up, down = randn(5, 2 * 40, 48, dtype=dtype, seed=2) / 7, randn(5, 48, 40, dtype=dtype, seed=3) / 7
    return randn(5, 48, dtype=dtype, seed=1), up, down


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("company", ["like it", "of all kinds"])
def test_a_row_keeps_its_bits_whoever_else_goes_to_its_experts(
    dtype: torch.dtype, company: str, emulated_gpu: EmulatedDevice
) -> None:
    """First, in the middle and last, of rows that go where it goes and of rows that go anywhere."""
    weights = [weight.to("cuda") for weight in weights_of_mixture(dtype)]
    rows = randn(131, 48, dtype=dtype).to("cuda")
    if company == "like it":
        rows = rows / 100 + rows[-1:]
    alone = mixture(rows[-1:], *weights)[0]
    for num_rows in (2, 5, 17, 33, 130):
        places = [0, num_rows // 2, num_rows - 1]
        launch = rows[:num_rows].clone()
        for place in places:
            launch[place] = rows[-1]
        together = mixture(launch, *weights)
        assert all(torch.equal(together[place], alone) for place in places), num_rows


def test_a_captured_mixture_follows_rows_to_other_experts(emulated_gpu: EmulatedDevice) -> None:
    weights = [weight.to("cuda") for weight in weights_of_mixture(torch.float32)]
    x, other = (randn(20, 48, dtype=torch.float32, seed=seed).to("cuda") for seed in (0, 1))
    wanted = [mixture(rows, *weights) for rows in (x, other)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mixture(x, *weights)
    for rows, result in zip((x.clone(), other), wanted, strict=True):
        x.copy_(rows)
        graph.replay()
        assert torch.equal(out, result)


def test_no_rows_give_no_rows(kernel_device: torch.device) -> None:
    weights = [weight.to(kernel_device) for weight in weights_of_mixture(torch.float32)]
    assert mixture(torch.empty(0, 48, device=kernel_device), *weights).shape == (0, 48)


def test_experts_lie_at_one_distance(kernel_device: torch.device) -> None:
    storage = randn(7, 16, 40, dtype=torch.float32).to(kernel_device)
    assert products.distance(storage.unbind()) == 16 * 40 and products.distance(storage[:1].unbind()) == 0
    assert products.distance(storage[::2, 3:9].unbind()) == 2 * 16 * 40
    for views in ([storage[0], storage[1], storage[3]], [storage[0], storage[1, :8]], storage[:2, :, :8].unbind()):
        with pytest.raises(AssertionError):
            products.distance(views)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_experts", [8, 128])
def test_rows_of_large_experts_keep_their_bits(num_experts: int, dtype: torch.dtype) -> None:
    """And those that kernels.linear finds for them; no interpreter can tell."""
    up = (torch.randn(num_experts, 2 * 768, 2048, device="cuda") / 2048**0.5).to(dtype).unbind()
    down = (torch.randn(num_experts, 2048, 768, device="cuda") / 768**0.5).to(dtype).unbind()
    rows, logits = torch.randn(4097, 2048, device="cuda").to(dtype), torch.randn(4097, num_experts, device="cuda")
    rule = RoutingRule(8, is_normalized=True)
    own = experts_of(ops.route(logits[-1:], rule))[0].tolist()
    hidden = torch.cat([linears.gated_linear(rows[-1:], up[expert]) for expert in own])
    results = torch.cat([linears.linear(hidden[i : i + 1], down[expert]) for i, expert in enumerate(own)])
    sums = []
    for num_rows in (1, 2, 8, 33, 130, 520, 4097):
        routing = ops.route(logits[-num_rows:].contiguous(), rule)
        found = products.gated_linear_of_experts(rows[-num_rows:], up, routing)
        assert torch.equal(found[routing.places[-1]], hidden), num_rows
        found = products.linear_of_experts(found, down, routing)
        assert torch.equal(found[routing.places[-1]], results), num_rows
        sums.append(ops.sum_of_experts(found, routing)[-1])
    assert all(torch.equal(total, sums[0]) for total in sums)
