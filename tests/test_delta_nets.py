"""Targets whose layers have states in place of keys and values: every method that drafts chains, in every schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from proposers.base import Proposer
from runner import cache_size
from runner.engine.decoder import Decoder
from runner.engine.errors import UserError
from runner.engine.request import DraftTokens
from runner.engine.sampling_params import SamplingParams
from runner.engine.schedule import Schedule
from runner.metrics import MetricsCollector
from runner.prompts import make_requests
from tests.conftest import TARGET_CONFIG, Engines, complete
from tests.edit_tensors import edit_tensors
from tests.other_families import FAMILIES, keys_of
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
from tests.transformers_reference import load, random_model, save

FAMILY = keys_of("qwen3_5_text")
Answers = list[tuple[Any, ...]]
CHAINS = [method for method in METHODS if method not in ("suffix_recycling", "early_exit", "sparse_kv")]  # refused
IN_CHAINS = {"token_recycling": {"speculative_token_tree": None}}  # what a method needs to draft some


class Branching(Proposer):
    """Two guesses of the next token."""

    def propose(self, schedule: Schedule) -> DraftTokens:
        count = len(schedule.decoding)
        return DraftTokens(
            token_ids=torch.arange(2 * count),
            cu_num_draft_tokens=[2 * index for index in range(count + 1)],
            parent_indices=[-1] * 2 * count,
        )


@pytest.fixture(
    scope="module", params=["qwen3_5_text", "granitemoehybrid", "lfm2_moe"]
)  # of two layers, as heads are made for
def family(request: pytest.FixtureRequest) -> dict[str, Any]:
    return keys_of(request.param)


@pytest.fixture(scope="module")
def reference(engines: Engines, family: dict[str, Any]) -> Answers:
    """Plain decoding's answers; test proposers know them."""
    requests, metrics = complete(engines(**family, **ROOMY), PROMPTS, PARAMS)
    assert metrics.steps_in_parts.total() < metrics.num_decoding_steps / 2
    tell_test_proposers(requests)
    return answers(requests)


@pytest.mark.parametrize("method", CHAINS)
def test_a_method_changes_no_token(engines: Engines, family: dict[str, Any], reference: Answers, method: str) -> None:
    """Each in a schedule of its own; where blocks are few, requests begin again and their states with them."""
    schedules = list(SCHEDULES)
    schedule = schedules[CHAINS.index(method) % len(schedules)]
    llm = engines(method_config(method, 4, **IN_CHAINS.get(method, {})), **family, **SCHEDULES[schedule])
    requests, metrics = complete(llm, PROMPTS, PARAMS)
    assert answers(requests) == reference
    drafted, accepted = counts(metrics)
    assert 0 < accepted < drafted


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_schedule_of_plain_decoding_leaves_a_trace(
    engines: Engines, family: dict[str, Any], reference: Answers, schedule: str
) -> None:
    requests, _ = complete(engines(**family, **SCHEDULES[schedule]), PROMPTS, PARAMS)
    assert answers(requests) == reference
    assert (schedule.startswith("few")) == any(request.num_preemptions > 0 for request in requests)


@pytest.mark.parametrize("number", [1, 16])
def test_states_keep_as_many_drafts_as_there_may_be(
    engines: Engines, family: dict[str, Any], reference: Answers, number: int
) -> None:
    requests, _ = complete(engines(method_config("suffix", number), **family, **ROOMY), PROMPTS, PARAMS)
    assert answers(requests) == reference


def test_steps_in_parts_say_the_same(engines: Engines, family: dict[str, Any], reference: Answers) -> None:
    llm = engines(method_config("eagle3", 4), enforce_eager=True, **family, **ROOMY)
    assert answers(complete(llm, PROMPTS, PARAMS)[0]) == reference


@pytest.mark.usefixtures("unpacked_weights")
def test_a_cpu_without_our_kernels_keeps_the_promise_too() -> None:
    """In the references, whose products are not those of panels."""
    params = [SamplingParams(temperature=0.0, max_tokens=10), SamplingParams(max_tokens=9, seed=1)]
    plain, drafting = (
        answers(complete(Engines()(method, **FAMILY, **ROOMY), PROMPTS[:2], params)[0])
        for method in (None, method_config("ngram", 4))
    )
    assert drafting == plain


