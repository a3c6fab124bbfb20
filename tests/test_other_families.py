"""The promise in families whose layers do more than Llama's, on a CPU and on an emulated GPU."""

from __future__ import annotations

from typing import Any

import pytest

from runner.engine.decoder import Decoder
from tests.conftest import Engines, complete
from tests.emulated_device import EmulatedDevice
from tests.heads_for_tests import HEADS as HEADS_FOR_TESTS
from tests.other_families import FAMILIES, WITH_STATES, keys_of
from tests.test_emulated_gpu import DRAFT_MODEL, DRAWN, GPU, GREEDY, SMALL, texts
from tests.test_losslessness import PARAMS, PROMPTS, ROOMY, SCHEDULES, answers, counts, method_config

TREE = method_config("eagle3", 5, speculative_token_tree="dynamic")
CHAIN = method_config("eagle3", 5)
HEADS = {family: CHAIN if family in WITH_STATES else TREE for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_neither_methods_nor_schedules_change_a_token(engines: Engines, family: str) -> None:
    args = keys_of(family)
    plain = engines(**args, **ROOMY)
    target = plain.engine.target
    assert isinstance(target.model, Decoder) and target.is_row_invariant
    requests, metrics = complete(plain, PROMPTS, PARAMS)
    expected = answers(requests)
    assert metrics.steps_in_parts.total() < metrics.num_decoding_steps / 2
    assert len({tuple(request.output_token_ids) for request in requests}) > len(requests) // 2, "texts wander"
    for method, schedule in ((method_config("draft_model", 4), "few blocks"), (HEADS[family], "three at a time")):
        requests, metrics = complete(engines(method, **args, **SCHEDULES[schedule]), PROMPTS, PARAMS)
        assert answers(requests) == expected
        assert 0 < counts(metrics)[1] < counts(metrics)[0]


@pytest.mark.parametrize("family", ["gemma2", "granite", "muse_glimmer_text"])
def test_heads_go_through_projections_that_do_more(
    engines: Engines, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EAGLE-3's rows lie in wider ones: what scaled them in front of the product wanted them by themselves."""
    keys = {"model_type": "llama", "num_hidden_layers": 1, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    monkeypatch.setitem(HEADS_FOR_TESTS, "eagle3", lambda target: {**target, **keys})  # without a vocabulary of its own
    args: dict[str, Any] = {"architecture": FAMILIES[family], **ROOMY}
    llm = Engines()(CHAIN, of_drafters={}, **args)
    assert llm.engine.proposer.head.lm_head is None  # type: ignore[attr-defined]
    plain, drafting = (complete(own, PROMPTS, PARAMS)[0] for own in (engines(**args), llm))
    assert answers(drafting) == answers(plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_in_8_bits_change_no_token_of_a_method(engines: Engines, family: str) -> None:
    args: dict[str, Any] = {**keys_of(family), "quantization": "fp8", **ROOMY}
    plain, drafting = (complete(engines(method, **args), PROMPTS, PARAMS)[0] for method in (None, HEADS[family]))
    assert answers(drafting) == answers(plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps_say_what_the_cpu_says(family: str, engines: Engines, emulated_gpu: EmulatedDevice) -> None:
    args = keys_of(family)
    on_cpu = engines(DRAFT_MODEL, **{**SMALL, **args})
    on_gpu = Engines()(DRAFT_MODEL, **{**GPU, **args})
    assert texts(on_gpu, [GREEDY, DRAWN]) == texts(on_cpu, [GREEDY, DRAWN])
    assert emulated_gpu.num_replays > 0
