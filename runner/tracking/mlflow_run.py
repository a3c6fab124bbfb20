"""tracking=mlflow: one MLflow run, through the client, so no global "active run" is left behind or disturbed."""

from __future__ import annotations

import os
import shlex
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.metrics import StepPoint
from runner.metrics.repeats import REPEATED
from runner.tracking.flatten import flat_metrics, flat_params
from runner.tracking.mlflow_store import connect, resolve_tracking_uri, sqlite_path, store_errors
from runner.tracking.series import step_series
from runner.tracking.tracker import COMPARED, ENDS, MACHINE, PARENT_RUN_ENV, Tracker, comparison_row, with_params

MAX_METRICS = 1000  # a log_batch call may carry this many metrics and
MAX_PARAMS = 100  # this many parameters
MAX_TEXT_LENGTH = 6000


class MlflowTracker(Tracker):
    """Created under the sweep that PARENT_RUN_ENV names, if any.

    Raises:
        UserError: the store cannot be opened, or a call to it fails.
    """

    run_id: str

    def __init__(
        self, *, tracking_uri: str | None, experiment_name: str, run_name: str | None, tags: Mapping[str, str]
    ) -> None:
        self._uri = resolve_tracking_uri(tracking_uri)
        self._experiment_name = experiment_name
        self._run_name = run_name
        self._tags = dict(tags)

    def log_params(self, params: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        entries = [Param(key, value[:MAX_TEXT_LENGTH]) for key, value in flat_params(params).items()]
        with store_errors(self._uri):
            for start in range(0, len(entries), MAX_PARAMS):
                self._client.log_batch(self.run_id, params=entries[start : start + MAX_PARAMS])

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        now = _milliseconds(time.time())
        self._log_metrics([(key, value, now, 0) for key, value in flat_metrics(summary).items()])
        if notes := summary.get("notes"):
            with store_errors(self._uri):
                self._client.set_tag(self.run_id, "notes", "\n".join(notes)[:MAX_TEXT_LENGTH])

    def log_series(self, points: Sequence[StepPoint]) -> None:
        since_1970 = time.time() - time.perf_counter()
        self._log_metrics(
            (f"step/{name}", value, _milliseconds(point.finished_at + since_1970), point.step)
            for point in step_series(points)
            for name, value in point.values.items()
        )

    def log_artifacts(self, paths: Iterable[str | Path]) -> None:
        for path in map(Path, paths):
            is_dir = stat.S_ISDIR(path.stat().st_mode)  # a missing file is our own error, not the store's
            with store_errors(self._uri):
                if is_dir:
                    self._client.log_artifacts(self.run_id, str(path), artifact_path=path.name)
                else:
                    self._client.log_artifact(self.run_id, str(path))

    def children(self, params: Sequence[str] = ()) -> list[dict[str, Any]]:
        """The runs started under this one, on whatever machine, oldest first, as rows of a comparison table (see
        `comparison_row`).

        params: flat keys of parameters that the rows show too, those that no run has recorded left out.
        """
        with store_errors(self._uri):
            runs = []
            token: str | None = None
            while token != "":
                page = self._client.search_runs(
                    [self._experiment_id],
                    f"tags.`mlflow.parentRunId` = '{self.run_id}'",
                    order_by=["attributes.start_time ASC"],
                    page_token=token,
                )
                runs += list(page)
                token = page.token or ""
        rows = [comparison_row(_summary_of(run), run_name=run.info.run_name, status=run.info.status) for run in runs]
        return with_params(rows, [run.data.params for run in runs], params)

    def _start(self) -> None:
        self._client, self._experiment_id = connect(self._uri, self._experiment_name)
        from mlflow.tracking.context.registry import resolve_tags

        tags = resolve_tags(self._tags)  # adds the user and the source, as mlflow.start_run does
        if parent_run_id := os.environ.get(PARENT_RUN_ENV):
            tags["mlflow.parentRunId"] = parent_run_id
        with store_errors(self._uri):
            run = self._client.create_run(self._experiment_id, tags=tags, run_name=self._run_name)
        self.run_id = run.info.run_id
        if sqlite_path(self._uri):
            self.location = f"experiment {self._experiment_name}, run {run.info.run_name} ({self.run_id})"
            self.ui_command = f"mlflow ui --backend-store-uri {shlex.quote(self._uri)}"
        else:
            self.location = f"{self._uri}/#/experiments/{self._experiment_id}/runs/{self.run_id}"

    def _end(self, status: str) -> None:
        with store_errors(self._uri):
            self._client.set_terminated(self.run_id, status)

    def _log_metrics(self, metrics: Iterable[tuple[str, float, int, int]]) -> None:
        from mlflow.entities import Metric

        entries = [Metric(*metric) for metric in metrics]
        for start in range(0, len(entries), MAX_METRICS):
            with store_errors(self._uri):  # one at a time: an interrupt waits for its end
                self._client.log_batch(self.run_id, metrics=entries[start : start + MAX_METRICS])


def _summary_of(run: Any) -> dict[str, Any]:
    summary: dict[str, Any] = {key: run.data.metrics.get(key) for key in (*COMPARED, "repeats")}
    for key in REPEATED:
        summary[f"{key}_range"] = {end: run.data.metrics.get(f"{key}_range/{end}") for end in ENDS}
    summary["method"] = run.data.tags.get("method")
    summary["machine"] = {key: run.data.tags.get("git_sha" if key == "commit" else key) for key in MACHINE}
    lossless = run.data.tags.get("lossless")
    summary["lossless"] = False if lossless == "false" else lossless
    if (k := summary["num_speculative_tokens"]) is not None:
        summary["num_speculative_tokens"] = int(k)  # MLflow keeps every number as a float
    same = {key: run.data.metrics.get(f"identical_to_baseline/{key}") for key in ("requests", "identical")}
    summary["identical_to_baseline"] = {key: int(n) for key, n in same.items()} if None not in same.values() else None
    return summary


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)