def test_prompts_that_begin_alike_are_computed_each(engines: Engines) -> None:
    llm = engines(**FAMILY, **ROOMY)
    prompt = {"prompt_token_ids": list(range(3, 60))}
    requests, _ = complete(llm, [prompt] * 3, [SamplingParams(temperature=0.0, max_tokens=4)] * 3)
    assert all(request.num_cached_tokens is None for request in requests)
    assert len({tuple(request.output_token_ids) for request in requests}) == 1


@pytest.mark.parametrize(
    "method",
    [
        {"method": "suffix_recycling"},
        {"method": "token_recycling"},
        {"method": "eagle3", "speculative_token_tree": "dynamic"},
        {"method": "medusa", "speculative_token_tree": [[0], [1]]},
        {"method": "suffix", "speculative_token_tree": "dynamic"},
    ],
    ids=lambda method: method["method"],
)
def test_trees_are_refused(engines: Engines, method: dict[str, Any]) -> None:
    what = (
        "choose method=suffix"
        if method["method"] == "suffix_recycling"
        else "set speculative_config.speculative_token_tree=None"
    )
    with pytest.raises(UserError, match=rf"must draft chains for dummy, .* one path of tokens; {what}"):
        engines({"num_speculative_tokens": 4, **method}, **FAMILY)


def test_drafts_by_the_layers_themselves_are_refused(engines: Engines) -> None:
    """They would move on the states, which go back over what a launch took in last alone."""
    with pytest.raises(UserError, match=r"must have attention in all layers of dummy: .* of qwen3_5_text; choose"):
        engines({"method": "early_exit", "num_speculative_tokens": 4}, **FAMILY)


def test_a_class_of_ones_own_that_drafts_trees_is_told(engines: Engines) -> None:
    method = method_config("custom_class", 3, model="tests.test_delta_nets.Branching")
    llm = engines(method, **FAMILY, **ROOMY)
    with pytest.raises(UserError, match=r"Branching.propose must draft chains, for the states of the target's"):
        complete(llm, PROMPTS[:1], PARAMS[:1])


def test_states_take_memory_of_their_own(engines: Engines) -> None:
    target = engines(method_config("suffix", 4), **FAMILY, **ROOMY).engine.target
    assert isinstance(target.model, Decoder) and target.cache is not None
    (states,) = [own for own in target.cache.states if own is not None]
    assert states.memory.shape == (65, 4, 8, 16) and states.recent.shape == (65, 4, 4 + 3, 48)
    assert target.num_state_bytes(64, 4) == states.num_bytes
    assert target.kv_widths[0] == 0 < target.kv_widths[1]
    assert not states.reached[0].any(), "slot 0 is nobody's"


def test_states_that_do_not_fit_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_size, "available_memory", lambda device: 1 << 20)
    with pytest.raises(UserError, match=r"MiB of states and trees for max_num_seqs=4096; .*, or lower .*max_num_seqs"):
        Engines()(**FAMILY, max_num_seqs=4096, max_num_batched_tokens=4096)


def test_a_proposer_of_more_drafts_than_states_are_made_for_is_refused(engines: Engines) -> None:
    few, many = (engines(method_config("ngram", count), **FAMILY, **ROOMY) for count in (2, 4))
    requests = make_requests(PROMPTS[:1], PARAMS[:1], few.engine.tokenizer, 0)
    with pytest.raises(UserError, match=r"must be <= 2, .* states are made for, got 4; build the engine with as many"):
        few.run(requests, many.engine.proposer, MetricsCollector())


def test_biases_that_are_nothing_are_read_over(tmp_path: Path) -> None:
    """AutoGPTQ gives one to every product; one that says something is refused."""
    from transformers import AutoConfig

    source = save(random_model(AutoConfig.for_model(**{**TARGET_CONFIG, **FAMILIES["qwen3_5_text"]})), tmp_path)
    name = "model.layers.0.linear_attn.in_proj_z.bias"
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: torch.zeros(32)}))
    load(source)
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: torch.ones(32)}))
    with pytest.raises(UserError, match=rf"unexpected: {name}"):
        load(source)
