"""num_speculative_tokens_per_batch_size=auto: the number of draft tokens that pays is found while requests run."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.config.to_vllm import to_vllm
from runner.engine import online_budget
from runner.engine.draft_budget import DraftBudget
from runner.engine.online_budget import ObservedStep, OnlineBudget, usual_counts
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.engine.schedule import CommittedTokens
from tests.conftest import Engines, complete
from tests.test_config import problems
from tests.test_losslessness import METHODS, PARAMS, PROMPTS, ROOMY, answers, method_config, tell_test_proposers
from tests.test_method_config import method_of

AUTO = {"num_speculative_tokens_per_batch_size": "auto"}
REQUEST = Request(request_id="0", prompt_token_ids=[1], sampling_params=SamplingParams(), seed=0)


@dataclass
class Machine:
    """Steps of a made-up engine: what they take, and what drafts bring."""

    most: int
    acceptance: float  # of each draft behind accepted ones
    a_row: float  # of a step's time without drafts, with one request: what each further row adds
    a_draft: float  # and each draft token of the drafter's passes
    width: int = 1  # of draft trees: a level has so many nodes
    noise: float = 0.1
    budget: OnlineBudget = field(init=False)
    random: random.Random = field(default_factory=lambda: random.Random(0))
    used: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self.budget = OnlineBudget(self.most)

    def time(self, count: int, num_requests: int) -> float:
        return 1.0 + self.a_row * (num_requests * (count + 1) - 1) + self.a_draft * (count // self.width)

    def tokens(self, count: int) -> float:
        return sum(self.acceptance**depth for depth in range(count // self.width + 1))

    def worth(self, count: int, num_requests: int) -> float:
        """Tokens per second."""
        return num_requests * self.tokens(count) / self.time(count, num_requests)

    def best(self, num_requests: int) -> float:
        return max(self.worth(count, num_requests) for count in self.budget.counts)

    def run(self, num_steps: int, num_requests: int) -> float:
        """Tokens per second of these steps, over those of the best number alone, noise aside."""
        seconds, tokens = 0.0, 0.0
        for _ in range(num_steps):
            count = self.budget.max_draft_tokens(num_requests)
            assert self.budget.max_draft_tokens(num_requests) == count
            gains = [self._gain(count) for _ in range(num_requests)]
            took = self.time(count, num_requests)
            seconds, tokens = seconds + took, tokens + num_requests * self.tokens(count)
            self.used[count] += 1
            took *= self.random.lognormvariate(0.0, self.noise) * (8 if self.random.random() < 0.01 else 1)
            self.budget.observe(_step(count, gains), took)
        return tokens / seconds / self.best(num_requests)

    def _gain(self, count: int) -> CommittedTokens:
        depth, accepted = count // self.width, 0
        while accepted < depth and self.random.random() < self.acceptance:
            accepted += 1
        return CommittedTokens(
            request=REQUEST,
            token_ids=[0] * (accepted + 1),
            num_draft_tokens=count,
            draft_depth=depth,
            num_accepted_tokens=accepted,
        )


PROMPTS_STEP = ObservedStep(max_draft_tokens=0, is_decoding=False, gains=[])


def _step(count: int, gains: list[CommittedTokens]) -> ObservedStep:
    return ObservedStep(max_draft_tokens=count, is_decoding=True, gains=gains)


machines = st.builds(
    Machine,
    most=st.integers(1, 12),
    acceptance=st.floats(0.1, 0.95),
    a_row=st.floats(0.0, 0.5),
    a_draft=st.floats(0.0, 0.3),
    width=st.sampled_from([1, 1, 2]),
    random=st.integers(0, 99).map(random.Random),
)


@settings(deadline=None, max_examples=60)
@given(machines, st.sampled_from([1, 2, 5, 16, 40]))
def test_after_a_while_no_number_is_much_faster_than_the_one_that_is_found(machine: Machine, size: int) -> None:
    machine.run(1000, size)
    assert machine.run(1000, size) > 0.88


@settings(deadline=None, max_examples=30)
@given(machines, st.sampled_from([1, 5, 40]))
def test_learning_costs_little(machine: Machine, size: int) -> None:
    assert machine.run(1000, size) > 0.75


def test_every_load_has_its_own_number_and_a_new_one_begins_with_what_a_similar_one_taught() -> None:
    machine = Machine(most=8, acceptance=0.8, a_row=0.1, a_draft=0.02)
    machine.run(1000, 1)
    machine.run(600, 40)
    assert machine.budget.max_draft_tokens(40) in (0, 1)
    machine.used.clear()
    machine.run(100, 1)
    assert machine.used.most_common(1)[0][0] in (4, 8)
    machine.used.clear()
    machine.run(20, 36)
    assert machine.used.keys() <= {0, 1}, "not what is best for one request alone"


def test_a_load_that_comes_too_seldom_to_learn_follows_the_most_similar_one() -> None:
    machine = Machine(most=8, acceptance=0.5, a_row=1.0, a_draft=0.0)
    assert machine.budget.max_draft_tokens(7) == 8, "nothing is known yet"
    machine.run(1000, 8)
    assert machine.budget.max_draft_tokens(7) == machine.budget.max_draft_tokens(8) == 0


def test_what_is_much_slower_is_tried_the_less_often_for_it() -> None:
    """A draft token costs as much as a step; a trial of eight is eight times as dear as one of one."""
    machine = Machine(most=8, acceptance=0.1, a_row=1.0, a_draft=0.0)
    machine.run(2000, 4)
    assert machine.run(4000, 4) > 0.97


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("end", [0.1, 0.95])
def test_it_follows_a_workload_that_changes(end: float, size: int, width: int) -> None:
    machine = Machine(most=8, acceptance=1.05 - end, a_row=0.06 / size, a_draft=0.02, width=width)
    machine.run(1500, size)
    machine.acceptance = end
    machine.run(4000, size)
    assert machine.run(1000, size) > 0.9


def test_it_follows_a_machine_that_changes() -> None:
    machine = Machine(most=8, acceptance=0.8, a_row=0.01, a_draft=0.0)
    machine.run(1000, 4)
    machine.used.clear()
    machine.a_row = 1.0  # others share it now: rows are dear
    machine.run(3000, 4)
    assert machine.run(500, 4) > 0.9


def test_steps_that_cannot_be_timed_teach_no_cost_and_nobody_waits_for_them() -> None:
    machine = Machine(most=4, acceptance=0.9, a_row=0.1, a_draft=0.0)
    for _ in range(500):
        count = machine.budget.max_draft_tokens(2)
        machine.budget.observe(_step(count, [machine._gain(count)] * 2), None)
    assert machine.budget.max_draft_tokens(2) == 4, "as configured, as long as nothing else is known"
    assert machine.run(1000, 2) > 0.8


def test_a_step_that_does_more_than_others_is_not_taken_for_the_cost_of_its_number() -> None:
    """The first steps behind a change of number take ten times as long as those that follow."""
    machine = Machine(most=4, acceptance=0.8, a_row=0.02, a_draft=0.0, noise=0.0)
    before = None
    for _ in range(2000):
        count = machine.budget.max_draft_tokens(1)
        took = machine.time(count, 1) * (1 if before == count else 10)
        machine.used[count] += 1
        machine.budget.observe(_step(count, [machine._gain(count)]), took)
        before = count
    assert machine.used[4] > 1800


def test_what_prompts_interrupt_counts_against_numbers_whose_steps_they_make_long() -> None:
    """Steps alone speak for 4 tokens; behind prompts they take five times as long, steps without drafts no longer."""
    machine = Machine(most=4, acceptance=0.7, a_row=0.1, a_draft=0.0, noise=0.0)
    size = 4
    assert machine.worth(4, size) > 1.05 * machine.worth(0, size)
    budget = machine.budget
    due = 0.0
    for number in range(3000):
        count = budget.max_draft_tokens(size)
        has_prompt = due >= 16  # a prompt for so many tokens
        due -= 16 * has_prompt
        gains = [machine._gain(count) for _ in range(size)]
        due += sum(len(gain.token_ids) for gain in gains)
        took = machine.time(count, size)
        if has_prompt:
            took *= 1 + count
            budget.observe(PROMPTS_STEP, 10.0)
        budget.observe(_step(count, gains), took)
        machine.used[count] += number >= 1000
    assert machine.used.most_common(1)[0][0] < 4


@pytest.mark.parametrize("rhythm", [1, 2, 5])
def test_where_hardly_a_step_is_without_prompts_it_learns_all_the_same(rhythm: int) -> None:
    """Every first, second or fifth step has prompts before it; drafts are hardly ever right."""
    machine = Machine(most=8, acceptance=0.1, a_row=0.5, a_draft=0.1)
    budget = machine.budget
    for number in range(2000):
        if number % rhythm == 0:
            budget.observe(PROMPTS_STEP, 2.0)
        count = budget.max_draft_tokens(4)
        gains = [machine._gain(count) for _ in range(4)]
        machine.used[count] += number >= 1000
        budget.observe(_step(count, gains), machine.time(count, 4) * machine.random.uniform(0.9, 1.1))
    assert machine.used.most_common(1)[0][0] == 0


def test_a_load_that_comes_again_is_compared_with_nothing_of_long_ago() -> None:
    """All steps take four times as long by then, whatever is drafted: no cost has changed."""
    machine = Machine(most=8, acceptance=0.7, a_row=0.05, a_draft=0.0, noise=0.0)
    machine.run(1000, 1)
    known = {count: mean.value for count, mean in machine.budget._loads[1].cost.items()}
    machine.run(600, 40)
    time = machine.time
    machine.time = lambda count, size: 4 * time(count, size)  # type: ignore[method-assign]
    machine.run(300, 1)
    load = machine.budget._loads[1]
    assert {count: mean.value for count, mean in load.cost.items()} == pytest.approx(known, rel=0.01)
    assert all(mean.num_values for mean in load.cost.values())


def test_ranks_that_are_told_the_same_choose_the_same() -> None:
    ours, theirs = OnlineBudget(6), OnlineBudget(6)
    machine = Machine(most=6, acceptance=0.6, a_row=0.05, a_draft=0.05)
    for number in range(1500):
        size = 1 + number // 50 % 7
        count = ours.max_draft_tokens(size)
        assert theirs.max_draft_tokens(size) == count
        step = _step(count, [machine._gain(count) for _ in range(size)])
        seconds = machine.time(count, size) * machine.random.uniform(0.5, 2.0)
        ours.observe(step, seconds)
        theirs.observe(step, seconds)


@pytest.mark.parametrize(("most", "counts"), [(1, [0, 1]), (2, [0, 1, 2]), (6, [0, 1, 2, 4, 6]), (8, [0, 1, 2, 4, 8])])
def test_numbers_that_are_told_apart(most: int, counts: list[int]) -> None:
    assert usual_counts(most) == counts == OnlineBudget(most).counts


def test_a_bound_on_the_batch_size_comes_first() -> None:
    budget = DraftBudget(num_speculative_tokens=4, disable_by_batch_size=2, online=OnlineBudget(4))
    assert [budget.max_draft_tokens(running, 0) for running in (1, 2, 3)] == [4, 4, 0]


def make_restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another number is tried in every other step."""
    for name in ("NUM_TIMED", "FIRST_DRAFTS", "SHORTEST_GAP", "LONGEST_GAP"):
        monkeypatch.setattr(online_budget, name, 1)
    monkeypatch.setattr(online_budget, "SETTLING", 0)


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is, by a clock that is none."""
    make_restless(monkeypatch)
    observe, clock = OnlineBudget.observe, random.Random(0)

    def observe_at_random(budget: OnlineBudget, step: ObservedStep, seconds: float | None) -> None:
        observe(budget, step, clock.uniform(0.1, 1.0))

    monkeypatch.setattr(OnlineBudget, "observe", observe_at_random)


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("method", METHODS)
def test_whatever_is_tried_changes_no_token(engines: Engines, plain: list[Request], method: str) -> None:
    tell_test_proposers(plain)
    requests, metrics = complete(engines({**method_config(method, 4), **AUTO}, **ROOMY), PROMPTS, PARAMS)
    assert answers(requests) == answers(plain)
    assert len(metrics.decoding_steps_by_budget) > 1


def test_what_was_found_is_kept_from_call_to_call_and_a_set_number_needs_none_of_it(engines: Engines) -> None:
    llm = engines({**method_config("ngram", 4), **AUTO, "prompt_lookup_max": 4}, **ROOMY)
    first, again = (llm.scheduler_for(llm.engine.proposer).draft_budget for _ in range(2))
    assert first.online is again.online is not None
    assert llm.scheduler_for(llm.engine.plain_proposer).draft_budget.online is None
    a_set_number = llm.scheduler_for(llm.engine.proposer, 2).draft_budget
    assert (a_set_number.online, a_set_number.max_draft_tokens(1, 0)) == (None, 2)


def test_steps_in_which_something_is_captured_are_not_timed(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, observe = list[float | None](), OnlineBudget.observe

    def observed(budget: OnlineBudget, step: ObservedStep, seconds: float | None) -> None:
        seen.append(seconds)
        observe(budget, step, seconds)

    monkeypatch.setattr(OnlineBudget, "observe", observed)
    llm = engines({**method_config("ngram", 3), **AUTO}, **ROOMY)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    complete(llm, PROMPTS[:1], [params])
    timed = [seconds for seconds in seen if seconds is not None]
    assert seen[1] is None and len(timed) > 10


def test_a_step_behind_a_part_of_a_prompt_is_not_timed(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for such a part: what a GPU computes of it yet would be the next step's time."""
    seen, observe = list[tuple[bool, float | None]](), OnlineBudget.observe

    def observed(budget: OnlineBudget, step: ObservedStep, seconds: float | None) -> None:
        seen.append((step.is_decoding, seconds))
        observe(budget, step, seconds)

    llm = engines({**method_config("ngram", 3), **AUTO}, max_num_batched_tokens=16, max_num_seqs=2)
    params = [SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)] * 2
    prompts = [{"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [7] * 60}]
    complete(llm, prompts, params)  # whatever is captured, is now
    monkeypatch.setattr(OnlineBudget, "observe", observed)
    complete(llm, prompts, params)
    of_parts = [place for place, (is_decoding, _) in enumerate(seen) if not is_decoding][1:-1]
    assert len(of_parts) >= 2 and all(seen[place + 1] == (True, None) for place in of_parts)


def test_requests_that_never_speculate_teach_nothing(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnlineBudget, "observe", lambda *_: pytest.fail("observed"))
    llm = engines({**method_config("ngram", 3), **AUTO}, **ROOMY)
    complete(llm, PROMPTS[:1], [SamplingParams(max_tokens=6, ignore_eos=True, speculative_sampling=False)])


def test_auto_is_said_as_such_and_nothing_like_it() -> None:
    assert method_of({"method": "ngram", **AUTO}).num_speculative_tokens_per_batch_size == "auto"
    text = problems(method={"method": "ngram", "num_speculative_tokens_per_batch_size": "automatic"})
    assert "must be a list of [start, end, K], such as [[1, 8, 4], [9, 64, 2]], or auto, got 'automatic'" in text


@pytest.mark.parametrize(("rule", "is_noted"), [("strict", False), ("probabilistic", True), ("block", True)])
def test_rules_whose_tokens_go_by_the_number_of_drafts_say_that_the_clock_has_a_part_in_them(
    rule: str, is_noted: bool
) -> None:
    notes = method_of({"method": "draft_model", "rejection_sample_method": rule, **AUTO}).notes()
    assert any("goes by the clock" in note for note in notes) == is_noted


def test_vllm_is_told_nothing_of_it_but_a_bound_on_the_batch_size_stays() -> None:
    values: dict[str, Any] = {"method": "draft_model", "model": "draft", **AUTO}
    config, notes = to_vllm(method_of(values))
    assert config is not None and "num_speculative_tokens_per_batch_size" not in config
    assert any(note.startswith("num_speculative_tokens_per_batch_size=auto left out") for note in notes)
    config, _ = to_vllm(method_of({**values, "disable_by_batch_size": 8}))
    assert config is not None and config["num_speculative_tokens_per_batch_size"] == [[1, 8, 4], [9, 9, 0]]
