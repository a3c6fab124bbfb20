"""The numbers of the summary, against values computed by hand and against identities that must hold for any run."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.metrics import (
    InParts,
    MetricsCollector,
    RequestRecord,
    RequestStep,
    StepRecord,
    count_identical,
    in_parts_notes,
)
from runner.metrics.rates import inter_token_ms, per_output_token_ms, percentiles
from runner.metrics.repeats import over_repeats


def record(
    request_id: str = "0",
    *,
    drafted: tuple[int, ...] = (),
    accepted: tuple[int, ...] = (),
    tokens: tuple[int, ...] | None = None,
    times: tuple[float, ...] | None = None,
    **fields: Any,
) -> RequestRecord:
    """A request whose steps arrive one second apart and commit their accepted tokens and one more."""
    tokens = tuple(a + 1 for a in accepted) if tokens is None else tokens
    return RequestRecord(
        request_id=request_id,
        prompt="p",
        prompt_token_ids=(1, 2),
        text="t",
        token_ids=fields.pop("token_ids", tuple(range(sum(tokens)))),
        finish_reason=fields.pop("finish_reason", "length"),
        category=fields.pop("category", None),
        seed=fields.pop("seed", 0),
        arrival_time=fields.pop("arrival_time", 0.0),
        token_times=tuple(float(i + 1) for i in range(len(tokens))) if times is None else times,
        tokens_per_step=tokens,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        **fields,
    )


def summary(*records: RequestRecord, method: str = "ngram", k: int = 0, **options: Any) -> dict[str, Any]:
    collector = MetricsCollector()
    for one in records:
        collector.finish(one)
    return collector.summary(method=method, num_speculative_tokens=k, **options)


def step(
    total: float,
    *request_steps: tuple[int, int, int],
    finished_at: float = 0.0,
    is_decoding: bool = True,
    in_parts: InParts | None = InParts.UNCAPTURED,
    **seconds: float,
) -> StepRecord:
    return StepRecord(
        finished_at=finished_at,
        seconds=seconds,
        total_seconds=total,
        request_steps=tuple(
            RequestStep(request_id=str(i), num_draft_tokens=d, num_accepted_tokens=a, num_output_tokens=n)
            for i, (d, a, n) in enumerate(request_steps)
        ),
        is_decoding=is_decoding,
        max_draft_tokens=4,
        in_parts=in_parts,
    )


def test_acceptance_agrees_with_counts_made_by_hand() -> None:
    """Drafts of 3, 3, 2 and 1 tokens with 3, 1, 2 and 0 accepted; two steps without a draft."""
    numbers = summary(
        record("a", drafted=(0, 3, 3), accepted=(0, 3, 1)),
        record("b", drafted=(0, 2, 1), accepted=(0, 2, 0)),
        k=4,
    )
    assert numbers["num_drafts"] == 4
    assert numbers["num_draft_tokens"] == 9
    assert numbers["num_accepted_tokens"] == 6
    assert numbers["num_output_tokens"] == 12
    assert numbers["acceptance_rate"] == pytest.approx(6 / 9)
    assert numbers["mean_acceptance_length"] == pytest.approx(1 + 6 / 4)
    assert numbers["mean_acceptance_length_per_request"] == pytest.approx(((1 + 4 / 2) + (1 + 2 / 2)) / 2)
    assert numbers["tokens_per_step"] == pytest.approx(12 / 6)
    assert numbers["acceptance_per_position"] == [3 / 4, 2 / 4, 1 / 4, 0.0]
    # Position 1 was reached by the drafts (3,3), (3,1), (2,2); position 2 by (3,3) alone, for (2,2) has no third token.
    assert numbers["conditional_acceptance_per_position"] == [3 / 4, 2 / 3, 1.0, None]
    assert numbers["acceptance_length_histogram"] == {"1": 1, "2": 1, "3": 1, "4": 1, "5": 0}


def test_pooled_and_per_request_acceptance_lengths_differ_when_requests_have_unequal_drafts() -> None:
    numbers = summary(
        record("many", drafted=(1,) * 9, accepted=(0,) * 9),
        record("one", drafted=(1,), accepted=(1,)),
        record("without", drafted=(0, 0), accepted=(0, 0)),
        k=1,
    )
    assert numbers["mean_acceptance_length"] == pytest.approx(1.1)
    assert numbers["mean_acceptance_length_per_request"] == pytest.approx(1.5)  # the third has no draft


def test_a_zero_denominator_is_none() -> None:
    numbers = summary(record(drafted=(0,), accepted=(0,)), k=2)
    for key in ("acceptance_rate", "mean_acceptance_length", "mean_acceptance_length_per_request", "speedup"):
        assert numbers[key] is None, key
    assert numbers["acceptance_per_position"] == [None, None]
    assert numbers["conditional_acceptance_per_position"] == [None, None]
    assert numbers["output_tokens_per_second"] is None  # no step was observed
    assert set(numbers["tpot_ms"].values()) == {None}  # one token has no time per further token
    assert set(numbers["time_share"].values()) == {None}
    assert summary()["tokens_per_step"] is None


def test_failed_requests_are_counted_and_left_out_of_everything_else() -> None:
    good = record("good", drafted=(0, 2), accepted=(0, 1), category="code")
    failed = record("bad", drafted=(2, 2), accepted=(2, 2), finish_reason="error", category="logs")
    numbers, alone = summary(good, failed, k=2), summary(good, k=2)
    assert numbers.pop("num_failed_requests") == 1
    assert alone.pop("num_failed_requests") == 0
    assert numbers == alone


def test_latencies_agree_with_arrival_times_made_by_hand() -> None:
    """Tokens arrive 1 at 0.5 s, 3 at 0.8 s, 2 at 1.0 s; the request arrived at 0.1 s."""
    numbers = summary(
        record(drafted=(0, 4, 4), accepted=(0, 2, 1), times=(0.5, 0.8, 1.0), arrival_time=0.1),
        k=4,
    )
    assert numbers["ttft_ms"]["median"] == pytest.approx(400)
    assert numbers["tpot_ms"]["median"] == pytest.approx(500 / 5)
    # Five gaps: three of 300 / 3 and two of 200 / 2 ms.
    assert numbers["itl_ms"] == pytest.approx({"median": 100, "p20": 100, "p80": 100, "p99": 100})


def test_percentiles_are_linear_between_order_statistics() -> None:
    assert percentiles([4.0, 1.0, 3.0, 2.0, 5.0]) == pytest.approx({"median": 3, "p20": 1.8, "p80": 4.2, "p99": 4.96})
    assert percentiles([7.0]) == {"median": 7, "p20": 7, "p80": 7, "p99": 7}


def test_time_share_adds_up_to_one_and_unknown_phases_count_as_other() -> None:
    collector = MetricsCollector()
    collector.observe(step(1.0, (0, 0, 1), propose=0.25, verify=0.5, schedule=0.125, update=0.1))
    collector.observe(step(1.0, (2, 1, 2), propose=0.25, verify=0.75))
    numbers = collector.summary(method="ngram", num_speculative_tokens=2)
    assert numbers["time_share"] == {
        "propose": 0.25,
        "verify": 0.625,
        "whole_step": 0.0,
        "schedule": 0.0625,
        "other": 0.0625,
    }
    assert numbers["num_steps"] == 2
    assert numbers["duration_s"] == 2.0


def test_the_share_of_whole_steps_is_of_those_that_decode() -> None:
    collector = MetricsCollector()
    collector.observe(step(1.0, in_parts=InParts.PROMPT, is_decoding=False))
    assert collector.summary(method="none", num_speculative_tokens=0)["whole_step_share"] is None
    for reason in (InParts.PROMPT, None, None, InParts.LOGPROBS):
        collector.observe(step(1.0, (0, 0, 1), in_parts=reason))
    numbers = collector.summary(method="none", num_speculative_tokens=0)
    assert (numbers["num_steps"], numbers["num_decoding_steps"], numbers["num_whole_steps"]) == (5, 4, 2)
    assert numbers["whole_step_share"] == 0.5
    assert numbers["steps_in_parts"] == {"logprobs": 1, "prompt": 1}
    assert numbers["decoding_steps_by_budget"] == {"4": 4}
    assert [point.is_whole for point in collector.step_points] == [None, False, True, True, False]


def test_where_steps_are_not_captured_nothing_is_said_of_whole_ones() -> None:
    collector = MetricsCollector()
    collector.observe(step(1.0, (0, 0, 1), in_parts=InParts.UNCAPTURED))
    numbers = collector.summary(method="none", num_speculative_tokens=0)
    assert (numbers["num_decoding_steps"], numbers["num_whole_steps"], numbers["whole_step_share"]) == (1, 0, None)
    assert collector.step_points[0].is_whole is None


def test_a_note_names_the_commonest_reasons_for_steps_in_parts_and_what_to_do_about_the_first() -> None:
    inevitable = {InParts.PROMPT: 30, InParts.CATCH_UP: 2, InParts.UNCAPTURED: 4, InParts.HOST_DRAFTS: 9}
    assert in_parts_notes(inevitable, 1000) == []
    avoidable = {InParts.KV_CACHE: 7, InParts.LOGPROBS: 1200, InParts.STRUCTURED_OUTPUTS: 3, InParts.SAMPLED: 2}
    (note,) = in_parts_notes({**inevitable, **avoidable}, 2000)
    assert note == (
        "1,212 of 2,000 decoding steps ran in parts, not whole: a request asked for very many logprobs (1,200), the "
        "KV cache had too few free blocks for the drafts of all requests (7), a request asked for structured_outputs "
        "(3), other reasons (2, see steps_in_parts in metrics.json); a request with such an option takes its whole "
        "batch along, so give these requests a run of their own"
    )


def test_throughput_is_tokens_of_finished_requests_over_time_in_steps() -> None:
    collector = MetricsCollector()
    collector.observe(step(0.5, (0, 0, 1)))
    collector.observe(step(1.5, (3, 2, 3)))
    collector.finish(record(drafted=(0, 3), accepted=(0, 2)))
    numbers = collector.summary(method="ngram", num_speculative_tokens=3)
    assert numbers["output_tokens_per_second"] == pytest.approx(4 / 2)


def test_live_counts_follow_the_steps() -> None:
    collector = MetricsCollector()
    collector.observe(step(0.5, (0, 0, 1), (3, 2, 3)))
    assert (collector.num_output_tokens, collector.num_drafts, collector.num_accepted_tokens) == (4, 1, 2)
    assert collector.num_finished_requests == 0
    point = collector.step_points[0]
    assert (point.num_requests, point.num_drafts, point.num_draft_tokens, point.num_output_tokens) == (2, 1, 3, 4)


def test_speedup_is_the_ratio_of_median_times_per_token() -> None:
    plain = record("a", drafted=(0, 0, 0), accepted=(0, 0, 0), times=(0.0, 0.4, 0.8), category="code")
    fast = record("a", drafted=(0, 1), accepted=(0, 1), times=(0.0, 0.5), category="code")
    baseline = summary(plain, method="none")
    numbers = summary(fast, k=1, baseline=baseline)
    assert baseline["speedup"] == 1.0  # plain decoding is its own baseline
    assert baseline["categories"]["code"]["speedup"] == 1.0
    assert numbers["speedup"] == pytest.approx(400 / 250)
    assert numbers["categories"]["code"]["speedup"] == pytest.approx(400 / 250)
    assert (
        numbers["baseline"].items() >= {key: baseline[key] for key in ("output_tokens_per_second", "tpot_ms")}.items()
    )
    assert numbers["baseline"]["tpot_ms"]["median"] == pytest.approx(400)
    assert summary(fast, k=1)["speedup"] is summary(fast, k=1)["baseline"] is baseline["baseline"] is None


def repeated(*speeds: tuple[float | None, float]) -> dict[str, Any]:
    """The summary of repeats with these speed-ups and tokens per second; the repeat's place is its num_steps."""
    base = summary(record(drafted=(0, 1), accepted=(0, 1)), k=1)
    baseline = {"output_tokens_per_second": 50.0, "output_tokens_per_second_range": None}
    return over_repeats(
        [
            {**base, "speedup": speedup, "output_tokens_per_second": tokens, "num_steps": place, "baseline": baseline}
            for place, (speedup, tokens) in enumerate(speeds)
        ]
    )


