"""Requests on their way through the steps: they arrive, wait for a place, are told to stop, fail or finish.

Whatever is raised meanwhile, in the end none of them holds anything of the engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from runner.engine.request import Request
from runner.engine.scheduler import Scheduler
from runner.metrics import MetricsCollector
from runner.ranks.ranks import Ranks
from runner.step_loop import StepLoop
from runner.trace import RequestTraces

Observer = Callable[[MetricsCollector], None]


class RequestLoop:
    def __init__(self, steps: StepLoop, to_abort: set[str], ranks: Ranks) -> None:
        """to_abort: prompts whose requests are to end before the next step; any thread may add to it."""
        self._steps, self._to_abort, self._ranks = steps, to_abort, ranks
        self._engine, self._scheduler = steps.engine, steps.scheduler

    def run(
        self,
        requests: Sequence[Request],
        *,
        max_concurrency: int | None = None,
        arrivals: Sequence[float] | None = None,
        observer: Observer | None = None,
    ) -> RequestTraces:
        """What LLM.run says."""
        try:
            return self._run(requests, max_concurrency, arrivals, observer)
        except BaseException:  # perhaps in the middle of the bookkeeping; no request is left that has a block
            self._scheduler.blocks.reset()
            raise

    def _run(
        self,
        requests: Sequence[Request],
        max_concurrency: int | None,
        arrivals: Sequence[float] | None,
        observer: Observer | None,
    ) -> RequestTraces:
        steps, scheduler = self._steps, self._scheduler
        arriving, started = deque(requests), self._ranks.share(time.perf_counter())
        due = deque([] if arrivals is None else [started + seconds for seconds in arrivals])
        with released_in_the_end(steps, requests):
            while arriving or scheduler.has_unfinished:
                now, asked, seconds = self._ranks.share((time.perf_counter(), self._asked(), steps.seconds))
                steps.tell_budget(seconds)
                if asked:
                    self._abort(requests, asked, now)
                while arriving and (max_concurrency is None or scheduler.num_unfinished < max_concurrency):
                    if due and due[0] > now and not arriving[0].is_finished:
                        break
                    self._admit(arriving.popleft(), due.popleft() if due else now)
                if not scheduler.has_unfinished:  # those that arrived were refused or have ended
                    if due:
                        time.sleep(max(0.0, due[0] - time.perf_counter()))
                    continue
                self._ranks.note(steps.step())
                if observer is not None:
                    observer(steps.metrics)
            self._ranks.share(None)  # so that ranks compare what the last step brought, too
        return steps.traces

    def _admit(self, request: Request, arrival_time: float) -> None:
        """arrival_time: s, time.perf_counter; its wait counts from here."""
        if request.is_finished:
            return  # aborted before it arrived
        request.arrival_time = arrival_time
        reason = self._scheduler.refusal(request) or self._engine.grammars.open(request)
        if reason is None:
            self._scheduler.add(request)
        else:
            self._scheduler.abort(request)
            self._steps.metrics.finish(self._steps.traces.fail(request, reason))

    def _asked(self) -> set[str]:
        """The prompts that are to end."""
        asked = set[str]()
        while self._to_abort:  # one by one: another thread may be about to add to this very set
            asked.add(self._to_abort.pop())
        return asked

    def _abort(self, requests: Sequence[Request], asked: set[str], now: float) -> None:
        for request in requests:
            if str(request.prompt_index) in asked and not request.is_finished:
                if not request.arrival_time:
                    request.arrival_time = now  # it had not come yet
                self._scheduler.abort(request, finish_reason="abort")
                self._steps.proposer.release(request.request_id)
                self._steps.metrics.finish(self._steps.traces.finish(request))


@contextmanager
def released_in_the_end(steps: StepLoop, requests: Sequence[Request]) -> Iterator[None]:
    """Also where the release of one of them raises. The first are released first: they wait in front."""
    with ExitStack() as ending:
        for request in reversed(requests):
            ending.callback(_end, request, steps.scheduler)
            ending.callback(steps.engine.grammars.close, request.request_id)
            ending.callback(steps.proposer.release, request.request_id)
        yield


def _end(request: Request, scheduler: Scheduler) -> None:
    if not request.is_finished:
        scheduler.abort(request)
