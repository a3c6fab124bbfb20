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
from runner.cut_texts import cut_text_notes
from runner.drafter_fit import cut_draft_notes, drafter_fit_notes
from runner.earlier_points import EarlierPoints
from runner.engine.errors import UserError
from runner.engine.request import Request
from runner.llm import LLM
from runner.machine import describe_run
from runner.metrics import (
    MetricsCollector,
    RequestRecord,
    core_wait_notes,
    count_identical,
    in_parts_notes,
    short_pass_notes,
)
from runner.metrics.repeats import middle_repeat, over_repeats
from runner.outputs import DecodeToken, logprob_fields
from runner.passes import Pass, run_pass
from runner.promise import kept_by_rule, kept_by_run, promise_notes
from runner.rehearsal import warm_up
from runner.report import RunProgress
from runner.results import OUTPUTS_FILE
from runner.workload import WorkloadItem, unread_note

MAX_FAILURES_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Measurement:
    summary: dict[str, Any]
    metrics: MetricsCollector  # of the method, in the middle repeat
    records: list[RequestRecord]  # of the same pass, in the order of the workload
    more: dict[str, dict[str, Any]]  # request_id -> what outputs.jsonl says beside its record, in the same pass
    errors: dict[str, str]  # request_id -> why it failed, in the same pass


def measure(
    llm: LLM,
    items: Sequence[WorkloadItem],
    collectors: list[tuple[str, MetricsCollector]] | None = None,
    earlier: EarlierPoints | None = None,
) -> Measurement:
    """Run a workload plainly (unless baseline is off) and with the method, on one engine and one clock.

    With `repeats` the two take turns. Every pass of the method begins with what its proposer knew when it was built, so
    that no repeat drafts from an earlier one's texts; what num_speculative_tokens_per_batch_size=auto has found of this
    machine is kept. Where the rule keeps tokens, those of all passes are compared.

    Args:
        collectors: receives the method ("none": plain decoding) and the collector of each pass when the pass begins.
            If this function raises, the caller still has the requests that had finished.
        earlier: the earlier points of the same sweep. With one repeat all points share the first point's plain
            decoding. With several, each point measures its own in turns with the method, so that a machine whose
            speed drifts favours neither.
    """
    config, engine = llm.config, llm.engine
    method = config.method.method
    is_plain = method == "none"
    shared = earlier if config.repeats == 1 else None
    baseline = None
    if shared is not None and config.baseline and not is_plain:
        baseline = shared.baseline_for(config)
    runs_plain = config.baseline and not is_plain and baseline is None
    proposers = [*([engine.plain_proposer] if runs_plain else []), engine.proposer]
    warm_up(llm, items, proposers, max_concurrency=config.workload.max_concurrency)
    plain, passes = [] if baseline is None else [baseline.metrics], list[Pass]()
    collectors = [] if collectors is None else collectors
    for repeat in range(config.repeats):
        turn = f", repeat {repeat + 1} of {config.repeats}" if config.repeats > 1 else ""
        if runs_plain:
            plain.append(MetricsCollector())
            collectors.append(("none", plain[-1]))
            _run(llm, engine.plain_proposer, items, f"plain decoding{turn}", plain[-1])
        collector = MetricsCollector()
        collectors.append((method, collector))
        passes.append(_run(llm, engine.proposer, items, f"{method}{turn}", collector))
    summaries = _summaries(llm, items, passes, plain, baseline.point if baseline else None)
    if not summaries[0]["num_requests"]:
        raise UserError(f"no request of the workload could run; {_failures(items, passes)[0]}")
    if shared is not None and (is_plain or runs_plain):
        shared.keep_baseline(config, passes[0].metrics if is_plain else plain[0])
    shown = passes[middle_repeat(summaries)]
    requests, metrics = shown.requests, shown.metrics
    place = {request.request_id: index for index, request in enumerate(requests)}
    return Measurement(
        summary=over_repeats(summaries),
        metrics=metrics,
        records=sorted(metrics.records, key=lambda record: place[record.request_id]),
        more={
            request.request_id: _more_of(request, items[request.prompt_index], shown, engine.tokenizer.decode_token)
            for request in requests
        },
        errors=shown.errors,
    )


