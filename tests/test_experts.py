"""Mixtures of experts through the whole engine: no method, schedule, rank or way to hold weights changes a token.

How accurate they are tests/test_family_logits.py says, and tests/test_row_invariance.py that a row keeps its bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.cpu.panels import Panels
from kernels.quantized_weight import QuantizedWeight
from runner.config import SpeculativeConfig
from runner.engine.decoder import Decoder
from runner.engine.experts import Experts
from runner.engine.mlp import MLP
from runner.engine.request import Request
from runner.llm import LLM
from runner.ranks.ranks import Ranks
from tests.conftest import TARGET_CONFIG, Engines, complete
from tests.emulated_device import EmulatedDevice
from tests.other_families import FAMILIES
from tests.product_bits import weights_asked_of_a_gpu
from tests.rank_threads import in_ranks
from tests.test_emulated_gpu import DRAFT_MODEL, DRAWN, GPU, GREEDY, SMALL
from tests.test_emulated_gpu import PROMPTS as SHORT_PROMPTS
from tests.test_losslessness import (
    METHODS,
    PARAMS,
    PROMPTS,
    ROOMY,
    SCHEDULES,
    answers,
    counts,
    method_config,
    tell_test_proposers,
)
from tests.test_row_invariance import ERNIE, EXPERTS

MIXTRAL: dict[str, Any] = {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}
GLM = FAMILIES["glm4_moe"]
TREE = {"speculative_token_tree": "dynamic"}


@pytest.fixture(scope="module")
def plain(engines: Engines) -> list[Request]:
    return complete(engines(architecture=EXPERTS, **ROOMY), PROMPTS, PARAMS)[0]


def experts_of(llm: LLM) -> list[Experts]:
    model = llm.engine.target.model
    assert isinstance(model, Decoder)
    return [layer.mlp for layer in model.layers if isinstance(layer.mlp, Experts)]


def test_the_target_is_a_mixture_that_keeps_the_promise_in_whole_steps(engines: Engines) -> None:
    llm = engines(architecture=EXPERTS, **ROOMY)
    assert llm.engine.target.is_row_invariant and len(experts_of(llm)) == 2
    metrics = complete(llm, PROMPTS, PARAMS)[1]
    assert metrics.steps_in_parts.total() < metrics.num_decoding_steps / 2


@pytest.mark.parametrize("method", METHODS)
def test_a_method_changes_no_token(engines: Engines, plain: list[Request], method: str) -> None:
    tell_test_proposers(plain)
    requests, metrics = complete(engines(method_config(method, 4), architecture=EXPERTS, **ROOMY), PROMPTS, PARAMS)
    assert answers(requests) == answers(plain)
    assert counts(metrics)[1] > 0


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
@pytest.mark.parametrize("schedule", ["few blocks", "three at a time", "one request at a time"])
def test_the_schedule_changes_no_token(engines: Engines, plain: list[Request], schedule: str, method: str) -> None:
    num_tokens, keys = (5, TREE) if method == "eagle3" else (4, {})
    llm = engines(method_config(method, num_tokens, **keys), architecture=EXPERTS, **SCHEDULES[schedule])
    assert answers(complete(llm, PROMPTS, PARAMS)[0]) == answers(plain)


def test_an_engine_over_the_same_weights_leaves_another_ones_recorded_steps_alone() -> None:
    """Bug told here: they read where experts lie from a table that went with the first engine's view of the weights."""
    shape = {**TARGET_CONFIG, **EXPERTS}
    config = SpeculativeConfig.from_engine_args("dummy", load_format="dummy", hf_config=shape, device="cpu")
    first = LLM.from_config(config)
    expected = answers(complete(first, PROMPTS, PARAMS)[0])
    tables = [
        weights.panels for experts in experts_of(first) for weights in (experts.gate_up_projs, experts.down_projs)
    ]
    second = LLM.from_config(config, first.engine.target_info)
    kept = [weights.panels for experts in experts_of(second) for weights in (experts.gate_up_projs, experts.down_projs)]
    assert [id(own) for own in kept] == [id(own) for own in tables]
    assert answers(complete(first, PROMPTS, PARAMS)[0]) == expected


@pytest.mark.parametrize("architecture", [ERNIE, GLM], ids=lambda own: own["model_type"])
def test_in_bfloat16_neither_methods_nor_schedules_change_a_token(
    engines: Engines, architecture: dict[str, Any]
) -> None:
    """ERNIE's router is float32: rows are widened for it, in recorded steps too."""
    args: dict[str, Any] = {"architecture": architecture, "dtype": "bfloat16"}
    llm = engines(**args, **ROOMY)
    requests, metrics = complete(llm, PROMPTS, PARAMS)
    assert llm.engine.target.is_row_invariant and metrics.steps_in_parts.total() < metrics.num_decoding_steps / 2
    assert (experts_of(llm)[0].router.dtype == torch.float32) == (architecture is ERNIE)
    for method, schedule in (("draft_model", "few blocks"), ("mtp", "three at a time")):
        found, _ = complete(engines(method_config(method, 3), **args, **SCHEDULES[schedule]), PROMPTS, PARAMS)
        assert answers(found) == answers(requests)


