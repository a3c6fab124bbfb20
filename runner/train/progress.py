"""A bar on stderr for every stage of a training run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from runner.train.loop import ReportProgress


@contextmanager
def stage_bars() -> Iterator[Callable[[str], ReportProgress]]:
    """Yields what begins a stage of that name."""
    columns = (
        TextColumn("{task.description:>14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def report_of(stage: str) -> ReportProgress:
            task = progress.add_task(stage, total=None, note="")
            return lambda done, total, note: progress.update(task, completed=done, total=total, note=note)

        yield report_of