def test_repeats_give_medians_their_range_and_the_rest_of_the_middle_one() -> None:
    three = repeated((1.5, 90.0), (1.2, 100.0), (1.3, 120.0))
    assert (three["repeats"], three["num_steps"]) == (3, 2)
    assert (three["speedup"], three["speedup_range"]) == (1.3, {"lowest": 1.2, "highest": 1.5})
    assert three["output_tokens_per_second"] == 100.0
    assert three["output_tokens_per_second_range"] == {"lowest": 90.0, "highest": 120.0}
    assert three["baseline"]["output_tokens_per_second_range"] == {"lowest": 50.0, "highest": 50.0}
    two = repeated((None, 100.0), (None, 110.0))
    assert (two["speedup"], two["speedup_range"], two["output_tokens_per_second"]) == (None, None, 105.0)
    assert two["num_steps"] == 0
    one = repeated((1.5, 90.0))
    assert (one["repeats"], one["speedup"], one["speedup_range"]) == (1, 1.5, None)


def test_categories_have_their_own_rates() -> None:
    numbers = summary(
        record("a", drafted=(2,), accepted=(2,), category="logs"),
        record("b", drafted=(2,), accepted=(0,), category="code"),
        record("c", drafted=(2,), accepted=(1,), category="code"),
        record("d", drafted=(2,), accepted=(1,)),
        k=2,
    )
    categories = numbers["categories"]
    assert list(categories) == ["code", "logs"]
    assert (categories["code"]["num_requests"], categories["logs"]["num_requests"]) == (2, 1)
    assert (categories["code"]["acceptance_rate"], categories["logs"]["acceptance_rate"]) == (0.25, 1.0)
    assert categories["code"]["mean_acceptance_length"] == pytest.approx(1.5)