@pytest.mark.parametrize(("architecture", "num_asked"), [(GLM, 12), (FAMILIES["deepseek_v3"], 18)])
def test_a_gpu_is_asked_at_the_start_for_every_product_of_both_kinds_of_layers(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, architecture: dict[str, Any], num_asked: int
) -> None:
    """A dense first layer's, a router's, a shared expert's and those of heads too."""
    model = engines(architecture=architecture, **ROOMY).engine.target.model
    assert isinstance(model, Decoder)
    asked = weights_asked_of_a_gpu(monkeypatch, model.sample_layers, [model.lm_head])
    dense, mixed = model.layers
    assert isinstance(dense.mlp, MLP) and isinstance(mixed.mlp, Experts) and mixed.mlp.shared is not None
    weights = [model.lm_head, mixed.mlp.router, *dense.product_weights, *mixed.product_weights]
    assert len(weights) == num_asked and asked == sorted(map(id, weights))


@pytest.mark.parametrize("numbers", ["int8", "fp8"])
def test_experts_in_8_bits_change_no_token_of_a_method_and_the_router_stays_dense(
    engines: Engines, numbers: str
) -> None:
    plain, drafting = (
        engines(method, architecture=MIXTRAL, quantization=numbers, **ROOMY)
        for method in (None, method_config("draft_model", 4))
    )
    for experts in experts_of(plain):
        held = [*experts.gate_up_projs, *experts.down_projs]
        assert len(held) == 6 and all(isinstance(weight, Panels | QuantizedWeight) for weight in held)
        assert {weight.kind for weight in held} == {numbers}  # type: ignore[union-attr]
        assert experts.router.dtype == torch.float32 and getattr(experts.router, "scales", None) is None
    expected = complete(plain, PROMPTS, PARAMS)[0]
    requests, metrics = complete(drafting, PROMPTS, PARAMS)
    assert answers(requests) == answers(expected) and counts(metrics)[1] > 0


@pytest.mark.parametrize("architecture", [EXPERTS, MIXTRAL], ids=["qwen3_moe", "mixtral"])
@pytest.mark.parametrize(
    "method",
    [None, DRAFT_MODEL, {"method": "mtp", "num_speculative_tokens": 2, "quantization": "fp8"}],
    ids=["none", "draft_model", "mtp in 8 bits"],
)
def test_captured_steps_say_what_the_cpu_says(
    engines: Engines, emulated_gpu: EmulatedDevice, method: dict[str, Any] | None, architecture: dict[str, Any]
) -> None:
    small = {**SMALL, "architecture": {**architecture, "num_hidden_layers": 1}}
    gpu = {**GPU, "architecture": small["architecture"]}
    params = [GREEDY, DRAWN]
    expected, _ = complete(engines(method, **small), SHORT_PROMPTS, params)
    found, metrics = complete(Engines()(method, **gpu), SHORT_PROMPTS, params)
    assert answers(found) == answers(expected)
    assert metrics.steps_in_parts.total() < metrics.num_decoding_steps


@pytest.mark.parametrize("architecture", [EXPERTS, ERNIE, GLM], ids=lambda own: own["model_type"])
def test_two_ranks_hold_parts_of_every_expert_and_draft_as_plain_decoding_says_there(
    architecture: dict[str, Any],
) -> None:
    shape = {**architecture, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}

    def run(ranks: Ranks) -> list[list[tuple[Any, ...]]]:
        found = []
        for method in (None, {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}):
            config = SpeculativeConfig.from_engine_args(
                "dummy", method, load_format="dummy", hf_config=shape, device="cpu", num_threads=1,
                tensor_parallel_size=2,
            )  # fmt: skip
            llm = LLM.from_config(config, ranks=ranks)
            assert llm.engine.target.is_row_invariant
            first = experts_of(llm)[-1]
            assert first.gate_up_projs[0].shape == (48, 64) and first.down_projs[0].shape == (64, 24)
            assert first.router.shape == (6, 64)
            assert (first.shared is None) == (architecture is EXPERTS)
            found.append(answers(complete(llm, PROMPTS[:5], PARAMS[:5])[0]))
        return found

    first, second = in_ranks(2, run, place_bytes=1 << 20)
    assert first == second and first[0] == first[1]
