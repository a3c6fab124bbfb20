"""Why a step runs in parts, as the place that decides it says: of engines, of requests, and of a schedule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from proposers.captured.drafter import CapturedDrafter, CapturedDrafts, NoDrafts
from runner.engine.device_batch import DeviceBatch
from runner.engine.errors import UserError
from runner.engine.graphs import GraphMemory
from runner.engine.schedule import Schedule
from runner.engine.scheduler import Scheduler
from runner.measure import measure
from runner.metrics import InParts
from runner.step_conditions import EmptyRows, StepConditions
from runner.whole_steps import WholeSteps
from runner.workload import WorkloadItem
from tests.conftest import Engines
from tests.test_scheduler import drafts_of, make_request, make_scheduler, verdict
from verifier.rules import Strict, Synthetic


class Drafter(CapturedDrafter):
    is_behind = False

    def can_start(self, request: object) -> bool:
        return not self.is_behind

    def draft(self, batch: DeviceBatch) -> CapturedDrafts:
        raise NotImplementedError


def decoding(scheduler: Scheduler, *asked: dict[str, Any]) -> Schedule:
    """The second step of greedy requests with one-token prompts, each with what it asks for."""
    for index, params in enumerate(asked):
        request = make_request(1, request_id=str(index), **{"temperature": 0.0, "max_tokens": 64, **params})
        assert scheduler.refusal(request) is None
        scheduler.add(request)
    prompts = scheduler.schedule()
    scheduler.commit(prompts, verdict([[5]] * len(asked)).read(drafts_of([])))
    return scheduler.schedule()


def conditions(drafter: CapturedDrafter | None = None, **changed: Any) -> StepConditions:
    return StepConditions(
        drafter=drafter or Drafter(4),
        **{
            "greedy_only": False,
            "max_model_len": 128,
            "max_drafted_len": 128,
            "empty_rows": EmptyRows(num_free=0, most=4),
            **changed,
        },
    )


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({}, None),
        ({"temperature": 0.7, "top_k": 3, "stop_token_ids": [9], "speculative_ratio": 4}, None),
        ({"prompt_logprobs": 0, "min_tokens": 1}, None),  # both are done with
        ({"structured_outputs": {"regex": "a"}}, InParts.STRUCTURED_OUTPUTS),
        ({"presence_penalty": 0.5, "logit_bias": {3: 1.0}, "allowed_token_ids": [5, 6]}, None),
        ({"min_tokens": 2, "bad_words": ["x"], "logprobs": 64}, None),
        ({"logprobs": 65}, InParts.LOGPROBS),
        ({"logprobs": -1}, InParts.LOGPROBS),
        ({"speculative_ratio": 1}, None),
        ({"speculative_ratio": 0}, None),
        ({"speculative_sampling": False}, None),
    ],
)
def test_one_request_is_named_by_what_it_asks_for(asked: dict[str, Any], reason: InParts | None) -> None:
    scheduler = make_scheduler()
    assert conditions().unmet(decoding(scheduler, {}, asked), scheduler) is reason


@pytest.mark.parametrize(
    ("ratios", "empty_rows", "reason"),
    [
        ((4, 0), EmptyRows(num_free=0, most=4), None),
        ((4, 0, 3), EmptyRows(num_free=0, most=4), InParts.FEW_DRAFTS),
        ((1, 1), EmptyRows(num_free=0, most=5), InParts.FEW_DRAFTS),
        ((1, 1, 2**64), EmptyRows(num_free=0, most=6), None),
        ((0, 0, None), EmptyRows(num_free=15, most=0), None),
        ((0, 0, None), EmptyRows(num_free=14, most=0), InParts.FEW_DRAFTS),
    ],
)
def test_so_many_rows_without_a_draft_that_parts_are_faster_are_named(
    ratios: tuple[int | None, ...], empty_rows: EmptyRows, reason: InParts | None
) -> None:
    scheduler = make_scheduler()
    schedule = decoding(scheduler, *({"speculative_ratio": ratio} for ratio in ratios))
    assert conditions(empty_rows=empty_rows).unmet(schedule, scheduler) is reason
    for_all = Drafter(4)
    for_all.drafts_on_host = True  # then places go by what was found
    assert conditions(for_all, empty_rows=empty_rows).unmet(schedule, scheduler) is None


def test_the_more_a_row_costs_the_fewer_may_be_empty() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert EmptyRows.on(cpu, 4_000_000) == EmptyRows(num_free=0, most=50)
    assert EmptyRows.on(cpu, 600_000_000) == EmptyRows(num_free=0, most=0)
    assert EmptyRows.on(gpu, 8_000_000_000) == EmptyRows(num_free=64, most=25)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (((1,) * 17,) * 512, None),
        (((1,),) * 513, InParts.BAD_WORDS),
        (((1,), (1,) * 18), InParts.BAD_WORDS),
    ],
)
def test_very_many_and_very_long_bad_words_are_named(
    words: tuple[tuple[int, ...], ...], reason: InParts | None
) -> None:
    scheduler = make_scheduler()
    schedule = decoding(scheduler, {}, {"bad_words": ["x"]})
    schedule.scheduled[1].request.bad_words_token_ids = words
    assert conditions().unmet(schedule, scheduler) is reason


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({}, None),
        ({"presence_penalty": 0.5, "logit_bias": {3: 1.0}}, None),
        ({"bad_words": ["x"]}, InParts.STRUCTURED_OUTPUTS),
        ({"allowed_token_ids": [3]}, InParts.STRUCTURED_OUTPUTS),
        ({"min_tokens": 2}, InParts.STRUCTURED_OUTPUTS),
        ({"min_tokens": 1}, None),  # it is done with
    ],
)
def test_grammars_are_followed_where_the_host_knows_the_drafts(asked: dict[str, Any], reason: InParts | None) -> None:
    """And where no other mask might leave nothing of what a grammar allows."""
    asked = {"structured_outputs": {"regex": "a"}, **asked}
    drafter = Drafter(4)
    drafter.drafts_on_host = True
    for knowing in (NoDrafts(), drafter):
        scheduler = make_scheduler()
        assert conditions(knowing).unmet(decoding(scheduler, {}, asked), scheduler) is reason


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"greedy_only": True}, InParts.SAMPLED),
        ({"max_drafted_len": 5}, InParts.DRAFTER_LENGTH),  # two tokens, and four drafts
        ({"max_drafted_len": 5, "max_model_len": 5}, InParts.MAX_MODEL_LEN),
    ],
)
def test_what_rule_and_models_are_not_captured_for_is_named(changed: dict[str, Any], reason: InParts) -> None:
    scheduler = make_scheduler()
    assert conditions(**changed).unmet(decoding(scheduler, {"temperature": 1.0}), scheduler) is reason


@pytest.mark.parametrize(
    ("limits", "num_requests", "reason"),
    [
        ({"max_num_batched_tokens": 10}, 2, None),
        ({"max_num_batched_tokens": 9}, 2, InParts.TOKEN_BUDGET),  # the second has room for three drafts
        ({"max_num_batched_tokens": 5}, 2, InParts.TOKEN_BUDGET),  # the second is left out
        ({"num_blocks": 4, "max_model_len": 9}, 2, None),
        ({"num_blocks": 3, "max_model_len": 9}, 2, InParts.KV_CACHE),  # the second goes without drafts
    ],
)
def test_too_little_room_for_all_drafts_is_named(limits: dict[str, int], num_requests: int, reason: InParts) -> None:
    scheduler = make_scheduler(**limits)
    schedule = decoding(scheduler, *[{"max_tokens": 8}] * num_requests)
    assert conditions().unmet(schedule, scheduler) is reason


def test_a_drafter_that_has_to_catch_up_hides_no_lasting_reason() -> None:
    drafter = Drafter(4)
    drafter.is_behind = True
    for asked, reason in (({}, InParts.CATCH_UP), ({"logprobs": -1}, InParts.LOGPROBS)):
        scheduler = make_scheduler()
        assert conditions(drafter).unmet(decoding(scheduler, asked), scheduler) is reason


def test_a_step_in_which_a_request_arrives_is_blamed_on_nothing_else() -> None:
    scheduler = make_scheduler()
    scheduler.commit(decoding(scheduler, {"logprobs": -1}), verdict([[5]]).read(drafts_of([4])))
    scheduler.add(make_request(1, request_id="late"))
    assert conditions().unmet(scheduler.schedule(), scheduler) is InParts.PROMPT


@pytest.mark.parametrize(
    ("target", "drafter", "rule", "reason"),
    [
        ({"is_paged": False}, Drafter(4), Strict(), InParts.UNCAPTURED),
        ({}, None, Strict(), InParts.HOST_DRAFTS),
        ({}, Drafter(4, tree_depth=2), Synthetic(conditional_rates=[0.5]), InParts.SYNTHETIC_TREES),
    ],
)
def test_an_engine_whose_steps_are_never_whole_says_why(
    target: dict[str, Any], drafter: CapturedDrafter | None, rule: Any, reason: InParts
) -> None:
    captured = {"is_paged": True, "is_recurrent": False, "device": torch.device("cuda"), "model": None}
    context = SimpleNamespace(graph_memory=GraphMemory())
    found = WholeSteps.of(
        SimpleNamespace(captured_drafter=lambda _: drafter, context=context),  # type: ignore[arg-type]
        target=SimpleNamespace(**(captured | target)),  # type: ignore[arg-type]
        rule=rule,
        on_device=lambda: pytest.fail("there is no need of it"),
        max_draft_tokens=4,
        max_num_seqs=8,
        max_model_len=128,
    )
    assert found is reason


def test_a_target_of_transformers_code_is_named_where_steps_would_be_captured(engines: Engines) -> None:
    """The note was never seen: that nothing of it is captured was asked before whose code it is."""
    item, args = WorkloadItem(prompt={"prompt_token_ids": [5, 6]}), {"architecture": {"hidden_act": "gelu"}}
    llm = engines({"method": "ngram", "num_speculative_tokens": 3}, num_gpu_blocks_override=320, **args)
    summary = measure(llm, [item]).summary
    assert summary["steps_in_parts"] == {"transformers": summary["num_decoding_steps"]}
    assert any(
        "ran in parts, not whole: the target runs through transformers' modelling code" in note
        for note in summary["notes"]
    )
    eager = engines(None, num_gpu_blocks_override=320, enforce_eager=True, **args)
    assert eager.engine.whole_steps[eager.engine.proposer](0) is InParts.UNCAPTURED


def test_captured_trees_are_refused_where_states_follow_one_path() -> None:
    with pytest.raises(UserError, match=r"Mine.captured_drafter must draft chains, for the states of the target's"):
        WholeSteps.of(
            SimpleNamespace(captured_drafter=lambda _: Drafter(4, tree_depth=2), name="Mine"),  # type: ignore[arg-type]
            target=SimpleNamespace(is_paged=True, is_recurrent=True),  # type: ignore[arg-type]
            rule=Strict(),
            on_device=lambda: pytest.fail("there is no need of it"),
            max_draft_tokens=4,
            max_num_seqs=8,
            max_model_len=128,
        )
