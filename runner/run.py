"""One run, from a checked configuration to numbers: baseline, method, files, tracking, report."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from proposers.base import Proposer
from runner.config import SpeculativeConfig, SuffixMethod, SyntheticWorkload
from runner.engine.errors import UserError
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM
from runner.metrics import MetricsCollector, RequestRecord, count_identical
from runner.model_files import model_path
from runner.outputs import logprob_fields
from runner.prompts import make_requests
from runner.report import RunProgress, open_console, print_summary
from runner.results import (
    METRICS_FILE,
    OUTPUTS_FILE,
    PARTIAL_OUTPUTS_FILE,
    write_metrics,
    write_outputs,
    write_vllm_config,
)
from runner.tracking import add_row, open_tracker
from runner.tracking.flatten import flat_params
from runner.workload import WorkloadItem, read_workload, synthetic_workload

MAX_FAILURES_SHOWN = 3
WARM_UP_TOKENS = 8  # output tokens of the untimed run that touches every code path and cache first


def execute(config: SpeculativeConfig, output_dir: Path, *, written: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a configuration; files go to output_dir. Returns the summary.

    Args:
        written: how it was asked for (`sampler: sampled`), recorded beside its values.

    Raises:
        UserError: the configuration cannot run on this machine; nothing is recorded then.
    """
    workload = config.workload
    if isinstance(workload, SyntheticWorkload):
        llm = _load(config)
        items = synthetic_workload(workload, llm.engine.target_info.model.vocab_size)
    else:  # a file is read before a model is loaded, so that a wrong path shows at once
        items = read_workload(workload)
        llm = _load(config)
    # Requests are made once for their errors: none of those may leave a run behind.
    requests = _requests(llm, items, config.sampler.to_sampling_params())
    if None not in (refusals := llm.refusals(requests)):
        raise UserError(f"no request of the workload can run; request {requests[0].request_id}: {refusals[0]}")
    method = config.method.method
    run_name = config.run_name or _run_name(config)
    tracker = open_tracker(
        config.tracking,
        output_dir=output_dir,
        tracking_uri=config.tracking_uri,
        experiment_name=config.experiment_name,
        run_name=run_name,
        tags={
            "method": method,
            "model": config.model.model,
            "workload": config.workload.name,
            "lossless": str(_lossless(config)).lower(),  # tokens | distribution | false
        },
    )
    params = {**(written or {}), **flat_params(config.model_dump(mode="json"))}
    with tracker:
        tracker.log_params(params)
        metrics = MetricsCollector()
        try:
            measurement = measure(llm, items, metrics)
        except BaseException:  # what a run of hours has said is not lost with it
            tracker.log_artifacts(_keep_finished(output_dir, metrics.records, len(items) * config.sampler.n))
            raise
        summary = measurement.summary
        files = [output_dir / METRICS_FILE, output_dir / OUTPUTS_FILE]
        write_metrics(files[0], summary)
        write_outputs(files[1], measurement.records, measurement.logprobs)
        files += _write_vllm_config(config, output_dir)
        print_summary(  # before it is recorded: a tracker that fails now does not hide it
            summary,
            model=config.model.model,
            device=str(llm.engine.device),
            dtype=str(llm.engine.dtype).removeprefix("torch."),
            notes=[*config.notes(), *promise_notes(llm), *measurement.failures],
            files=files,
            location=tracker.location,
            ui_command=tracker.ui_command,
        )
        tracker.log_summary(summary)
        tracker.log_series(metrics.step_points)
        tracker.log_artifacts(files)
    add_row(summary, params, run_name)
    return summary


