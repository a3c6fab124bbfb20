"""The number of draft tokens that pays at a load, found while requests run.

A number of them is worth the tokens that a request gains in a step that may draft so many, over what such a step takes:
goodput (Liu et al., TurboSpec, arXiv 2406.14066). Both are measured on the steps that run anyway, and now and then a
few steps try another number. Where the text does not depend on it, trying one costs time and nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from runner.engine.bucket import bucket
from runner.engine.schedule import CommittedTokens
from runner.engine.tokens_per_step import MEMORY, Mean, TokensPerStep

FIRST_DRAFTS = 48  # request-steps before the very first trial: how drafts of every length fare
SETTLING = 2  # steps behind a change of number: they take requests to the device, and find its memory cold
NUM_TIMED = 6  # steps of a number that is tried, compared with those of the number in use before them
TRIALS = 3  # that the cost of a number goes by, about
MOST_STEPS = 32  # of a trial, where steps cannot be timed or say little
SHORTEST_GAP, LONGEST_GAP = 32, 256  # steps between trials; it doubles while they change nothing
MOST_LOST, MOST_LOST_AT_FIRST = 0.02, 0.1  # of the time, by trials of what turns out to be slower; or the gap is longer
SURPRISE = 1.5  # a cost that is so many times what it was, or was of what it is: all of them are old
MARGIN = 1.02  # a number takes another's place if it is that much better


def usual_counts(most: int) -> list[int]:
    """Numbers of draft tokens that are worth telling apart: none, powers of two, and the most."""
    return [0, *(2**power for power in range(most.bit_length()) if 2**power < most), most]


@dataclass(frozen=True, kw_only=True)
class ObservedStep:
    max_draft_tokens: int  # of each request that decodes
    is_decoding: bool  # else it computes prompts
    gains: Sequence[CommittedTokens]  # of those that decode


@dataclass
class Load:
    """What is known of steps with about as many requests, and which of them comes next.

    Costs are in steps of the number in use. Those next to each other are compared, so that contexts that grow and a
    machine that slows down change nothing.
    """

    num_requests: int
    in_use: int  # the number of draft tokens that was best so far
    has_tried: bool = False  # else all it knows is what a similar load has taught
    # Of a step of each other number; without values, what was so long ago, or at a similar load.
    cost: dict[int, Mean] = field(default_factory=dict)
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=2 * NUM_TIMED))  # of steps of the one in use
    trying: int | None = None
    tried: list[float] = field(default_factory=list)  # s, of the trial's steps, but for the first
    spent: float = 0.0  # s, on all of them
    num_steps: int = 0  # of the trial, or since the last one
    num_interrupted: int = 0  # steps in a row that had prompts before them
    last_seen: int = 0  # step
    gap: float = SHORTEST_GAP
    idle: dict[int, int] = field(default_factory=dict)  # number -> steps since it was tried
    # Of steps of the number in use: tokens, and what prompts before them cost beyond their own computation.
    tokens: Mean = field(default_factory=lambda: Mean(MEMORY))
    interruption: Mean = field(default_factory=lambda: Mean(MEMORY))

    @property
    def choice(self) -> int:
        return self.in_use if self.trying is None else self.trying

    def worth(self, count: int, tokens: float) -> float:
        """Of a number that brings a request so many tokens a step, in tokens of a request by time.

        Prompts come by the tokens that are said, not by the steps. What one interrupts is known of the number in use,
        and goes with the cost of the others until one of them is in use.
        """
        cost = 1.0 if count == self.in_use else self.cost[count].value
        per_token = self.interruption.value / self.tokens.value if self.tokens.num_values else 0.0
        return tokens / (cost * (1.0 + per_token * self.num_requests * tokens))


class OnlineBudget:
    """How many tokens a request may draft in a step: the number of most tokens per second at the load of the moment.

    Knows no clock: whoever runs the steps says what they took, so ranks that are told the same choose the same.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        """num_speculative_tokens: the most."""
        self.counts = usual_counts(num_speculative_tokens)
        self._tokens = TokensPerStep(num_speculative_tokens)
        self._loads: dict[int, Load] = {}
        self._last_count, self._num_alike = -1, 0  # of the steps before: their number, and how many in a row had it
        self._is_interrupted = False  # there were prompts in the step before
        self._asked, self._num_steps = 1, 0  # for how many requests, last; steps so far

    def max_draft_tokens(self, num_running: int) -> int:
        """Of a step with this many requests; stays the same until the next one is observed."""
        self._asked = num_running
        return self._load(num_running).choice

    def observe(self, step: ObservedStep, seconds: float | None) -> None:
        """Take note of a step.

        Args:
            seconds: None: the step did what others of its kind do not, such as capturing a graph.
        """
        if not step.is_decoding:
            self._is_interrupted = True
            return
        count, load = step.max_draft_tokens, self._load(self._asked)
        self._num_steps += 1
        if self._num_steps - load.last_seen > LONGEST_GAP:  # what it was compared with is long ago
            load.seconds.clear()
            load.trying, load.num_steps = None, 0
        load.last_seen = self._num_steps
        self._num_alike = self._num_alike + 1 if count == self._last_count else 1
        self._last_count = count
        is_interrupted, self._is_interrupted = self._is_interrupted, False
        load.num_interrupted = load.num_interrupted + 1 if is_interrupted else 0
        if seconds is not None and count == load.choice and self._num_alike > SETTLING:
            # Where hardly a step is not interrupted, those that are is what is compared.
            self._time(load, step, seconds, is_usual=not is_interrupted or load.num_interrupted > MOST_STEPS)
        self._tokens.observe(count, step.gains)
        load.num_steps += 1
        load.spent += seconds or 0.0
        for each in load.idle:
            load.idle[each] += 1
        if load.trying is None:
            self._go_on(load)
        elif (len(load.tried) >= NUM_TIMED and self._tokens.is_known(count)) or load.num_steps >= MOST_STEPS:
            self._end_trial(load)

    def _time(self, load: Load, step: ObservedStep, seconds: float, *, is_usual: bool) -> None:
        if load.trying is not None:
            if is_usual:
                load.tried.append(seconds)
            return
        interruption = 0.0
        if is_usual:
            load.seconds.append(seconds)
        elif load.seconds:
            interruption = max(0.0, seconds / _typical(load.seconds) - 1.0)
        load.tokens.add(sum(len(gain.token_ids) for gain in step.gains))
        load.interruption.add(interruption)

    def _load(self, num_requests: int) -> Load:
        key = bucket(max(num_requests, 1))
        load = self._loads.get(key)
        if load is None:
            load = Load(num_requests=key, in_use=self.counts[-1], idle=dict.fromkeys(self.counts, 1))
            self._loads[key] = load
        if not load.has_tried and load.trying is None:
            self._teach(load)
        return load

    def _teach(self, load: Load) -> None:
        """What the most similar load knows by now, if one has tried anything."""
        size, others = load.num_requests, [other for other in self._loads.values() if other.has_tried]
        if not others:
            return
        nearest = min(others, key=lambda other: max(size, other.num_requests) / min(size, other.num_requests))
        if nearest.in_use != load.in_use:
            load.in_use, load.num_steps = nearest.in_use, 0
            load.seconds.clear()
        load.cost = {count: Mean(mean.memory, mean.value) for count, mean in nearest.cost.items()}

    def _go_on(self, load: Load) -> None:
        """Stay, or try another number."""
        if len(load.seconds) < NUM_TIMED:
            return
        if untried := self._untried(load):
            if load.num_steps * load.num_requests >= FIRST_DRAFTS:
                self._try(load, untried[-1])
        elif load.num_steps >= load.gap:
            best = max(self._worth(load, count) for count in self.counts)
            old = [count for count, mean in load.cost.items() if not mean.num_values]
            # Those that do badly are tried too, but less often.
            urgency = {count: load.idle[count] * (self._worth(load, count) / best) ** 2 for count in old or load.cost}
            self._try(load, max(urgency, key=lambda count: urgency[count]))
        elif load.num_steps % NUM_TIMED == 0:
            self._choose(load)

    def _untried(self, load: Load) -> list[int]:
        return [count for count in self.counts if count not in load.cost and count != load.in_use]

    def _try(self, load: Load, count: int) -> None:
        load.trying, load.num_steps, load.spent, load.idle[count] = count, 0, 0.0, 0
        load.tried.clear()
        self._tokens.look_again(count, load.in_use)

    def _end_trial(self, load: Load) -> None:
        assert load.trying is not None
        # If nothing was timed, nothing speaks for it.
        cost = load.cost.setdefault(load.trying, Mean(TRIALS, max(1.0, (1 + load.trying) / (1 + load.in_use))))
        if load.tried:
            measured = _typical(load.tried) / _typical(load.seconds)
            if cost.num_values and max(measured / cost.value, cost.value / measured) > SURPRISE:
                for mean in load.cost.values():
                    mean.num_values = 0
            cost.add(measured)
        tried, num_steps = load.trying, load.num_steps
        load.trying, load.num_steps, load.has_tried = None, 0, True
        if untried := self._untried(load):
            self._try(load, untried[-1])
            return
        gained = num_steps * self._tokens.expected(tried) / self._tokens.expected(load.in_use)
        lost = load.spent / _typical(load.seconds) - gained  # in steps of the number in use
        if not load.tried or all(mean.num_values for mean in load.cost.values()):
            load.gap = max(min(2 * load.gap, LONGEST_GAP), lost / MOST_LOST)
        else:
            load.gap = max(SHORTEST_GAP, lost / MOST_LOST_AT_FIRST)
        self._choose(load)

    def _choose(self, load: Load) -> None:
        best = max(self.counts, key=lambda count: self._worth(load, count))
        if self._worth(load, best) <= MARGIN * self._worth(load, load.in_use):
            return
        unit = load.cost.pop(best).value
        load.cost[load.in_use] = Mean(TRIALS, 1.0, 1)
        for mean in load.cost.values():
            mean.value /= unit
        load.idle[load.in_use] = 0
        load.in_use, load.num_steps, load.gap = best, 0, SHORTEST_GAP
        load.seconds.clear()
        for mean in (load.tokens, load.interruption):  # of the number that was left
            mean.num_values = min(mean.num_values, NUM_TIMED)

    def _worth(self, load: Load, count: int) -> float:
        return load.worth(count, self._tokens.expected(count))


def _typical(seconds: Sequence[float]) -> float:
    """Their mean, but for what a machine that hiccups does to one of them."""
    most = 2 * median(seconds)
    return fmean(min(each, most) for each in seconds)
