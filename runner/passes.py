"""One pass over a workload: all of its requests, brought to their end by one proposer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proposers.base import Proposer
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM
from runner.metrics import CoreWait, MetricsCollector
from runner.prompts import make_requests
from runner.request_loop import Observer
from runner.workload import WorkloadItem, arrival_times, params_of


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
    observer: Observer | None = None,
) -> Pass:
    """Samples as the configuration says, and lets requests arrive at its request_rate.

    The proposer begins with what it knew when it was built.
    """
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
        restarts=True,
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
