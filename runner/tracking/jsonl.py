"""tracking=jsonl: one line a run in runs/runs.jsonl of the current directory, for machines without MLflow."""

from __future__ import annotations

import io
import json
import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.engine.errors import UserError
from runner.metrics import StepPoint
from runner.tracking.file_lock import file_lock
from runner.tracking.flatten import flat_values
from runner.tracking.tracker import PARENT_RUN_ENV, Tracker

RUNS_FILE = "runs/runs.jsonl"  # of every run that is started here, as mlflow.db is


class JsonlTracker(Tracker):
    """Collects the run and appends it as one JSON object when it ends, whatever its status.

    The line has run_id, parent_run_id, run_name, status, start_time (s since 1970), seconds, tags, params, summary and
    artifacts (paths, not copies); params have flat keys, as MLflow's have, and the configuration's own values. It is
    appended whole under a lock, so that parallel jobs can share the file.
    The time series is left out: the per-step counts of every request are in outputs.jsonl.
    """

    def __init__(self, *, run_name: str | None, tags: Mapping[str, str]) -> None:
        self._path = Path.cwd() / RUNS_FILE
        self._run: dict[str, Any] = {"run_name": run_name, "tags": dict(tags), "params": {}, "summary": {}}
        self._artifacts: list[str] = []

    def log_params(self, params: Mapping[str, Any]) -> None:
        self._run["params"].update(flat_values(params))

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        self._run["summary"].update(summary)

    def log_series(self, points: Sequence[StepPoint]) -> None:
        pass

    def log_artifacts(self, paths: Iterable[str | Path]) -> None:
        self._artifacts += [str(Path(path).absolute()) for path in paths]

    def _start(self) -> None:
        self.run_id = uuid.uuid4().hex
        self.location = str(self._path)
        self._parent_run_id = os.environ.get(PARENT_RUN_ENV)
        self._start_time = time.time()

    def _end(self, status: str) -> None:
        run = {
            "run_id": self.run_id,
            "parent_run_id": self._parent_run_id,
            "status": status,
            "start_time": self._start_time,
            "seconds": time.time() - self._start_time,
            **self._run,
            "artifacts": self._artifacts,
        }
        append_line(self._path, run)


def check_runs_file() -> None:
    """Makes the file where it lacks.

    Raises:
        UserError: it cannot be written to.
    """
    path = Path.cwd() / RUNS_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise UserError(
            f"tracking=jsonl needs a file that can be written to, got {str(path)!r} ({error.strerror}); start from "
            "another directory, or run with tracking=none"
        ) from error


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Adds one JSON object to a file that several processes may share: under its lock, whole or not at all.

    Raises:
        UserError: there is no room for it; the file is as it was.
    """
    line = json.dumps(record, default=str).encode() + b"\n"
    try:
        with file_lock(path), path.open("a+b", buffering=0) as file:
            _append(file, line)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); make room there, or write elsewhere") from error


def _append(file: io.FileIO, line: bytes) -> None:
    size = file.seek(0, os.SEEK_END)
    if size:
        file.seek(-1, os.SEEK_END)
        line = line if file.read(1) == b"\n" else b"\n" + line  # half a line that somebody left would take ours along
    try:
        while line:  # a disk that fills up takes a part, and refuses the rest
            line = line[file.write(line) :]
    except BaseException:
        file.truncate(size)
        raise
