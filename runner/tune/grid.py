"""What every number of speculative tokens is worth at every batch size: passes over one workload, on one engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Literal

from runner.engine.errors import UserError
from runner.llm import LLM
from runner.metrics import MetricsCollector, StepPoint
from runner.metrics.totals import RequestTotals
from runner.passes import Pass, run_pass
from runner.workload import WorkloadItem

Column = int | Literal["auto"]  # speculative tokens; auto: as many as the engine finds best while it runs
Cell = tuple[int, Column]  # batch size, and that
Report = Callable[[str, int], None]  # what is running, and how many of its requests have just ended


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A cell for each batch size and number of tokens; `measure` fills it, and an interrupt leaves what there is."""

    batch_sizes: Sequence[int]
    num_speculative_tokens: Sequence[int]  # ascending; the first is 0: plain decoding, without a drafter
    has_auto: bool = False  # the engine's own choice is measured beside them; it must be configured so
    # Of each repeat: tokens/s over the full steps, in which as many requests as the batch size decoded.
    tokens_per_second: dict[Cell, list[float]] = field(default_factory=dict)
    num_full_steps: dict[Cell, int] = field(default_factory=dict)  # of all repeats
    drafts: dict[Column, RequestTotals] = field(default_factory=dict)  # of all passes
    # Batch size -> what the engine chose in decoding steps of the repeats -> their number.
    choices: dict[int, Counter[int]] = field(default_factory=dict)
    core_wait_shares: list[float] = field(default_factory=list)  # of passes, where the system tells them
    texts: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)  # request_id -> its texts in all passes

    @property
    def columns(self) -> list[Column]:
        numbers: list[Column] = list(self.num_speculative_tokens)
        return [*numbers, "auto"] if self.has_auto else numbers

    @property
    def cells(self) -> list[Cell]:
        return [(size, column) for size in self.batch_sizes for column in self.columns]

    @property
    def num_repeats(self) -> int:
        """Those in which every cell was measured."""
        return min(len(self.tokens_per_second.get(cell, ())) for cell in self.cells)

    def speedups(self, cell: Cell) -> list[float]:
        """Over plain decoding at the same batch size, repeat by repeat."""
        ours, plain = (self.tokens_per_second[each][: self.num_repeats] for each in (cell, (cell[0], 0)))
        return [one / other for one, other in zip(ours, plain, strict=True)]

    def fastest(self, batch_size: int) -> int:
        """The number of speculative tokens with the highest median speed-up."""
        return max(self.num_speculative_tokens, key=lambda count: median(self.speedups((batch_size, count))))

    def best(self, batch_size: int) -> int:
        """The smallest number of speculative tokens that the fastest one does not beat in every repeat.

        Numbers are compared within a repeat: what slows the machine down for a while slows both.
        """
        top = self.speedups((batch_size, self.fastest(batch_size)))
        return next(
            count
            for count in self.num_speculative_tokens
            if any(own >= best for own, best in zip(self.speedups((batch_size, count)), top, strict=True))
        )

    def mean_acceptance_length(self, column: Column) -> float | None:
        totals = self.drafts.get(column, RequestTotals())
        return 1 + totals.num_accepted_tokens / totals.num_drafts if totals.num_drafts else None

    @property
    def identical(self) -> dict[str, int]:
        """Requests, and how many of them got the very same tokens in all passes."""
        return {"requests": len(self.texts), "identical": sum(len(texts) == 1 for texts in self.texts.values())}

    def measure(self, llm: LLM, items: Sequence[WorkloadItem], *, repeats: int, report: Report) -> None:
        """Every cell in turn, then all of them again in the other direction: a machine that drifts favours none.

        A round before the first repeat is not timed: it compiles and captures what the others run. Every pass begins
        with what the proposer knew when it was built.

        Raises:
            UserError: a request failed, or a batch size was never reached.
        """
        for repeat in range(-1, repeats):
            turn = f"repeat {repeat + 1} of {repeats}" if repeat >= 0 else "warm-up"
            for cell in self.cells if repeat % 2 else reversed(self.cells):
                title = f"{turn}, batch size {cell[0]}, {column_name(cell[1])}"
                one = _pass_of(llm, items, cell, partial(report, title))
                full = full_steps(one, batch_size=cell[0])
                if repeat >= 0:
                    self.add(cell, one, full)

    def add(self, cell: Cell, one: Pass, full: Sequence[StepPoint]) -> None:
        tokens, seconds = sum(point.num_output_tokens for point in full), sum(point.total_seconds for point in full)
        self.tokens_per_second.setdefault(cell, []).append(tokens / seconds)
        self.num_full_steps[cell] = self.num_full_steps.get(cell, 0) + len(full)
        self.drafts.setdefault(cell[1], RequestTotals()).add(one.metrics.records)
        if cell[1] == "auto":
            self.choices.setdefault(cell[0], Counter()).update(one.metrics.decoding_steps_by_budget)
        if (share := one.metrics.core_wait_share) is not None:
            self.core_wait_shares.append(share)
        for record in one.metrics.records:
            self.texts.setdefault(record.request_id, set()).add(tuple(record.token_ids))


def column_name(column: Column) -> str:
    return "auto" if column == "auto" else f"{column} token{'s' * (column != 1)}"


def full_steps(one: Pass, *, batch_size: int) -> list[StepPoint]:
    """Those in which so many requests decoded; at the end of a workload, batches are smaller.

    Raises:
        UserError: there is none.
    """
    full = [point for point in one.metrics.step_points if point.is_decoding and point.num_requests == batch_size]
    if not full:
        raise UserError(
            f"--batch-sizes: {batch_size} requests never decoded in one step; give the KV cache more room "
            "(hardware.gpu_memory_utilization), or leave this size out"
        )
    return full


def _pass_of(llm: LLM, items: Sequence[WorkloadItem], cell: Cell, on_ended: Callable[[int], None]) -> Pass:
    batch_size, column = cell
    num_known = 0

    def observe(metrics: MetricsCollector) -> None:
        nonlocal num_known
        if metrics.num_finished_requests > num_known:
            on_ended(metrics.num_finished_requests - num_known)
            num_known = metrics.num_finished_requests

    one = run_pass(
        llm,
        llm.engine.proposer if column else llm.engine.plain_proposer,
        items,
        MetricsCollector(),
        max_concurrency=batch_size,
        max_draft_tokens=None if column == "auto" else column,
        observer=observe,
    )
    if one.errors:
        request_id, reason = next(iter(one.errors.items()))
        raise UserError(f"every request of the workload must run, but request {request_id} failed: {reason}")
    return one