def _more_of(request: Request, item: WorkloadItem, shown: Pass, decode_token: DecodeToken) -> dict[str, Any]:
    params, error = request.sampling_params, shown.errors.get(request.request_id)
    more = {} if item.id is None else {"id": item.id}
    if error is not None:
        more["error"] = error
    if params.logprobs is not None or params.prompt_logprobs is not None:
        more |= logprob_fields(request, decode_token)
    return more


def _run(
    llm: LLM,
    proposer: Proposer,
    items: Sequence[WorkloadItem],
    title: str,
    metrics: MetricsCollector,
) -> Pass:
    with RunProgress(title, len(items) * llm.config.sampler.n) as progress:
        return run_pass(
            llm,
            proposer,
            items,
            metrics,
            max_concurrency=llm.config.workload.max_concurrency,
            observer=progress.update,
        )


def _summaries(
    llm: LLM,
    items: Sequence[WorkloadItem],
    passes: Sequence[Pass],
    plain: Sequence[MetricsCollector],
    measured_in: str | None,
) -> list[dict[str, Any]]:
    """One summary for each repeat; comparisons between the passes are the same in all summaries.

    measured_in: the earlier point whose plain decoding is used; None: no earlier point's.
    """
    config, engine = llm.config, llm.engine
    failures = _failures(items, passes)
    if len(failures) > MAX_FAILURES_SHOWN:
        failures[MAX_FAILURES_SHOWN:] = [
            f"{len(failures) - MAX_FAILURES_SHOWN} more requests failed, see {OUTPUTS_FILE}"
        ]
    ours, theirs = [each.metrics.records for each in passes], [each.records for each in plain]
    known = [*config.notes(), *promise_notes(config, engine, items), *unread_note(items)]
    of_sweep = [] if measured_in is None else [f"plain decoding was measured in an earlier point, {measured_in}"]
    baselines: list[dict[str, Any] | None] = [None] * len(passes)
    if plain:
        of_plain = [each.summary(method="none", num_speculative_tokens=0) for each in plain]
        baselines = [{**each, "measured_in": measured_in} for each in of_plain]
    keeps_tokens = kept_by_rule(config, items) == "tokens"
    compared = [*plain, *(each.metrics for each in passes)]
    waits = [each.core_wait_share for each in compared]
    core_wait_share = max((share for share in waits if share is not None), default=None)
    return [
        each.metrics.summary(
            method=config.method.method,
            num_speculative_tokens=engine.proposer.num_speculative_tokens,
            baseline=baseline,
            identical_to_baseline=count_identical(*ours, *theirs) if plain and keeps_tokens else None,
            identical_between_repeats=count_identical(*ours) if len(ours) > 1 and keeps_tokens else None,
            lossless=kept_by_run(config, engine, items),
            peak_memory_bytes=_peak_memory(engine.device),
            num_preemptions=sum(request.num_preemptions for request in each.requests),
            machine=describe_run(engine),
            core_wait_share=core_wait_share,
            notes=[
                *known,
                *of_sweep,
                *cut_draft_notes(config, engine.proposer.num_speculative_tokens),
                *drafter_fit_notes(config, items, each.metrics.records),
                *cut_text_notes(each.requests, engine.target_info.max_model_len),
                *in_parts_notes(each.metrics.steps_in_parts, each.metrics.num_decoding_steps),
                *core_wait_notes(core_wait_share, num_threads=config.hardware.num_threads),
                *(short_pass_notes([each.duration_s for each in compared]) if plain else ()),
                *failures,
            ],
        )
        for each, baseline in zip(passes, baselines, strict=True)
    ]


def _failures(items: Sequence[WorkloadItem], passes: Sequence[Pass]) -> list[str]:
    """Which requests failed and why, the first to fail first."""
    errors = {request_id: reason for each in passes for request_id, reason in each.errors.items()}
    of_request = {own.request_id: items[own.prompt_index] for each in passes for own in each.requests}
    return [f"request {name}{of_request[name].origin} failed: {reason}" for name, reason in errors.items()]


def _peak_memory(device: torch.device) -> int:
    """Bytes at the peak: of the GPU's allocator, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
