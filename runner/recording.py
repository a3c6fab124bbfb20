"""Checks and opens the record of a run of any kind, with the tags that all runs are found and compared by."""

from __future__ import annotations

from collections.abc import Sequence

from runner.assembly import Assembly
from runner.config import SpeculativeConfig
from runner.machine import describe_run
from runner.promise import kept_by_run
from runner.tracking import Tracker, check_store, open_tracker
from runner.workload import WorkloadItem


def check_record(config: SpeculativeConfig) -> None:
    """To be called before a model is loaded, which may take minutes.

    Raises:
        UserError: where the run is to be recorded cannot be used.
    """
    check_store(config.tracking, tracking_uri=config.tracking_uri, experiment_name=config.experiment_name)


def open_run(config: SpeculativeConfig, engine: Assembly, items: Sequence[WorkloadItem], *, run_name: str) -> Tracker:
    """The tracker that the configuration asks for, not yet entered.

    Args:
        engine: of this target; its proposer may be another.
        items: the requests that the method is measured by.
    """
    return open_tracker(
        config.tracking,
        tracking_uri=config.tracking_uri,
        experiment_name=config.experiment_name,
        run_name=run_name,
        tags={
            "method": config.method.method,
            "model": config.model.model,
            "workload": config.workload.name,
            "lossless": str(kept_by_run(config, engine, items)).lower(),
            # the commit is a tag of every run already
            **{key: str(value) for key, value in describe_run(engine).items() if key != "commit" and value is not None},
        },
    )