def _load(config: SpeculativeConfig) -> LLM:
    """The engine; weights, a corpus or the first compilation of a method may take a while."""
    with open_console(stderr=True).status(f"loading {config.model.model} and method={config.method.method}"):
        return LLM.from_config(config)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    summary: dict[str, Any]
    metrics: MetricsCollector  # of the method
    records: list[RequestRecord]  # in the order of the workload
    failures: list[str]  # why requests failed, the first few
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
    if baseline is not None and _lossless(config) == "tokens":
        identical = count_identical(metrics.records, baseline.records)
    summary = metrics.summary(
        method=method,
        num_speculative_tokens=engine.proposer.num_speculative_tokens,
        baseline=None if baseline is None else baseline.summary(method="none", num_speculative_tokens=0),
        identical_to_baseline=identical,
        lossless=_lossless(config),
        peak_memory_bytes=_peak_memory(engine.device),
        num_preemptions=sum(request.num_preemptions for request in requests),
    )
    failures = [f"request {request_id} failed: {reason}" for request_id, reason in errors.items()]
    if not summary["num_requests"]:
        raise UserError(f"no request of the workload could run; {failures[0]}")
    if len(failures) > MAX_FAILURES_SHOWN:
        failures[MAX_FAILURES_SHOWN:] = [f"{len(failures) - MAX_FAILURES_SHOWN} more requests failed"]
    place = {request.request_id: index for index, request in enumerate(requests)}
    return Measurement(
        summary=summary,
        metrics=metrics,
        records=sorted(metrics.records, key=lambda record: place[record.request_id]),
        failures=failures,
        logprobs={
            request.request_id: logprob_fields(request, engine.tokenizer.decode_token)
            for request in requests
            if request.sampling_params.logprobs is not None or request.sampling_params.prompt_logprobs is not None
        },
    )


def promise_notes(llm: LLM) -> list[str]:
    """Why the bitwise promise is off in this run, if it is."""
    config, engine = llm.config, llm.engine
    notes = []
    rule = f"rejection_sample_method={config.method.rejection_sample_method}"
    if _lossless(config) == "distribution":
        notes.append(f"{rule} keeps the distribution of plain decoding's tokens, not the very tokens")
        if isinstance(config.method, SuffixMethod) and config.sampler.seed is not None:
            # What a request remembers of another was accepted by the very noise that judges it there.
            notes.append(
                f"{rule} keeps it only roughly: with sampler.seed all requests share the noise that suffix "
                "decoding's memory was accepted by; leave sampler.seed null, or choose strict"
            )
    if not engine.target.model.is_row_invariant:
        notes.append(
            "bitwise promise off: this architecture runs through transformers' modelling code, whose rows depend on "
            "the batch"
        )
    elif not config.hardware.batch_invariant:
        notes.append("bitwise promise off: hardware.batch_invariant=false")
    elif not engine.target.is_row_invariant:
        what = "CPU's matrix products" if engine.device.type == "cpu" else "GPU's kernels"
        notes.append(f"bitwise promise off: this {what} depend on a row's place, as a check at the start found")
    return notes


def _measure_one(
    llm: LLM,
    proposer: Proposer,
    items: Sequence[WorkloadItem],
    params: SamplingParams,
    title: str,
    metrics: MetricsCollector,
) -> tuple[list[Request], dict[str, str]]:
    requests = _requests(llm, items, params)
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
            llm.run(_requests(llm, items[:2], short), proposer, MetricsCollector())
        finally:
            proposer.set_learning(True)


def _requests(llm: LLM, items: Sequence[WorkloadItem], params: SamplingParams) -> list[Request]:
    prompts = [item.prompt for item in items]
    return make_requests(prompts, [params] * len(prompts), llm.engine.tokenizer, llm.config.seed)


def _lossless(config: SpeculativeConfig) -> Literal["tokens", "distribution", False]:
    return config.method.lossless(config.sampler.temperature)


def _write_vllm_config(config: SpeculativeConfig, output_dir: Path) -> list[Path]:
    values, notes = config.to_vllm()
    if values is not None and "model" in values:
        values["model"] = model_path(values["model"])  # tiny's is a directory that vLLM can load
    return write_vllm_config(output_dir, values, notes)


def _run_name(config: SpeculativeConfig) -> str:
    method = config.method
    tokens = "" if method.method == "none" else f"-k{method.num_speculative_tokens}"
    rule = "" if method.method == "none" or _lossless(config) == "tokens" else f"-{method.rejection_sample_method}"
    return f"{Path(config.model.model).name}-{method.method}{tokens}{rule}"


def _keep_finished(output_dir: Path, records: Sequence[RequestRecord], num_requests: int) -> list[Path]:
    """Writes what a run that breaks off has finished, in the order it finished, and says where; nothing for nothing."""
    finished = [record for record in records if not record.failed]
    if not finished:
        return []
    path = output_dir / PARTIAL_OUTPUTS_FILE
    write_outputs(path, finished)
    print(f"{len(finished)} of {num_requests} requests had finished: {path}", file=sys.stderr)
    return [path]


def _peak_memory(device: torch.device) -> int:
    """Bytes at the peak: of the GPU's allocator, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
