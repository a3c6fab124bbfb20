"""One pass over a workload: all of its requests, brought to their end by one proposer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from proposers.base import Proposer
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM
from runner.metrics import CoreWait, MetricsCollector
from runner.prompts import make_requests
from runner.request_loop import Observer
from runner.workload import WorkloadItem, arrival_times, params_of

WARM_UP_TOKENS = 8  # output tokens of the untimed run that touches every code path and cache first


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
    return make_requests([item.prompt for item in items], own, llm.engine.tokenizer, llm.config.seed)


def warm_up(llm: LLM, items: Sequence[WorkloadItem], proposers: Sequence[Proposer]) -> None:
    """A few tokens of the first prompts, untimed, with each of the proposers, which learn nothing by them.

    Sampled as the run is: what the parameters ask for may have to be compiled.
    """
    params = llm.config.sampler.to_sampling_params()
    short = replace(params, n=1, max_tokens=WARM_UP_TOKENS, min_tokens=0, ignore_eos=True, stop=(), stop_token_ids=())
    first = [
        replace(item, sampling={key: value for key, value in item.sampling.items() if key != "max_tokens"})
        for item in items[:2]
    ]
    for proposer in proposers:
        # A method that learned the answers here would be measured too fast.
        llm.run(workload_requests(llm, first, short), proposer, MetricsCollector(), learns=False)
