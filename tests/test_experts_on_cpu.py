"""A mixture of experts on a CPU: the reference's routing, products and sums, and bits that are a row's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu.experts import route, sort_by_expert, sum_of_experts
from kernels.cpu.experts_linear import PanelsOfExperts, gated_linear_of_experts, linear_of_experts
from kernels.cpu.linear import linear
from kernels.cpu.panels import Panels, Weight, can_pack, pack, unpack
from kernels.cpu.recording import Pool, recording
from kernels.quantized_weight import num_groups, quantize
from kernels.reference import experts as reference
from kernels.reference.act_and_mul import Activation, LimitedSilu
from kernels.reference.experts import Routing, RoutingRule, Scores
from kernels.words import Kind
from runner.engine.experts import split_rows
from tests.seeded import randn

pytestmark = pytest.mark.skipif(not can_pack(torch.zeros(16, 16)), reason="this CPU has no products from panels")
HIDDEN, INNER = 64, 48


def panels(whole: Weight, num_experts: int) -> PanelsOfExperts:
    """Of each expert, as an engine holds them."""
    packed = [pack(part) for part in split_rows(whole, num_experts)]
    assert all(isinstance(weight, Panels) for weight in packed)
    return PanelsOfExperts(packed)  # type: ignore[arg-type]


def routing_of(num_rows: int, num_experts: int, choices: int) -> Routing:
    """Most rows go to the first expert, and nobody to the last."""
    logits = randn(num_rows, num_experts)
    logits[:, 0] += 2.0
    logits[:, -1] -= 99.0 * (num_experts > choices)
    return reference.route(logits, RoutingRule(choices, is_normalized=True))


@given(data=st.data())
def test_rows_go_to_the_experts_of_highest_scores_of_equals_to_the_first(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 70))
    choices, num_rows = data.draw(st.integers(1, min(8, num_experts))), data.draw(st.integers(0, 9))
    is_corrected, seed = data.draw(st.booleans()), data.draw(st.integers(0, 99))
    scores: Scores = data.draw(st.sampled_from(["softmax", "sigmoid"]))
    num_groups = data.draw(
        st.sampled_from([n for n in (1, 2, 3, 4, 8) if (num_experts % n == 0 and num_experts >= 2 * n) or n == 1])
    )
    kept = data.draw(st.integers(-(-choices * num_groups // num_experts), num_groups))
    scale = 2.5 if is_corrected else 1.0
    rule = RoutingRule(choices, data.draw(st.booleans()), scores, scale, num_groups, kept)
    coarse = data.draw(st.sampled_from([1.0, 2.0, 1000.0]))  # many logits are equal
    logits = (coarse * randn(num_rows, num_experts, seed=seed)).round() / coarse
    # Larger than any score, of either sign, and the same of some experts: scores decide among these.
    corrections = (4 * randn(num_experts, seed=seed + 1)).round() if is_corrected else None
    factors = randn(num_experts, seed=seed + 2) if data.draw(st.booleans()) else None
    expected, found = (own(logits, rule, corrections, factors) for own in (reference.route, route))
    for own, theirs in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(own, theirs)
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-5, atol=1e-7)


def test_scores_too_small_for_a_number_are_weights_of_nothing() -> None:
    logits = torch.full((2, 4), -200.0)
    logits[1, 2] = 1.0
    found = route(logits, RoutingRule(2, True, "sigmoid", scale=3.0)).weights
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.0], [3.0, 0.0]]), rtol=1e-6, atol=1e-9)


def test_rows_whose_experts_are_chosen_elsewhere_are_sorted_as_the_reference_sorts_them() -> None:
    chosen, weights = randn(21, 7).argsort(dim=1)[:, :3].contiguous(), randn(21, 3, seed=1)  # in no order
    wanted = reference.sort_by_expert(chosen, weights, 9)
    assert torch.equal(torch.searchsorted(wanted.starts, wanted.places, right=True) - 1, chosen)
    for own, theirs in zip(sort_by_expert(chosen, weights, 9), wanted, strict=True):
        assert own.dtype == theirs.dtype and torch.equal(own, theirs)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_rows_of_no_numbers_go_to_as_many_experts_as_others(scores: Scores) -> None:
    """To other experts each: an expert has room for every row once."""
    logits = randn(5, 4)
    logits[1], logits[2, 3] = float("nan"), float("nan")
    found = route(logits, RoutingRule(3, True, scores), torch.tensor([-7.0, -1e3, -5.0, -90.0]))
    assert torch.equal(found.places.flatten().sort().values, torch.arange(15))
    assert found.starts.diff().max() <= 5
    assert found.weights[[1, 2]].isnan().all(dim=1).all() and not found.weights[[0, 3, 4]].isnan().any()
    for row, first in ((1, 0), (2, 3)) if scores == "sigmoid" else ((1, 0), (2, 0)):
        experts = torch.searchsorted(found.starts, found.places[row], right=True) - 1
        assert len(set(experts.tolist())) == 3 and experts[0] == first


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu", LimitedSilu(0.5)], ids=str)
@pytest.mark.parametrize("shape", [(1, 4, 2), (5, 7, 3), (20, 3, 2), (40, 2, 1)], ids=str)  # rows, experts, choices
@pytest.mark.parametrize("held", [None, "int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_results_are_those_of_each_places_expert(
    dtype: torch.dtype, held: Kind | None, shape: tuple[int, int, int], activation: Activation
) -> None:
    num_rows, num_experts, choices = shape
    routing = routing_of(num_rows, num_experts, choices)
    x = randn(num_rows, HIDDEN, dtype=dtype, seed=1)
    wholes: list[Weight] = [
        (randn(num_experts * rows, columns, seed=seed) / columns**0.5).to(dtype)
        for rows, columns, seed in ((2 * INNER, HIDDEN, 2), (HIDDEN, INNER, 3))
    ]
    if held is not None:
        wholes = [quantize(unpack(whole), held) for whole in wholes]
    gate_up, down = (panels(whole, num_experts) for whole in wholes)
    exact = [list(unpack(whole).double().chunk(num_experts)) for whole in wholes]
    biases: list[Tensor] | list[None] = [None, None]
    if activation == "clamped_swiglu":  # gpt-oss's
        biases = [4 * randn(num_experts, width, dtype=dtype, seed=4) for width in (2 * INNER, HIDDEN)]
    exact_biases = [None if own is None else own.double() for own in biases]
    inner = gated_linear_of_experts(x, gate_up, routing, biases[0], activation)
    outer = linear_of_experts(inner, down, routing, biases[1])
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    expected = reference.gated_linear_of_experts(x.double(), exact[0], routing, None, exact_biases[0], activation)
    assert_near(inner, expected, tolerance)
    expected = reference.linear_of_experts(inner.double(), exact[1], routing, None, exact_biases[1])
    assert_near(outer, expected, tolerance)
    for shared in (None, randn(num_rows, HIDDEN, dtype=dtype, seed=6)):
        sums = sum_of_experts(outer, routing, shared)
        assert torch.equal(sums, reference.sum_of_experts(outer, routing, shared))


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    largest = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize("held", ["dense", "dense, biases", "int8", "float8 in groups of 128", "int8, biases"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_place_has_the_bits_of_its_experts_product_of_it_alone(
    num_threads: int, dtype: torch.dtype, held: str
) -> None:
    """Bug told here: threads that computed experts of few rows and of many wrote to each other's room for sums."""
    num_experts, in_features, out_features = 6, 1400, 1024  # so large that many rows take turns on parts of a panel
    dense = randn(num_experts * out_features, in_features, dtype=dtype)
    whole: Weight = dense
    biases = randn(num_experts, out_features, dtype=dtype, seed=5) if "biases" in held else None
    if held.startswith("int8"):
        whole = quantize(dense, "int8")
    elif held.startswith("float8"):
        groups = 1 + 0.1 * randn(len(dense), num_groups(in_features, 128)).abs()
        whole = replace(quantize(dense, "fp8"), scales=groups, group_size=128)
    weights = panels(whole, num_experts)
    for num_rows in (1, 90):
        routing = routing_of(num_rows, num_experts, 2)
        starts = routing.starts.tolist()
        assert starts[-2] == starts[-1], "nobody goes to the last expert"
        x = randn(num_rows, in_features, dtype=dtype, seed=1).index_select(0, routing.rows)
        alone = torch.cat(
            [
                linear(x[place : place + 1], weights[expert], None if biases is None else biases[expert])
                for expert in range(num_experts)
                for place in range(starts[expert], starts[expert + 1])
            ]
        )
        for _ in range(3):
            assert torch.equal(linear_of_experts(x, weights, routing, biases), alone)


def test_a_recorded_step_follows_another_routing() -> None:
    num_experts = 6
    gate_up = panels(randn(num_experts * 2 * INNER, HIDDEN) / 8, num_experts)
    down = panels(randn(num_experts * HIDDEN, INNER) / 8, num_experts)
    logits, x, corrections = randn(9, num_experts), randn(9, HIDDEN), randn(num_experts, seed=1)
    factors = randn(num_experts, seed=2)

    def compute() -> Tensor:
        routing = route(logits, RoutingRule(2, is_normalized=True, scores="sigmoid"), corrections, factors)
        inner = gated_linear_of_experts(x, gate_up, routing)
        return sum_of_experts(linear_of_experts(inner, down, routing), routing, x)

    with recording(Pool()) as recorded:
        out = compute()
    program = recorded.program()
    for seed in range(3):
        logits.copy_(3 * randn(9, num_experts, seed=seed))
        x.copy_(randn(9, HIDDEN, seed=seed))
        program()
        assert torch.equal(out, compute())
