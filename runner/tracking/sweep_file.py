"""The rows of a sweep without MLflow: a file that its jobs, in whatever process, add their numbers to.

Its runs share a parent_run_id, as the children of an MLflow sweep do, but no run of that id is recorded.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from runner.tracking.flatten import flat_params
from runner.tracking.jsonl import append_line
from runner.tracking.tracker import comparison_row, exported_parent, with_params

SWEEP_FILE_ENV = "SPECULATIVE_SWEEP_FILE"  # set by the process that launches the sweep


@contextmanager
def collecting_rows() -> Iterator[Callable[[Sequence[str]], list[dict[str, Any]]]]:
    """Jobs that run inside add rows; what is yielded reads them (see `comparison_row`), in the order they ended."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "rows.jsonl"

        def rows(params: Sequence[str] = ()) -> list[dict[str, Any]]:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            runs = [json.loads(line) for line in lines]
            return with_params([run["row"] for run in runs], [run["params"] for run in runs], params)

        os.environ[SWEEP_FILE_ENV] = str(path)
        try:
            with exported_parent(uuid.uuid4().hex):
                yield rows
        finally:
            del os.environ[SWEEP_FILE_ENV]


def add_row(summary: Mapping[str, Any], params: Mapping[str, Any], run_name: str) -> None:
    """Adds a finished run to the sweep that it belongs to, if somebody collects its rows."""
    if (name := os.environ.get(SWEEP_FILE_ENV)) is None:
        return
    row = comparison_row(summary, run_name=run_name, status="FINISHED")
    append_line(Path(name), {"row": row, "params": flat_params(params)})