def test_count_identical_compares_tokens_of_the_same_request() -> None:
    ours = [record("a", accepted=(0,), drafted=(0,), token_ids=(5,)), record("b", accepted=(0,), drafted=(0,))]
    plain = [record("b", accepted=(0,), drafted=(0,)), record("a", accepted=(0,), drafted=(0,), token_ids=(6,))]
    assert count_identical(ours, plain) == {"requests": 2, "identical": 1}


def test_count_identical_leaves_out_requests_that_failed_in_either_run() -> None:
    ours = [record("a", accepted=(0,), drafted=(0,)), record("b", finish_reason="error")]
    plain = [record("a", accepted=(0,), drafted=(0,)), record("b", accepted=(0,), drafted=(0,))]
    assert count_identical(ours, plain) == {"requests": 1, "identical": 1}


def test_count_identical_counts_a_request_that_is_the_same_in_every_pass() -> None:
    passes = [[record("a", accepted=(0,), drafted=(0,), token_ids=(token,))] for token in (5, 5, 6)]
    assert count_identical(*passes) == {"requests": 1, "identical": 0}
    assert count_identical(*passes[:2]) == {"requests": 1, "identical": 1}


def test_count_identical_refuses_runs_of_different_requests() -> None:
    with pytest.raises(ValueError, match="same requests; only in one of them: b"):
        count_identical([record("a")], [record("a"), record("b")])


