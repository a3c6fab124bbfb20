"""Tracker: what a run tells whoever records it, and the tracker that records nothing."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from runner.metrics import StepPoint
from runner.metrics.repeats import REPEATED

PARENT_RUN_ENV = "SPECULATIVE_PARENT_RUN_ID"  # the sweep a run belongs to, set by the process that launches the sweep


class Tracker(ABC):
    """One run. The run starts when the block is entered, and ends with the status the block earned."""

    run_id: str | None = None
    location: str | None = None  # where the run is to be found, for people
    ui_command: str | None = None  # the command that shows it

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(status_of(exc))

    @abstractmethod
    def log_params(self, params: Mapping[str, Any]) -> None:
        """Records the resolved configuration, nested or flat; call it once, parameters never change."""

    @abstractmethod
    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Records the numbers of the run and its notes, `MetricsCollector.summary`."""

    @abstractmethod
    def log_series(self, points: Sequence[StepPoint]) -> None:
        """Records the steps as time series; call it once, after the last step."""

    @abstractmethod
    def log_artifacts(self, paths: Iterable[str | Path]) -> None:
        """Keeps copies of (or references to) files and directories."""

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _end(self, status: str) -> None: ...


class NoTracker(Tracker):
    """tracking=none."""

    def log_params(self, params: Mapping[str, Any]) -> None:
        pass

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        pass

    def log_series(self, points: Sequence[StepPoint]) -> None:
        pass

    def log_artifacts(self, paths: Iterable[str | Path]) -> None:
        pass

    def _start(self) -> None:
        pass

    def _end(self, status: str) -> None:
        pass


def status_of(exc: BaseException | None) -> str:
    """MLflow's word for how a block ended: only a body that ran to its end is FINISHED."""
    if exc is None or (isinstance(exc, SystemExit) and exc.code in (None, 0)):
        return "FINISHED"
    return "KILLED" if isinstance(exc, KeyboardInterrupt) else "FAILED"


@contextmanager
def exported_parent(run_id: str) -> Iterator[None]:
    """Runs that are opened inside, here or in processes started from here, name this one as their parent."""
    before = os.environ.get(PARENT_RUN_ENV)
    os.environ[PARENT_RUN_ENV] = run_id
    try:
        yield
    finally:
        os.environ.pop(PARENT_RUN_ENV, None)
        if before is not None:
            os.environ[PARENT_RUN_ENV] = before


COMPARED = (
    "method",
    "num_speculative_tokens",
    "acceptance_rate",
    "mean_acceptance_length",
    "output_tokens_per_second",
    "speedup",
    "whole_step_share",
    "core_wait_share",
)
ENDS = ("lowest", "highest")  # of the repeats of a run
AS_WRITTEN = {"None": "null", "True": "true", "False": "false"}  # the command line's words for those of flat_params
MACHINE = ("device_name", "device", "dtype", "weights", "kv_cache", "torch", "triton", "transformers", "commit")


def comparison_row(summary: Mapping[str, Any], *, run_name: str | None, status: str) -> dict[str, Any]:
    """One run of a sweep: run_name, status, the compared numbers, lowest and highest of those that have a range over
    repeats, lossless, identical_to_baseline as "same/requests", and where it was measured.

    What the run does not have is None.
    """
    same = summary.get("identical_to_baseline")
    machine = summary.get("machine") or {}
    return {
        "run_name": run_name,
        "status": status,
        **{key: summary.get(key) for key in COMPARED},
        "num_repeats": int(summary.get("repeats") or 1),  # MLflow keeps every number as a float
        **{f"{key}_{end}": (summary.get(f"{key}_range") or {}).get(end) for key in REPEATED for end in ENDS},
        "lossless": summary.get("lossless"),
        "identical_to_baseline": f"{same['identical']}/{same['requests']}" if same else None,
        **{key: machine.get(key) for key in MACHINE},
    }


def with_params(
    rows: Sequence[dict[str, Any]], recorded: Sequence[Mapping[str, str]], keys: Sequence[str]
) -> list[dict[str, Any]]:
    """The rows with the flat parameters under these keys, as they are written on the command line; what every row has a
    column for, or no run, is left out."""
    known = ("method.method", *(f"method.{key}" for key in COMPARED))
    shown = [key for key in keys if key not in known and any(key in params for params in recorded)]
    written = [{key: AS_WRITTEN.get(value, value) for key, value in params.items()} for params in recorded]
    return [row | {key: params.get(key) for key in shown} for row, params in zip(rows, written, strict=True)]
