"""Steps of one schedule and one proposer: the algorithm on one screen.

A step is schedule, propose, verify, commit, update. Where it runs whole (runner/whole_steps.py), the host has little
left to do but to commit; on a GPU the next step is launched before the last one is read.
"""

from __future__ import annotations

import time

from proposers.base import Proposer, check_drafts
from runner.assembly import Assembly
from runner.engine.graphs import GraphStore
from runner.engine.online_budget import ObservedStep
from runner.engine.request import RequestStatus, StepOutcome
from runner.engine.schedule import CommittedTokens, Schedule
from runner.engine.scheduler import Scheduler
from runner.metrics import InParts, MetricsCollector, RequestStep, StepRecord
from runner.trace import RequestTraces
from runner.whole_steps import LaunchedStep, WholeSteps


class StepLoop:
    def __init__(
        self,
        engine: Assembly,
        scheduler: Scheduler,
        proposer: Proposer,
        metrics: MetricsCollector,
        traces: RequestTraces,
    ) -> None:
        self.engine, self.scheduler, self.proposer = engine, scheduler, proposer
        self.metrics, self.traces = metrics, traces
        self._steps_by_load = engine.whole_steps.get(proposer)
        self._whole_steps: WholeSteps | None = None  # whose step is under way
        self._launched: LaunchedStep | None = None  # is under way, not read yet
        self._committed: tuple[LaunchedStep, list[CommittedTokens]] | None = None  # where steps do not run ahead
        self.seconds: float | None = None  # of the last step; None: it compiled, captured, or waited for a prompt
        self._is_unread = False  # nobody has waited for the prompts of the last step, which a GPU may still compute
        self._observed: ObservedStep | None = None  # the last step, where its requests speculate

    def step(self) -> list[CommittedTokens]:
        """Compute and commit one step, of every method, `none` included."""
        started, num_first_calls = time.perf_counter(), GraphStore.num_first_calls
        waits_for_others = self._is_unread
        committed = self._step(started)
        is_usual = num_first_calls == GraphStore.num_first_calls and not waits_for_others
        self.seconds = time.perf_counter() - started if is_usual else None
        return committed

    def tell_budget(self, seconds: float | None) -> None:
        """What the last step took, by the clock that all ranks go by, is what the budget of drafts learns from."""
        step, self._observed = self._observed, None
        if step is not None and (online := self.scheduler.draft_budget.online) is not None:
            online.observe(step, seconds)

    def _step(self, started: float) -> list[CommittedTokens]:
        if self._launched is not None and all(request.is_finished for request in self._launched.requests):
            self._launched = None  # there is nobody to read it for
        if self._launched is not None:
            return self._whole(self._launched, started)
        if self._committed is not None:
            (launched, committed), self._committed = self._committed, None
            assert self._whole_steps is not None
            following = self._whole_steps.go_on(launched, self.scheduler)
            if following is not None:
                return self._whole(following, started)
            self._whole_steps.stop(launched, committed)
        schedule = self.scheduler.schedule()
        for request in schedule.preempted:
            self.proposer.release(request.request_id)
        steps = self._whole_steps_for(schedule)
        if isinstance(steps, InParts):
            return self._in_parts(schedule, steps, started)
        self._whole_steps = steps
        return self._whole(steps.start(schedule), started)

    def _whole_steps_for(self, schedule: Schedule) -> WholeSteps | InParts:
        """What computes this step whole, or why it runs in parts."""
        if self._steps_by_load is None:
            return InParts.UNCAPTURED
        steps = self._steps_by_load(self.scheduler.max_draft_tokens)
        if isinstance(steps, WholeSteps) and not any(
            item.request.sampling_params.speculates for item in schedule.scheduled
        ):
            steps = self.engine.whole_steps[self.engine.plain_proposer](0)  # a drafter need not follow
        return steps if isinstance(steps, InParts) else steps.conditions.unmet(schedule, self.scheduler) or steps

    def _in_parts(self, schedule: Schedule, reason: InParts, started: float) -> list[CommittedTokens]:
        """The host takes part between drafting and verification."""
        engine, proposer = self.engine, self.proposer
        scheduled = time.perf_counter()
        drafts = proposer.propose(schedule)
        check_drafts(proposer, schedule, drafts)
        proposed = time.perf_counter()
        drafts, bitmask = engine.grammars.constrain(schedule, drafts)
        output = engine.verifier.verify(
            schedule,
            drafts,
            bitmask,
            proposer.tap_layers,
            taps_every_token=proposer.taps_every_token,
            keeps_logits=proposer.reads_logits,
        )
        verified = time.perf_counter()
        committed, failures = self._commit(schedule, output.read(drafts))
        done = time.perf_counter()
        proposer.update(schedule, output)
        self._release(committed)
        updated = time.perf_counter()
        seconds = {
            "schedule": scheduled - started + done - verified,
            "propose": proposed - scheduled + updated - done,
            "verify": verified - proposed,
        }
        return self._observe(schedule, committed, failures, seconds, started=started, done=done, in_parts=reason)

    def _whole(self, launched: LaunchedStep, started: float) -> list[CommittedTokens]:
        """The step runs already; read it, where steps run ahead with the next one launched."""
        assert self._whole_steps is not None
        runs_ahead = self._whole_steps.runs_ahead
        if runs_ahead:
            self._launched = self._whole_steps.go_on(launched, self.scheduler)
        outcome = launched.read()
        known = time.perf_counter()
        committed, failures = self._commit(launched.schedule, outcome)
        done = time.perf_counter()
        if not runs_ahead:
            self._committed = launched, committed
        elif self._launched is None:
            self._whole_steps.stop(launched, committed)
        self._release(committed)
        found = launched.seconds_to_find
        seconds = {"propose": found, "whole_step": known - started - found, "schedule": done - known}
        return self._observe(launched.schedule, committed, failures, seconds, started=started, done=done, in_parts=None)

    def _commit(self, schedule: Schedule, outcome: StepOutcome) -> tuple[list[CommittedTokens], dict[str, str]]:
        """And why requests fail, by request_id."""
        committed = self.scheduler.commit(schedule, outcome)
        failures = self.engine.grammars.commit(committed)
        for gain in committed:
            if gain.request.request_id in failures:
                self.scheduler.abort(gain.request)
        return committed, failures

    def _release(self, committed: list[CommittedTokens]) -> None:
        for gain in committed:
            if gain.request.is_finished:
                self.proposer.release(gain.request.request_id)
                self.engine.grammars.close(gain.request.request_id)

    def _observe(
        self,
        schedule: Schedule,
        committed: list[CommittedTokens],
        failures: dict[str, str],
        seconds: dict[str, float],
        *,
        started: float,
        done: float,
        in_parts: InParts | None,
    ) -> list[CommittedTokens]:
        self._is_unread = not any(item.yields_token for item in schedule.scheduled)
        if self.scheduler.draft_budget.online is not None:
            self._observed = self._as_observed(schedule, committed)
        for gain in committed:
            self.traces.observe(gain, done)
            if gain.request.status is RequestStatus.FINISHED:
                self.metrics.finish(self.traces.finish(gain.request))
            elif gain.request.status is RequestStatus.FAILED:
                self.metrics.finish(self.traces.fail(gain.request, failures[gain.request.request_id]))
        finished_at = time.perf_counter()
        self.metrics.observe(
            StepRecord(
                finished_at=finished_at,
                seconds=seconds,
                total_seconds=finished_at - started,
                is_decoding=bool(schedule.decoding),
                max_draft_tokens=schedule.max_draft_tokens,
                in_parts=in_parts,
                request_steps=tuple(
                    RequestStep(
                        request_id=gain.request.request_id,
                        num_draft_tokens=gain.num_draft_tokens,
                        num_accepted_tokens=gain.num_accepted_tokens,
                        num_output_tokens=len(gain.token_ids),
                    )
                    for gain in committed
                ),
            )
        )
        return committed

    def _as_observed(self, schedule: Schedule, committed: list[CommittedTokens]) -> ObservedStep | None:
        """What a budget learns from a step; None: nobody speculates whom it is for, or whom it interrupts."""
        is_decoding = bool(schedule.decoding)
        concerned = (item.request for item in schedule.scheduled) if is_decoding else self.scheduler.running
        if not any(request.sampling_params.speculates for request in concerned):
            return None
        gains = committed if is_decoding else []
        return ObservedStep(max_draft_tokens=schedule.max_draft_tokens, is_decoding=is_decoding, gains=gains)
