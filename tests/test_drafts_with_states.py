"""Draft models whose layers have states: a target that is its own draft is never wrong but where it is made so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import pytest

from runner import cache_size
from runner.engine.errors import UserError
from runner.engine.launch import Part
from runner.engine.model_runner import ModelOutput, ModelRunner
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM
from runner.metrics import MetricsCollector
from runner.metrics.rates import by_source
from tests.conftest import TARGET_CONFIG, change_first, complete
from tests.heads_for_tests import MASK_TOKEN_ID
from tests.other_families import FAMILIES, WITH_STATES
from tests.test_losslessness import PROMPTS, ROOMY, SCHEDULES, answers, counts, method_config

# Texts end where drafters know that they do, so that drafts are wrong for no other reason than a wrong state.
PARAMS = list(
    islice(
        cycle(
            [
                SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
                SamplingParams(max_tokens=23, seed=11, ignore_eos=True),
                SamplingParams(temperature=0.7, top_k=8, max_tokens=17, seed=12, ignore_eos=True),
                SamplingParams(max_tokens=9, seed=13, ignore_eos=True, speculative_sampling=False),
            ]
        ),
        len(PROMPTS),
    )
)


def engine(method: dict[str, Any] | None, target: dict[str, Any], draft: dict[str, Any], **others: Any) -> LLM:
    """Random weights are the same wherever shapes are; the scale brings texts to wander."""
    target, draft = {**TARGET_CONFIG, **target}, {**TARGET_CONFIG, **draft}
    pard = {**draft, "spd_type": "pard", "pard_token": MASK_TOKEN_ID}

    def scale(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if "norm" not in name and parameter.is_floating_point():
                parameter.mul_(8)

    with pytest.MonkeyPatch.context() as patch:
        change_first(patch, ModelRunner, scale)
        return LLM(
            "dummy",
            load_format="dummy",
            hf_config=target,
            draft={"model": "draft", "hf_config": draft},
            heads={"pard": {"model": "pard", "hf_config": pard}},
            speculative_config=method,
            max_model_len=256,
            device="cpu",
            **others,
        )


@pytest.fixture(params=WITH_STATES)
def family(request: pytest.FixtureRequest) -> dict[str, Any]:
    return FAMILIES[request.param]


def records_of_drafts(metrics: MetricsCollector) -> dict[str, list[tuple[int, int, int]]]:
    return {record.request_id: record.drafts for record in metrics.records}


@pytest.mark.parametrize("schedule", ["three at a time", "odd chunks", "few blocks", "few blocks of 32, small chunks"])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["whole steps", "steps in parts"])
def test_a_target_that_is_its_own_draft_is_never_wrong(
    family: dict[str, Any], schedule: str, enforce_eager: bool
) -> None:
    method = method_config("draft_model", 4)
    llm = engine(method, family, family, enforce_eager=enforce_eager, **SCHEDULES[schedule])
    requests, metrics = complete(llm, PROMPTS, PARAMS)
    drafted, accepted = counts(metrics)
    assert accepted == drafted > 100
    assert ("few" in schedule) == any(request.num_preemptions > 0 for request in requests)


def expected_drafts(request: Request, number: int) -> Iterator[tuple[int, int, int]]:
    """Of a drafter that knows which token is likeliest; the request was told how likely its own were."""
    is_likeliest = [place.rank == 1 for place in request.logprobs]
    at = 1  # the first token comes of the prompt
    while (room := min(number, len(is_likeliest) - at - 1)) >= 0:
        accepted = next((place for place in range(room) if not is_likeliest[at + place]), room)
        if room:
            yield room, room, accepted
        at += accepted + 1


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["whole steps", "steps in parts"])
def test_what_was_drafted_in_vain_is_forgotten(family: dict[str, Any], enforce_eager: bool) -> None:
    """Greedy drafts of sampled texts are often wrong: the next ones are those of a draft that saw the text alone."""
    params = [
        SamplingParams(temperature=0.3, max_tokens=24, seed=seed, ignore_eos=True, logprobs=0)
        for seed in range(len(PROMPTS))
    ]
    method = method_config("draft_model", 4, draft_sample_method="greedy")
    llm = engine(method, family, family, enforce_eager=enforce_eager, **ROOMY)
    requests, metrics = complete(llm, PROMPTS, params)
    drafted, accepted = counts(metrics)
    assert 0.1 * drafted < accepted < 0.9 * drafted
    assert metrics.steps_in_parts.total() == (metrics.num_decoding_steps if enforce_eager else 0)
    assert records_of_drafts(metrics) == {own.request_id: list(expected_drafts(own, 4)) for own in requests}


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["whole steps", "steps in parts"])
def test_the_draft_keeps_up_while_matches_are_verified(family: dict[str, Any], enforce_eager: bool) -> None:
    """Matches are longer than its own drafts, and often wrong; what it drafts behind them never is."""
    method = method_config("hybrid", 8, num_drafter_tokens=2, min_match_score=0.1)
    llm = engine(method, family, family, enforce_eager=enforce_eager, **ROOMY)
    requests, metrics = complete(llm, PROMPTS, PARAMS)
    assert answers(requests) == answers(complete(engine(None, family, family, **ROOMY), PROMPTS, PARAMS)[0])
    drafts = by_source(metrics.records)
    own, matched = drafts["draft_model"], drafts["suffix"]
    assert own["num_accepted_tokens"] == own["num_draft_tokens"] > 50
    assert matched["num_draft_tokens"] > matched["num_accepted_tokens"] + 10


@pytest.fixture
def pass_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every pass in parts so far, a target's and a draft's."""
    sizes, forward = list[int](), ModelRunner.forward

    def noting(self: ModelRunner, parts: Sequence[Part], *args: Any, **options: Any) -> ModelOutput:
        sizes.append(sum(part.end - part.start + part.num_draft_tokens for part in parts))
        return forward(self, parts, *args, **options)

    monkeypatch.setattr(ModelRunner, "forward", noting)
    return sizes


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["whole steps", "steps in parts"])
def test_a_draft_that_rested_goes_on_where_it_was(
    family: dict[str, Any], enforce_eager: bool, pass_sizes: list[int]
) -> None:
    """Where the load allows no drafts it computes nothing, and makes up for it later, in passes of a step's size."""
    number = [[1, 3, 4], [4, 6, 1], [7, 64, 0]]
    method = method_config("draft_model", 4, num_speculative_tokens_per_batch_size=number)
    params = [
        SamplingParams(temperature=0.3 * (place % 3), max_tokens=3 * place + 5, seed=place, ignore_eos=True)
        for place in range(len(PROMPTS))
    ]
    llm = engine(method, family, family, enforce_eager=enforce_eager, max_num_seqs=12, max_num_batched_tokens=60)
    _, metrics = complete(llm, PROMPTS, params)
    drafted, accepted = counts(metrics)
    assert accepted == drafted > 20 and max(pass_sizes) <= 60
    assert any(point.is_decoding and not point.num_drafts for point in metrics.step_points)


