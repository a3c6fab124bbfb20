"""One run, from a checked configuration to its files, its record and its report."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from runner.config import SpeculativeConfig
from runner.earlier_points import EarlierPoints
from runner.endings import postponed_interrupts, reader_may_leave
from runner.engine.errors import UserError
from runner.llm import LLM
from runner.loading import load
from runner.measure import measure
from runner.metrics import MetricsCollector
from runner.model_files import model_path
from runner.passes import workload_requests
from runner.promise import kept_by_rule
from runner.recording import check_record, open_run
from runner.report import print_point, print_summary
from runner.results import (
    METRICS_FILE,
    OUTPUTS_FILE,
    PARTIAL_OUTPUTS_FILE,
    remove_other_results,
    write_metrics,
    write_outputs,
    write_vllm_config,
)
from runner.tracking import add_row
from runner.tracking.flatten import flat_values
from runner.workload import WorkloadItem


def execute(
    config: SpeculativeConfig,
    output_dir: Path,
    *,
    written: Mapping[str, str] | None = None,
    earlier: EarlierPoints | None = None,
) -> dict[str, Any]:
    """Run a configuration; files go to output_dir. Returns the summary.

    Args:
        written: the options that were asked for (`sampler: sampled`), recorded beside the values.
        earlier: the points of the same sweep that this process has run; this one is added to them.

    Raises:
        UserError: the configuration cannot run on this machine; nothing is recorded then.
    """
    check_record(config)
    llm, items = load(config, earlier)
    with closing(llm) if earlier is None else nullcontext():  # else the next point may go on with its ranks
        return _execute(llm, items, output_dir, written or {}, earlier)


def _execute(
    llm: LLM,
    items: Sequence[WorkloadItem],
    output_dir: Path,
    written: Mapping[str, str],
    earlier: EarlierPoints | None,
) -> dict[str, Any]:
    config = llm.config
    # Build the requests before a run is recorded, so that an invalid one raises while there is no run to leave behind.
    requests = workload_requests(llm, items, config.sampler.to_sampling_params())
    if None not in (refusals := llm.refusals(requests)):
        first = f"request {requests[0].request_id}{items[0].origin}"
        raise UserError(f"no request of the workload can run; {first}: {refusals[0]}")
    run_name = config.run_name or _run_name(config, items)
    params = {**written, **flat_values(config.model_dump(mode="json"))}
    with open_run(config, llm.engine, items, run_name=run_name) as tracker:
        tracker.log_params(params)
        collectors = list[tuple[str, MetricsCollector]]()
        try:
            measurement = measure(llm, items, collectors, earlier)
        except BaseException:  # an interrupted run of hours keeps the outputs that it has
            with postponed_interrupts():
                tracker.log_artifacts(_keep_finished(output_dir, collectors, len(requests)))
            raise
        summary = measurement.summary
        files = [output_dir / METRICS_FILE, output_dir / OUTPUTS_FILE]
        write_metrics(files[0], summary)
        write_outputs(files[1], measurement.records, measurement.more)
        files += _write_vllm_config(config, output_dir)
        remove_other_results(output_dir, files)
        with reader_may_leave():  # before it is recorded: a tracker that fails now does not hide it
            if earlier is not None:
                print_point(summary, notes=earlier.untold(summary["notes"]), directory=output_dir)
            else:
                print_summary(
                    summary,
                    model=config.model.model,
                    files=files,
                    location=tracker.location,
                    ui_command=tracker.ui_command,
                )
        tracker.log_summary(summary)
        tracker.log_series(measurement.metrics.step_points)
        tracker.log_artifacts(files)
    add_row(summary, params, run_name)
    if errors := measurement.errors:  # last of all: the other numbers are those of a workload without them
        request_id, reason = next(iter(errors.items()))
        origin = next(items[own.prompt_index].origin for own in requests if own.request_id == request_id)
        failed = f"{len(errors)} of {len(requests)} requests failed; request {request_id}{origin}: {reason}"
        print(failed, file=sys.stderr)
    return summary


def _write_vllm_config(config: SpeculativeConfig, output_dir: Path) -> list[Path]:
    values, notes = config.to_vllm()
    if values is not None and "model" in values:
        values["model"] = model_path(values["model"])  # tiny's is a directory that vLLM can load
    return write_vllm_config(output_dir, values, notes)


def _run_name(config: SpeculativeConfig, items: Sequence[WorkloadItem]) -> str:
    method = config.method
    tokens = "" if method.method == "none" else f"-k{method.num_speculative_tokens}"
    keeps_tokens = method.method == "none" or kept_by_rule(config, items) == "tokens"
    rule = "" if keeps_tokens else f"-{method.rejection_sample_method}"
    return f"{Path(config.model.model).name}-{method.method}{tokens}{rule}"


def _keep_finished(
    output_dir: Path, collectors: Sequence[tuple[str, MetricsCollector]], num_requests: int
) -> list[Path]:
    """Write the requests that an interrupted run has finished, in the order they finished, and print the path.

    They are those of the method's repeat that came furthest, or, where it has finished none, of plain decoding's; the
    file says which. Returns the paths written: none where no request had finished.
    """
    finished = [(method, [record for record in each.records if not record.failed]) for method, each in collectors]
    method, records = max(finished, key=lambda each: (bool(each[1]), each[0] != "none", len(each[1])), default=("", []))
    if not records:
        return []
    path = output_dir / PARTIAL_OUTPUTS_FILE
    write_outputs(path, records, method=method)
    remove_other_results(output_dir, [path])
    where = " in plain decoding's pass" if method == "none" else ""
    print(f"{len(records)} of {num_requests} requests had finished{where}: {path}", file=sys.stderr)
    return [path]
