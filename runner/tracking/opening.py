"""Opens the tracker of a run and the parent of a sweep; the one place where `tracking` turns into a class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kernels.machine import git_sha
from runner.tracking.jsonl import JsonlTracker, check_runs_file
from runner.tracking.mlflow_run import MlflowTracker
from runner.tracking.mlflow_store import connect, resolve_tracking_uri
from runner.tracking.tracker import NoTracker, Tracker, exported_parent


def open_tracker(
    tracking: str,
    *,
    experiment_name: str,
    tracking_uri: str | None = None,
    run_name: str | None = None,
    tags: Mapping[str, str] | None = None,
) -> Tracker:
    """The tracker of one run, to be used as a context manager; nothing is recorded before its block is entered.

    Args:
        tracking: "mlflow", "jsonl" or "none".
        experiment_name: what runs are kept together under (mlflow).
        tracking_uri: the store (mlflow); None is MLFLOW_TRACKING_URI, else sqlite in the current directory.
        run_name: None lets MLflow make one up.
        tags: what runs are filtered by: method, model, the chosen options; git_sha is added.
    """
    if tracking == "none":
        return NoTracker()
    tags = _with_commit(tags or {})
    if tracking == "jsonl":
        return JsonlTracker(run_name=run_name, tags=tags)
    if tracking == "mlflow":
        return MlflowTracker(tracking_uri=tracking_uri, experiment_name=experiment_name, run_name=run_name, tags=tags)
    raise ValueError(f"tracking must be one of mlflow, jsonl, none, got {tracking!r}")


def check_store(tracking: str, *, tracking_uri: str | None, experiment_name: str) -> None:
    """Opens what a run will be recorded in, before a model is loaded for it; where there is none, it is made.

    Raises:
        UserError: it cannot be used.
    """
    if tracking == "mlflow":
        connect(resolve_tracking_uri(tracking_uri), experiment_name)  # 2 ms when the run opens it again
    elif tracking == "jsonl":
        check_runs_file()


@contextmanager
def start_sweep(
    *, params: Mapping[str, Any], tracking_uri: str | None, experiment_name: str, run_name: str | None = None
) -> Iterator[MlflowTracker]:
    """The parent run of a sweep that MLflow records, around everything that launches its jobs.

    Runs opened in the meantime, here or in processes started from here, become its children. When the block ends,
    however it does, the children's comparison is kept with the parent as comparison.csv and comparison.png.

    Args:
        params: what is swept over, recorded with the parent; the comparison shows each child's own values.
    """
    parent = MlflowTracker(
        tracking_uri=tracking_uri, experiment_name=experiment_name, run_name=run_name, tags=_with_commit({})
    )
    with parent:
        parent.log_params(params)
        try:
            with exported_parent(parent.run_id):
                yield parent
        finally:
            if rows := parent.children(tuple(params)):
                from runner.tracking.comparison import write_comparison

                with TemporaryDirectory() as directory:
                    parent.log_artifacts(write_comparison(Path(directory), rows))


def _with_commit(tags: Mapping[str, str]) -> dict[str, str]:
    return {**({"git_sha": sha} if (sha := git_sha()) else {}), **tags}