def test_masks_leave_nothing_in_states(family: dict[str, Any]) -> None:
    """PARD's first draft of each step is that of a draft that saw the text alone."""
    found = []
    for enforce_eager in (False, True):
        for method in (method_config("pard", 5), method_config("draft_model", 1)):
            llm = engine(method, family, family, enforce_eager=enforce_eager, **ROOMY)
            requests, metrics = complete(llm, PROMPTS, PARAMS)
            found.append((answers(requests), records_of_drafts(metrics)))
    (of_texts, whole), (texts, alone), (of_parts, in_parts), _ = found
    assert of_texts == texts == of_parts and whole == in_parts
    assert all(accepted > 0 for drafts in whole.values() for _, _, accepted in drafts)
    assert all(accepted == 1 for drafts in alone.values() for _, _, accepted in drafts)


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["whole steps", "steps in parts"])
def test_a_draft_with_states_computes_what_its_target_found_in_the_cache(
    family: dict[str, Any], enforce_eager: bool, pass_sizes: list[int]
) -> None:
    """Prompts begin alike; the target attends in all layers, so that blocks hold all that it needs.

    Three lack them at a time, and no pass is larger than a step.
    """
    begin = [(7 * place) % 64 for place in range(70)]
    prompts = [{"prompt_token_ids": [*begin, *range(3, 4 + more)]} for more in range(12)]
    found = []
    for enable_prefix_caching in (True, False):
        schedule = {"max_num_seqs": 3, "max_num_batched_tokens": 48, "enable_prefix_caching": enable_prefix_caching}
        llm = engine(method_config("draft_model", 3), {}, family, enforce_eager=enforce_eager, **schedule)
        requests, metrics = complete(llm, prompts, PARAMS)
        assert enable_prefix_caching == any(request.num_cached_tokens for request in requests)
        found.append((answers(requests), records_of_drafts(metrics)))
    assert found[0] == found[1] and max(pass_sizes) <= 48


def test_states_of_the_draft_are_part_of_what_memory_is_for(
    family: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    without, drafter, hybrid = (
        engine(method, {}, draft, **ROOMY).engine.proposer.state_bytes
        for method, draft in (
            (method_config("draft_model", 6), {}),
            (method_config("draft_model", 6), family),
            (method_config("hybrid", 6, num_drafter_tokens=2), family),
        )
    )
    assert 0 == without < drafter == hybrid
    monkeypatch.setattr(cache_size, "available_memory", lambda device: 1 << 20)
    with pytest.raises(UserError, match=r"MiB of states and trees for max_num_seqs=4096; .*, or lower .*max_num_seqs"):
        engine(method_config("draft_model", 4), {}, family, max_num_seqs=4096, max_num_batched_tokens=20480)
