"""The progress of a run: requests, tokens, tokens per second and mean acceptance length while it goes.

Drawn from the caller's thread between steps, a few times a second: a drawing thread would take the interpreter away
from the very steps that are being timed. Where the output is no terminal, one line at the end says the same, but for
the speed, which is the summary's to tell.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from runner.metrics import MetricsCollector
from runner.report.console import open_console

SECONDS_BETWEEN_DRAWINGS = 0.2


class RunProgress:
    """A context manager around the step loop; call `update` after every step. Writes to stderr by default."""

    def __init__(self, description: str, num_requests: int, *, console: Console | None = None) -> None:
        self._description = description
        self._num_requests = num_requests
        self._console = console or open_console(stderr=True)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=self._console,
            auto_refresh=False,
            disable=not self._console.is_terminal or self._console.is_dumb_terminal,
        )

    def __enter__(self) -> Self:
        self._started = self._drawn = time.perf_counter()
        self._collector: MetricsCollector | None = None
        self._task = self._progress.add_task(self._description, total=self._num_requests, text="")
        self._progress.start()
        return self

    def update(self, collector: MetricsCollector) -> None:
        """Shows the live counts of the collector, if it is time to."""
        self._collector = collector
        now = time.perf_counter()
        if now - self._drawn >= SECONDS_BETWEEN_DRAWINGS:
            self._drawn = now
            self._draw(collector)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._collector is not None:
            self._draw(self._collector)
        self._progress.stop()
        if self._progress.disable and exc is None and self._collector is not None:
            num_failed = sum(record.failed for record in self._collector.records)
            num_done = self._collector.num_finished_requests - num_failed
            failed = f" ({num_failed} failed)" if num_failed else ""
            done = f"{num_done}/{self._num_requests} requests{failed} in {self._seconds():.1f} s"
            line = f"{self._description}: {done}, {self._counts(self._collector)}"
            self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _draw(self, collector: MetricsCollector) -> None:
        rate = f"{collector.num_output_tokens / max(self._seconds(), 1e-9):,.0f}/s"
        completed, text = collector.num_finished_requests, self._counts(collector, rate, length="length")
        self._progress.update(self._task, completed=completed, text=text, refresh=True)

    def _counts(self, collector: MetricsCollector, *more: str, length: str = "mean acceptance length") -> str:
        counts = [f"{collector.num_output_tokens:,} tokens", *more]
        if collector.num_drafts:
            counts.append(f"{length} {1 + collector.num_accepted_tokens / collector.num_drafts:.2f}")
        return ", ".join(counts)

    def _seconds(self) -> float:
        return time.perf_counter() - self._started
