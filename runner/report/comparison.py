"""The runs of a sweep side by side, fastest marked, in the order they were run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.metrics.core_wait import doubtful_waits
from runner.metrics.rates import fastest, measure_of_speed, range_of
from runner.report.console import make_room, open_wide_console
from runner.report.text import identical, identical_style, machine_title, number, percent, ranged, speedup_style, times

HIGHER_IS_BETTER = ("speedup", "output_tokens_per_second", "mean_acceptance_length", "acceptance_rate")
FORMATS = {
    "acceptance_rate": percent,
    "mean_acceptance_length": lambda value: number(value, "{:.2f}"),
    "output_tokens_per_second": lambda value: number(value, "{:,.1f}"),
    "speedup": times,
    "whole_step_share": percent,
}
PATTERNS = {"output_tokens_per_second": "{:,.1f}", "speedup": "{:.2f}"}  # of their ranges over repeats
ENOUGH_REPEATS = 3  # for ranges of equal methods to overlap in nine of ten cases
ROOM_FOR_RANGES = 110  # columns of a terminal
MARKED = (False, "unguaranteed")  # values of lossless that the table shows
HEADINGS = dict(zip(FORMATS, ("acceptance", "length", "tokens/s", "speed-up", "whole"), strict=True))
KEPT = ("acceptance_rate", "mean_acceptance_length", "output_tokens_per_second")  # columns also without a value


def print_comparison(
    rows: Sequence[Mapping[str, Any]], *, params: Sequence[str], console: Console | None = None
) -> None:
    """Prints the rows of `Tracker.children`, one a run.

    The best value of every column is bold, the fastest run (by speed-up, or by tokens per second where a run has no
    speed-up) carries a star, after repeats only if its range overlaps no other, and none where plain decoding was
    faster or times are doubtful; a run under a lossy rule, or one that does not guarantee plain decoding's tokens, is
    marked so. Speed-up, share of whole steps and identity that no run has are left out. Runs go by their names only
    where method, number of tokens and params do not tell two of them apart. Nothing is cut short: with long names or
    many columns the table is wider than 80 columns.

    Args:
        params: keys of swept parameters; those that the rows have get a column, headed by the end of the key.
    """
    params = [key for key in params if key != "method" and any(key in row for row in rows)]
    names = Counter((row["method"], row["num_speculative_tokens"], *(row[key] for key in params)) for row in rows)
    ambiguous = max(names.values(), default=0) > 1 and any(row.get("run_name") for row in rows)
    best = {key: _best(rows, key) for key in HIGHER_IS_BETTER}
    first = fastest(rows)
    is_slower = first is not None and measure_of_speed(rows) == "speedup" and rows[first]["speedup"] < 1
    first = None if is_slower else first  # of a sweep without plain decoding, which every run was measured beside
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, header_style="bold", show_edge=False)
    table.add_column("run" if ambiguous else "method", no_wrap=True)
    table.add_column("K", justify="right", no_wrap=True)
    for key in params:
        table.add_column(key.rpartition(".")[2].replace("_", "\n"), no_wrap=True)
    forms = {key: form for key, form in FORMATS.items() if key in KEPT or any(row.get(key) is not None for row in rows)}
    tells_identity = any(row.get("identical_to_baseline") or row.get("lossless") in MARKED for row in rows)
    for heading in (*(HEADINGS[key] for key in forms), *(["identical"] if tells_identity else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    console = console or open_wide_console()
    is_narrow = console.is_terminal and console.width < ROOM_FOR_RANGES
    for index, row in enumerate(rows):
        cells = [Text(_cell(row, key, is_narrow=is_narrow), _style(row, key, index == best.get(key))) for key in forms]
        same, lossless = row.get("identical_to_baseline"), row.get("lossless")
        table.add_row(
            _name(row, by_run=ambiguous) + Text(" *" if index == first else "", "bold green"),
            number(row["num_speculative_tokens"] or None),
            *(Text("-" if row[key] is None else str(row[key])) for key in params),
            *cells,
            *([Text(identical(same, lossless), identical_style(same, lossless))] if tells_identity else []),
        )
    make_room(console, table)
    console.print(table, crop=False)
    if first is not None:
        is_ratio = measure_of_speed(rows) == "speedup"  # plain decoding's time may differ from run to run
        console.print(Text(f" * {'highest speed-up' if is_ratio else 'fastest'}{_of_few(rows)}", "dim"), soft_wrap=True)
    elif is_slower:
        console.print(Text(" no run is faster than plain decoding", "dim"))
    elif best[measure_of_speed(rows)] is not None and not doubtful_waits(rows):
        console.print(Text(" no run is the fastest: the ranges of their repeats overlap", "dim"))
    if waits := doubtful_waits(rows):
        where = f"in {len(waits)} of {len(rows)} runs a thread waited for a core, up to {max(waits):.0%} of the time"
        console.print(Text(f" doubtful times: {where}", "bold yellow"), soft_wrap=True)
    for machine in dict.fromkeys(filter(None, map(machine_title, rows))):
        console.print(Text(f" on {machine}", "dim"), soft_wrap=True)


def _of_few(rows: Sequence[Mapping[str, Any]]) -> str:
    """What a mark says that stands on few passes: two pairs of one method's do not overlap in one of three cases."""
    key = measure_of_speed(rows)
    fewest = min(row["num_repeats"] for row in rows if row.get(key) is not None)
    if fewest >= ENOUGH_REPEATS:
        return ""
    passes = "one pass" if fewest == 1 else f"{fewest} passes"
    return f", of {passes}; repeats={ENOUGH_REPEATS} tells whether it is by chance"


def _cell(row: Mapping[str, Any], key: str, *, is_narrow: bool) -> str:
    """The value, and the range of its repeats beside it or, where that would be too wide, below."""
    text, pattern = FORMATS[key](row.get(key)), PATTERNS.get(key)
    if pattern is None or row.get(f"{key}_lowest") is None:
        return text
    ends = range_of(row, key)
    if not is_narrow:
        return ranged(text, ends, pattern)
    return f"{text}\n" + " to ".join(pattern.replace(".1f", ".0f").format(end) for end in ends)


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