@pytest.mark.parametrize(
    "wrong",
    [
        {"drafted": (1,), "accepted": (2,)},
        {"drafted": (2,), "accepted": (1,), "tokens": (3,)},
        {"drafted": (0,), "accepted": (0,), "tokens": (0,)},
        {"drafted": (0,), "accepted": (0,), "token_ids": (1, 2, 3)},
        {"drafted": (0,), "accepted": (0,), "times": (1.0, 2.0)},
    ],
)
def test_a_record_whose_counts_cannot_be_true_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="request 0"):
        MetricsCollector().finish(record(**wrong))


def test_the_summary_is_plain_json() -> None:
    numbers = summary(
        record(drafted=(0, 2), accepted=(0, 1), category="code"),
        k=2,
        identical_to_baseline={"requests": 1, "identical": 1},
        peak_memory_bytes=1024,
        num_preemptions=3,
    )
    assert json.loads(json.dumps(numbers, allow_nan=False)) == numbers
    assert (numbers["peak_memory_bytes"], numbers["num_preemptions"]) == (1024, 3)
    assert numbers["identical_to_baseline"] == {"requests": 1, "identical": 1}


def test_metrics_do_not_import_torch() -> None:
    code = "import sys, runner.metrics; sys.exit('torch' in sys.modules or 'mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@st.composite
