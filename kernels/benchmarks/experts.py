"""A mixture of experts: where rows go, products with their experts' weights, and the sum.

Of Qwen3-30B-A3B's shape; products of gpt-oss 20B's, whose experts have biases and gates that are cut off, dense and in
fp4; what is GLM-4.5-Air's own, scores that are corrected and an expert that all rows go to; and Gemma 4
26B-A4B's, gates by gelu and factors of experts' weights.

What comes from memory are the weights of the experts that rows go to, each once. torch's own way is a product for each
expert, of which the host must know who its rows are: it is not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import experts, experts_linear
from kernels.benchmarks.case import COMPANY, Case, Setting, Work, check_equal, check_error, check_row_bits, name_of
from kernels.benchmarks.weights import copies_of, num_bytes_of, random_codes
from kernels.quantized_weight import FP4_GROUP, QuantizedWeight
from kernels.reference import experts as reference
from kernels.reference.act_and_mul import Activation
from kernels.reference.experts import Routing, RoutingRule

ROWS = (1, 8, 64, 512)
SHAPE = {"num_experts": 128, "choices": 8, "hidden": 2048, "inner": 768}
BIASED_SHAPE = {"num_experts": 32, "choices": 4, "hidden": 2880, "inner": 2880}
CORRECTED_SHAPE = {"num_experts": 128, "choices": 8, "hidden": 4096}
GEMMA_SHAPE = {"num_experts": 128, "choices": 8, "hidden": 2816, "inner": 704}
SMALL_SHAPE = {"num_experts": 5, "choices": 2, "hidden": 70, "inner": 40}
SMALL_PACKED_SHAPE = {**SMALL_SHAPE, "hidden": 96, "inner": 64}

Product = Callable[..., Tensor]


def cases(setting: Setting) -> list[Case]:
    sizes = (5,) if setting.is_small else ROWS
    shape, biased, packed, corrected, gemma = SHAPE, BIASED_SHAPE, BIASED_SHAPE, CORRECTED_SHAPE, GEMMA_SHAPE
    if setting.is_small:
        shape, biased, packed, corrected, gemma = SMALL_SHAPE, SMALL_SHAPE, SMALL_PACKED_SHAPE, SMALL_SHAPE, SMALL_SHAPE
    prepares: dict[str, tuple[Callable[..., Work], dict[str, int]]] = {
        "gate_up": (partial(_prepare_products, gated=True), shape),
        "down": (partial(_prepare_products, gated=False), shape),
        "gate_up with biases": (partial(_prepare_products, gated=True, has_biases=True), biased),
        "down with biases": (partial(_prepare_products, gated=False, has_biases=True), biased),
        "gate_up in fp4": (partial(_prepare_products, gated=True, has_biases=True, is_fp4=True), packed),
        "down in fp4": (partial(_prepare_products, gated=False, has_biases=True, is_fp4=True), packed),
        "route": (_prepare_route, shape),
        "sum": (_prepare_sum, shape),
        "route, corrected": (partial(_prepare_route, is_corrected=True), corrected),
        "sum, one shared": (partial(_prepare_sum, has_shared=True), corrected),
        "gate_up by gelu": (partial(_prepare_products, gated=True, gate="gelu_tanh"), gemma),
        "route, with factors": (partial(_prepare_route, has_factors=True), gemma),
    }
    return [
        Case(
            op="experts",
            label=f"{name}, {num_rows} rows to {own['choices']} of {own['num_experts']} experts",
            dtype=name_of(setting.dtype),
            prepare=partial(prepare, setting, num_rows, **own),
        )
        for name, (prepare, own) in prepares.items()
        for num_rows in sizes
    ]


def _routing(setting: Setting, num_rows: int, num_experts: int, choices: int) -> Routing:
    logits = setting.normal(num_rows, num_experts, seed=3, dtype=torch.float32)
    return reference.route(logits, RoutingRule(choices, is_normalized=True))


def _prepare_products(
    setting: Setting,
    num_rows: int,
    *,
    gated: bool,
    has_biases: bool = False,
    is_fp4: bool = False,  # else weights are dense
    gate: Activation = "silu",
    num_experts: int,
    choices: int,
    hidden: int,
    inner: int,
) -> Work:
    out_features, in_features = (2 * inner, hidden) if gated else (hidden, inner)
    routing = _routing(setting, num_rows, num_experts, choices)
    x = setting.normal(num_rows if gated else num_rows * choices, in_features, seed=0)
    dense: Tensor = setting.normal(num_experts * out_features, in_features, seed=1).div_(in_features**0.5)
    whole: Tensor | QuantizedWeight = dense
    if is_fp4:
        whole = random_codes(dense, "fp4", FP4_GROUP)
        dense = whole.dense()
    biases = setting.normal(num_experts, out_features, seed=2) if has_biases else None
    activation: dict[str, Any] = {"activation": "clamped_swiglu" if has_biases else gate} if gated else {}
    product: Product = experts_linear.gated_linear_of_experts if gated else experts_linear.linear_of_experts
    ours = partial(product, biases=biases, **activation)
    in_torch: Product = reference.gated_linear_of_experts if gated else reference.linear_of_experts
    theirs = partial(in_torch, tile=None, **activation)

    def parts(weight: Tensor | QuantizedWeight) -> list[Any]:
        starts = range(0, num_experts * out_features, out_features)
        cuts = [slice(start, start + out_features) for start in starts]
        return [weight[cut] if isinstance(weight, Tensor) else weight.rows(cut) for cut in cuts]

    def of_row_slice(rows: slice) -> Tensor:
        """What becomes of some of COMPANY rows where there are no others, added up over their experts."""
        logits = setting.normal(COMPANY, num_experts, seed=3, dtype=torch.float32)[rows]
        own = reference.route(logits, RoutingRule(choices, is_normalized=True))
        states = setting.normal(COMPANY, in_features, seed=4)[rows]
        states = states if gated else states.index_select(0, own.rows)
        return reference.sum_of_experts(ours(states, parts(whole), own), own)

    def check() -> list[str]:
        found, by_torch = ours(x, parts(whole), routing), theirs(x, parts(dense), routing, biases=biases)
        exact_biases = None if biases is None else biases.double()
        exact_weight = dense.double() if isinstance(whole, Tensor) else whole.exact().double()
        exact = theirs(x.double(), parts(exact_weight), routing, biases=exact_biases)
        passed = [check_error(found, by_torch, exact)]
        if not setting.is_interpreted:  # there a product is a BLAS's, whose order of summation is its own
            passed.append(check_row_bits(of_row_slice, COMPANY))
        return passed

    num_met = int((routing.starts.diff() > 0).sum())
    num_weight_bytes = num_met * num_bytes_of(whole) // num_experts
    copies = copies_of(setting, whole, num_weight_bytes)
    num_places = num_rows * choices
    return Work(
        check=check,
        calls=[partial(ours, x, experts_linear.ExpertsInMemory.of(parts(own)), routing) for own in copies],
        num_bytes=num_weight_bytes + x.nbytes + num_places * out_features // (1 + gated) * setting.dtype.itemsize,
        comes_from=setting.comes_from(num_weight_bytes),
    )


def _prepare_route(
    setting: Setting,
    num_rows: int,
    *,
    num_experts: int,
    choices: int,
    is_corrected: bool = False,
    has_factors: bool = False,
    **_: int,
) -> Work:
    logits = setting.normal(num_rows, num_experts, seed=3, dtype=torch.float32)
    corrections, factors = (
        setting.normal(num_experts, seed=seed, dtype=torch.float32) if is_given else None
        for seed, is_given in ((4, is_corrected), (5, has_factors))
    )
    rule = RoutingRule(choices, is_normalized=True, scores="sigmoid" if is_corrected else "softmax")
    call = partial(experts.route, logits, rule, corrections, factors)

    def check() -> list[str]:
        found, wanted = call(), reference.route(logits, rule, corrections, factors)
        for what, own, theirs in zip(Routing._fields[1:], found[1:], wanted[1:], strict=True):
            check_equal(what, own, theirs)
        exact = reference.route(logits.double(), rule, corrections, factors)
        return ["equal", check_error(found.weights, wanted.weights, exact.weights)]

    num_bytes = logits.nbytes + num_rows * choices * (4 + 8 + 8) + 8 * (num_experts + 1)
    copies = setting.copies(num_bytes, logits)
    return Work(
        check=check,
        calls=[partial(experts.route, own, rule, corrections, factors) for (own,) in copies],
        num_bytes=num_bytes,
        comes_from=setting.comes_from(num_bytes),
    )


def _prepare_sum(
    setting: Setting, num_rows: int, *, num_experts: int, choices: int, hidden: int, has_shared: bool = False, **_: int
) -> Work:
    routing = _routing(setting, num_rows, num_experts, choices)
    results = setting.normal(num_rows * choices, hidden, seed=0)
    shared = setting.normal(num_rows, hidden, seed=1) if has_shared else None
    num_bytes = results.nbytes * (choices + 1 + has_shared) // choices
    copies = setting.copies(num_bytes, results, *([] if shared is None else [shared]))

    def check() -> list[str]:
        found = experts.sum_of_experts(results, routing, shared)
        by_torch = reference.sum_of_experts(results, routing, shared)
        exact = results.double().index_select(0, routing.places.flatten()).view(num_rows, choices, hidden)
        whole = (exact * routing.weights.double().unsqueeze(2)).sum(dim=1)
        return [check_error(found, by_torch, whole if shared is None else whole + shared.double())]

    return Work(
        check=check,
        calls=[partial(experts.sum_of_experts, own, routing, *beside) for own, *beside in copies],
        num_bytes=num_bytes,
        comes_from=setting.comes_from(num_bytes),
    )
