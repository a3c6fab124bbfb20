"""One pass over a workload: all of its requests, brought to their end by one proposer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from proposers.base import Proposer
from runner.engine.graphs import GraphStore
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM
from runner.metrics import CoreWait, MetricsCollector
from runner.prompts import make_requests
from runner.request_loop import Observer
from runner.workload import WorkloadItem, arrival_times, params_of

WARM_UP_SECONDS = 1.0
WARM_UP_STEPS = 16


@dataclass(frozen=True, kw_only=True)
class Pass:
    """All requests of the workload, once."""

    metrics: MetricsCollector
    requests: list[Request]
    errors: dict[str, str]  # request_id -> why it failed


def run_pass(
    llm: LLM,
    proposer: Proposer,
    items: Sequence[WorkloadItem],
    metrics: MetricsCollector,
    *,
    max_concurrency: int | None,  # requests in flight at most; None: no bound
    max_draft_tokens: int | None = None,  # as LLM.run
    restarts: bool = False,  # as LLM.run
    observer: Observer | None = None,
) -> Pass:
    """Samples as the configuration says, and lets requests arrive at its request_rate."""
    requests = workload_requests(llm, items, llm.config.sampler.to_sampling_params())
    categories = {
        request.request_id: category
        for request in requests
        if (category := items[request.prompt_index].category) is not None
    }
    request_rate, arrivals = llm.config.workload.request_rate, None
    if request_rate is not None:
        times = arrival_times(len(items), request_rate, llm.config.seed)
        arrivals = [times[request.prompt_index] for request in requests]
    core_wait = CoreWait()
    traces = llm.run(
        requests,
        proposer,
        metrics,
        max_concurrency=max_concurrency,
        max_draft_tokens=max_draft_tokens,
        arrivals=arrivals,
        restarts=restarts,
        categories=categories,
        observer=observer,
    )
    metrics.core_wait_share = core_wait.share()
    return Pass(metrics=metrics, requests=requests, errors=traces.errors)


def workload_requests(llm: LLM, items: Sequence[WorkloadItem], params: SamplingParams) -> list[Request]:
    """The requests of all items; a line's own sampling parameters stand in place of these."""
    own = [params_of(item, params) for item in items]
    origins = [item.origin for item in items]
    return make_requests([item.prompt for item in items], own, llm.engine.tokenizer, llm.config.seed, origins)


def warm_up(
    llm: LLM, items: Sequence[WorkloadItem], proposers: Sequence[Proposer], *, max_concurrency: int | None
) -> None:
    """The workload itself, untimed, with each of the proposers, which learn nothing by it.

    What comes for the first time, a batch of another size say, is compiled, and captured when it comes again. So the
    workload is run until it brings nothing new, or as long as _Rehearsal says: of one that takes minutes the beginning.
    """
    for proposer in proposers:
        rehearsal, num_known = _Rehearsal(llm, len(items)), -1
        while not rehearsal.is_over and num_known < GraphStore.num_first_calls:
            num_known = GraphStore.num_first_calls
            requests = workload_requests(llm, items, llm.config.sampler.to_sampling_params())
            # A method that learned the answers here would be measured too fast.
            llm.run(
                requests,
                proposer,
                MetricsCollector(),
                max_concurrency=max_concurrency,
                learns=False,
                observer=rehearsal.observe,
            )


class _Rehearsal:
    """Ends its requests when they have had WARM_UP_STEPS, and WARM_UP_SECONDS of steps that brought nothing new."""

    def __init__(self, llm: LLM, num_items: int) -> None:
        self._llm, self._num_items = llm, num_items
        self._seconds, self._num_steps = 0.0, 0
        self._seen, self._num_known = time.perf_counter(), GraphStore.num_first_calls

    @property
    def is_over(self) -> bool:
        return self._num_steps >= WARM_UP_STEPS and self._seconds >= WARM_UP_SECONDS

    def observe(self, metrics: MetricsCollector) -> None:
        """Comes behind every step."""
        now, num_known = time.perf_counter(), GraphStore.num_first_calls
        if num_known == self._num_known:
            self._seconds += now - self._seen
        self._num_steps += 1
        self._seen, self._num_known = now, num_known
        if self.is_over:
            for index in range(self._num_items):
                self._llm.abort(str(index))
