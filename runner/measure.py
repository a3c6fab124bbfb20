"""What a method is worth on a workload: plain decoding and the method on one engine and one clock.

Records nothing and writes no file; runner/run.py does.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from proposers.base import Proposer
from runner.engine.errors import UserError
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM
from runner.machine import describe_run
from runner.metrics import MetricsCollector, RequestRecord, count_identical
from runner.outputs import logprob_fields
from runner.promise import kept_by_rule, kept_by_run, promise_notes
from runner.prompts import make_requests
from runner.report import RunProgress
from runner.workload import WorkloadItem

MAX_FAILURES_SHOWN = 3
WARM_UP_TOKENS = 8  # output tokens of the untimed run that touches every code path and cache first


@dataclass(frozen=True, kw_only=True)
class Measurement:
    summary: dict[str, Any]
    metrics: MetricsCollector  # of the method
    records: list[RequestRecord]  # in the order of the workload
    logprobs: dict[str, dict[str, Any]]  # request_id -> what outputs.jsonl says of them, where asked for


def measure(llm: LLM, items: Sequence[WorkloadItem], metrics: MetricsCollector | None = None) -> Measurement:
    """Run a workload plainly (unless baseline is off) and with the method, on one engine and one clock.

    metrics: an empty one that follows the method, for who wants to know how far it came if this raises.
    """
    metrics = metrics or MetricsCollector()
    config, engine = llm.config, llm.engine
    params = config.sampler.to_sampling_params()
    method = config.method.method
    is_plain = method == "none"
    _warm_up(llm, items, params)
    baseline = None
    if config.baseline and not is_plain:
        baseline = MetricsCollector()
        _measure_one(llm, engine.plain_proposer, items, params, "plain decoding", baseline)
    requests, errors = _measure_one(llm, engine.proposer, items, params, method, metrics)
    identical = None
    if baseline is not None and kept_by_rule(config) == "tokens":
        identical = count_identical(metrics.records, baseline.records)
    failures = [f"request {request_id} failed: {reason}" for request_id, reason in errors.items()]
    if len(failures) > MAX_FAILURES_SHOWN:
        failures[MAX_FAILURES_SHOWN:] = [f"{len(failures) - MAX_FAILURES_SHOWN} more requests failed"]
    summary = metrics.summary(
        method=method,
        num_speculative_tokens=engine.proposer.num_speculative_tokens,
        baseline=None if baseline is None else baseline.summary(method="none", num_speculative_tokens=0),
        identical_to_baseline=identical,
        lossless=kept_by_run(config, engine),
        peak_memory_bytes=_peak_memory(engine.device),
        num_preemptions=sum(request.num_preemptions for request in requests),
        machine=describe_run(engine),
        notes=[*run_notes(llm), *failures],
    )
    if not summary["num_requests"]:
        raise UserError(f"no request of the workload could run; {failures[0]}")
    place = {request.request_id: index for index, request in enumerate(requests)}
    return Measurement(
        summary=summary,
        metrics=metrics,
        records=sorted(metrics.records, key=lambda record: place[record.request_id]),
        logprobs={
            request.request_id: logprob_fields(request, engine.tokenizer.decode_token)
            for request in requests
            if request.sampling_params.logprobs is not None or request.sampling_params.prompt_logprobs is not None
        },
    )


def run_notes(llm: LLM) -> list[str]:
    """What is known before the run of how to read its numbers."""
    return [*llm.config.notes(), *promise_notes(llm.config, llm.engine)]


def workload_requests(llm: LLM, items: Sequence[WorkloadItem], params: SamplingParams) -> list[Request]:
    prompts = [item.prompt for item in items]
    return make_requests(prompts, [params] * len(prompts), llm.engine.tokenizer, llm.config.seed)


def _measure_one(
    llm: LLM,
    proposer: Proposer,
    items: Sequence[WorkloadItem],
    params: SamplingParams,
    title: str,
    metrics: MetricsCollector,
) -> tuple[list[Request], dict[str, str]]:
    requests = workload_requests(llm, items, params)
    categories = {
        request.request_id: category
        for request in requests
        if (category := items[request.prompt_index].category) is not None
    }
    with RunProgress(title, len(requests)) as progress:
        traces = llm.run(
            requests,
            proposer,
            metrics,
            max_concurrency=llm.config.workload.max_concurrency,
            categories=categories,
            observer=progress.update,
        )
    return requests, traces.errors


def _warm_up(llm: LLM, items: Sequence[WorkloadItem], params: SamplingParams) -> None:
    short = SamplingParams(
        temperature=params.temperature,
        max_tokens=WARM_UP_TOKENS,
        ignore_eos=True,
        structured_outputs=params.structured_outputs,  # compiled here, not in a measured request's first token
    )
    for proposer in (llm.engine.plain_proposer, llm.engine.proposer):
        proposer.set_learning(False)  # a method that knew the answers from here would be measured too fast
        try:
            llm.run(workload_requests(llm, items[:2], short), proposer, MetricsCollector())
        finally:
            proposer.set_learning(True)


def _peak_memory(device: torch.device) -> int:
    """Bytes at the peak: of the GPU's allocator, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
