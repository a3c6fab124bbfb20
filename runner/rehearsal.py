"""What comes before the clock: the workload itself, so that what it brings is compiled and captured.

A layout of a step, a batch of another size say, is compiled when it comes for the first time, and captured when it
comes again, which would count as the method's own time. Of a workload that takes long the beginning is rehearsed, and
then its batch shrinks through all sizes, as it will in the end, or as requests that arrive one by one make it grow.
"""

from __future__ import annotations

from collections.abc import Sequence

from proposers.base import Proposer
from runner.engine.bucket import bucket
from runner.engine.graphs import GraphStore
from runner.engine.request import Request
from runner.llm import LLM
from runner.metrics import MetricsCollector
from runner.passes import workload_requests
from runner.workload import WorkloadItem

MAX_REHEARSALS = 4  # of a short workload that brings something new each time
SECONDS, STEPS = 1.0, 16  # at the workload's own pace: of steps without prompts that brought nothing new
MOST_SECONDS = 10.0  # the same with prompts
STEPS_OF_A_SIZE = 4


def warm_up(
    llm: LLM, items: Sequence[WorkloadItem], proposers: Sequence[Proposer], *, max_concurrency: int | None
) -> None:
    """Run the workload, untimed, with each of the proposers, a short one until it brings nothing new.

    They know its answers afterwards: what is measured then begins anew (Proposer.restart).
    """
    for proposer in proposers:
        for _ in range(MAX_REHEARSALS):
            num_known = GraphStore.num_first_calls
            requests = workload_requests(llm, items, llm.config.sampler.to_sampling_params())
            rehearsal = Rehearsal(llm, requests)
            llm.run(
                requests,
                proposer,
                MetricsCollector(),
                max_concurrency=max_concurrency,
                restarts=True,  # as what is measured, so that it brings the same
                observer=rehearsal.observe,
            )
            if rehearsal.is_long or num_known == GraphStore.num_first_calls:
                break


class Rehearsal:
    """Has a workload's requests end before their time, size by size of the batch."""

    def __init__(self, llm: LLM, requests: Sequence[Request]) -> None:
        self._llm, self._requests = llm, requests
        self._seconds, self._all_seconds = 0.0, 0.0
        self._num_steps, self._num_decoding, self._decoded = 0, 0, False
        self._num_known = GraphStore.num_first_calls
        self.is_long = False  # so that its batch shrinks

    def observe(self, metrics: MetricsCollector) -> None:
        """Comes behind every step."""
        num_known, num_decoding = GraphStore.num_first_calls, metrics.num_decoding_steps
        decoded, self._decoded = self._decoded, num_decoding > self._num_decoding
        decodes = decoded and self._decoded  # while prompts take turns with the others, the batch is still to grow
        self._num_decoding = num_decoding
        if num_known == self._num_known:
            seconds = metrics.step_points[-1].total_seconds
            self._all_seconds += seconds
            self._seconds += seconds if decodes else 0.0
        self._num_known = num_known
        self._num_steps += decodes
        if not self.is_long:
            is_seen = self._num_steps >= STEPS and self._seconds >= SECONDS
            self.is_long = is_seen or self._all_seconds >= MOST_SECONDS
            if not self.is_long:
                return
            self._num_steps = 0
            self._end([request for request in self._requests if not request.output_token_ids])  # they wait
        elif self._num_steps >= STEPS_OF_A_SIZE:
            self._num_steps = 0
            running = [request for request in self._requests if not request.is_finished]
            smaller = max((size for size in range(len(running)) if bucket(size) == size), default=0)
            self._end(running[smaller:])

    def _end(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if not request.is_finished:
                self._llm.abort(str(request.prompt_index))