def drafts_of_requests(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """Per request, (drafted, accepted) of each step."""
    one_step = st.integers(0, 5).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d)))
    return draw(st.lists(st.lists(one_step, min_size=1, max_size=8), max_size=5))


def records_of(runs: list[list[tuple[int, int]]]) -> list[RequestRecord]:
    return [
        record(str(i), drafted=tuple(d for d, _ in steps), accepted=tuple(a for _, a in steps))
        for i, steps in enumerate(runs)
    ]


@given(drafts_of_requests())
def test_counts_add_up_for_any_run(runs: list[list[tuple[int, int]]]) -> None:
    numbers = summary(*records_of(runs), k=5)
    num_drafts = numbers["num_drafts"]
    histogram = numbers["acceptance_length_histogram"]
    assert sum(histogram.values()) == num_drafts
    assert sum((int(length) - 1) * count for length, count in histogram.items()) == numbers["num_accepted_tokens"]
    assert numbers["num_output_tokens"] == numbers["num_accepted_tokens"] + numbers["num_request_steps"]
    if num_drafts:
        assert sum(numbers["acceptance_per_position"]) == pytest.approx(numbers["num_accepted_tokens"] / num_drafts)
        assert numbers["mean_acceptance_length"] == pytest.approx(1 + sum(numbers["acceptance_per_position"]))
        assert 1 <= numbers["mean_acceptance_length_per_request"] <= 6
    for rate in numbers["acceptance_per_position"] + numbers["conditional_acceptance_per_position"]:
        assert rate is None or 0 <= rate <= 1


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), min_size=1, max_size=4))
def test_conditional_product_is_unconditional_when_all_drafts_are_equally_long(runs: list[list[int]]) -> None:
    numbers = summary(*records_of([[(4, accepted) for accepted in steps] for steps in runs]), k=4)
    product = 1.0
    for unconditional, conditional in zip(
        numbers["acceptance_per_position"], numbers["conditional_acceptance_per_position"], strict=True
    ):
        product *= conditional if conditional is not None else 0.0
        assert unconditional == pytest.approx(product)


@given(st.lists(st.tuples(st.floats(1e-3, 1.0), st.integers(0, 3)), min_size=2, max_size=10))
def test_mean_inter_token_latency_is_the_time_per_output_token(steps: list[tuple[float, int]]) -> None:
    """For a request whose first step yields one token, as a prefill does."""
    times, now = [], 0.0
    for gap, _ in steps:
        now += gap
        times.append(now)
    accepted = (0, *(count for _, count in steps[1:]))
    one = record(drafted=accepted, accepted=accepted, times=tuple(times))
    gaps = inter_token_ms([one])
    assert len(gaps) == len(one.token_ids) - 1
    assert sum(gaps) / len(gaps) == pytest.approx(per_output_token_ms([one])[0])
