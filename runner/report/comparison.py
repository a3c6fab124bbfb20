"""The runs of a sweep side by side, fastest marked, in the order they were run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.metrics.rates import measure_of_speed
from runner.report.console import open_wide_console
from runner.report.text import identical, identical_style, machine_title, number, percent, speedup_style, times

HIGHER_IS_BETTER = ("speedup", "output_tokens_per_second", "mean_acceptance_length", "acceptance_rate")
FORMATS = {
    "acceptance_rate": percent,
    "mean_acceptance_length": lambda value: number(value, "{:.2f}"),
    "output_tokens_per_second": lambda value: number(value, "{:,.1f}"),
    "speedup": times,
}
MARKED = (False, "unguaranteed")  # values of lossless that the table shows
MAX_WIDTH = 1000  # columns of a table that nothing bounds
HEADINGS = dict(zip(FORMATS, ("acceptance", "length", "tokens/s", "speed-up"), strict=True))
KEPT = ("acceptance_rate", "mean_acceptance_length", "output_tokens_per_second")  # columns also without a value


def print_comparison(
    rows: Sequence[Mapping[str, Any]], *, params: Sequence[str] = (), console: Console | None = None
) -> None:
    """Prints one row a run: summaries (metrics.json), or the rows of `Tracker.children`.

    The best value of every column is bold, the fastest run (by speed-up, or by tokens per second where a run has no
    speed-up) carries a star; a run under a lossy rule, or one
    that does not guarantee plain decoding's tokens, is marked so. Speed-up and identity that no run has are left out.
    Runs go by their names only where method, number of tokens and params do not tell two of them apart.

    Args:
        params: keys of swept parameters; those that the rows have get a column, headed by the end of the key. They are
            never cut short: with several of them the table may be wider than 80 columns.
    """
    params = [key for key in params if key != "method" and any(key in row for row in rows)]
    names = Counter((row["method"], row["num_speculative_tokens"], *(row[key] for key in params)) for row in rows)
    ambiguous = max(names.values(), default=0) > 1 and any(row.get("run_name") for row in rows)
    best = {key: _best(rows, key) for key in HIGHER_IS_BETTER}
    fastest = best[measure_of_speed(rows)]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, header_style="bold", show_edge=False)
    table.add_column("run" if ambiguous else "method", overflow="fold")
    table.add_column("K", justify="right", no_wrap=True)
    for key in params:
        table.add_column(key.rpartition(".")[2].replace("_", "\n"), no_wrap=True)
    forms = {key: form for key, form in FORMATS.items() if key in KEPT or any(row.get(key) is not None for row in rows)}
    tells_identity = any(row.get("identical_to_baseline") or row.get("lossless") in MARKED for row in rows)
    for heading in (*(HEADINGS[key] for key in forms), *(["identical"] if tells_identity else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        cells = [Text(form(row.get(key)), _style(row, key, index == best[key])) for key, form in forms.items()]
        same, lossless = row.get("identical_to_baseline"), row.get("lossless")
        table.add_row(
            _name(row, by_run=ambiguous) + Text(" *" if index == fastest else "", "bold green"),
            number(row["num_speculative_tokens"] or None),
            *(Text("-" if row[key] is None else str(row[key])) for key in params),
            *cells,
            *([Text(identical(same, lossless), identical_style(same, lossless))] if tells_identity else []),
        )
    console = console or open_wide_console()
    if params:
        unbounded = console.options.update(width=MAX_WIDTH)
        console.width = max(console.width, console.measure(table, options=unbounded).maximum)
    console.print(table, crop=False)
    if fastest is not None:
        console.print(Text(" * fastest", "dim"))
    for machine in dict.fromkeys(filter(None, map(machine_title, rows))):
        console.print(Text(f" on {machine}", "dim"), soft_wrap=True)


def _best(rows: Sequence[Mapping[str, Any]], key: str) -> int | None:
    """The finished run with the highest value; None where none has one."""
    finished = [(index, row) for index, row in enumerate(rows) if row.get("status", "FINISHED") == "FINISHED"]
    values = {index: row[key] for index, row in finished if row.get(key) is not None}
    return max(values, key=values.__getitem__) if values else None


def _style(row: Mapping[str, Any], key: str, is_best: bool) -> str:
    if key == "speedup":
        return speedup_style(row.get(key))
    return "bold" if is_best else ""


def _name(row: Mapping[str, Any], *, by_run: bool) -> Text:
    text = Text(str((by_run and row.get("run_name")) or row["method"] or "-"))
    if (status := row.get("status", "FINISHED")) != "FINISHED":
        text.append(f" ({status.lower()})", style="bold red")
    return text
