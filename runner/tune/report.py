"""What a person sees of a grid: speed-ups as a table and as a picture, and what to set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.report.console import make_room
from runner.report.text import identical, identical_style, number, shares_of_steps, speedup_style, times
from runner.tune.grid import Column, Grid, column_name


def print_grid(grid: Grid, *, title: str, identical_texts: Mapping[str, int] | None, console: Console) -> None:
    """A row a batch size, a column a number of tokens, median over lowest and highest; the best carries a star."""
    drafted = grid.columns[1:]
    console.print(Text(title, "bold"), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    for heading in ("batch\nsize", "plain\ntokens/s", *(column_name(each).replace(" ", "\n") for each in drafted)):
        table.add_column(heading, justify="right", no_wrap=True)
    for size in grid.batch_sizes:
        plain = grid.tokens_per_second[size, 0][: grid.num_repeats]
        first = _cell(f"{median(plain):,.1f}", plain, "{:,.1f}", "", is_best=grid.best(size) == 0)
        table.add_row(str(size), first, *(_speedup(grid, size, each) for each in drafted))
    lengths = (number(grid.mean_acceptance_length(each), "{:.2f}") for each in drafted)
    table.add_section()
    table.add_row(Text("length", "dim"), "", *lengths)
    make_room(console, table)
    console.print(table, crop=False)
    lines = ["* the fewest tokens that no number beats in every repeat. length: mean acceptance length"]
    if grid.num_repeats == 1:
        lines.append("one repeat says nothing of how far repeats differ: raise --repeats")
    lines += [
        f"batch size {size}: {grid.fastest(size)} tokens are faster in the median, not in every repeat"
        for size in grid.batch_sizes
        if grid.fastest(size) != grid.best(size)
    ]
    lines += [
        f"batch size {size}: auto allowed {shares_of_steps(steps)} tokens"
        for size, steps in sorted(grid.choices.items())
    ]
    for line in lines:
        console.print(Text(f" {line}", "dim"), soft_wrap=True)
    if identical_texts is not None:
        line = f" identical in every pass, whatever the batch and the tokens: {identical(identical_texts)}"
        console.print(Text(line, identical_style(identical_texts)), soft_wrap=True)


def _speedup(grid: Grid, size: int, column: Column) -> Text:
    values = grid.speedups((size, column))
    middle = median(values)
    return _cell(times(middle), values, "{:.2f}", speedup_style(middle), is_best=grid.best(size) == column)


def _cell(text: str, values: Sequence[float], pattern: str, style: str, *, is_best: bool) -> Text:
    cell = Text(f"* {text}" if is_best else text, style)
    if len(values) > 1:
        cell.append(f"\n{pattern.format(min(values))}-{pattern.format(max(values))}", "dim not bold")
    return cell


def draw_grid(path: Path, grid: Grid, *, title: str) -> bool:
    """Speed-up over batch size, a line a number of tokens. False where there is no matplotlib."""
    try:
        from matplotlib.figure import Figure  # without pyplot, so no display and no global state
    except ModuleNotFoundError:
        return False
    figure = Figure(figsize=(8, 4.8), layout="constrained", dpi=140)
    panel = figure.subplots()
    panel.axhline(1.0, color="#888888", linewidth=1, linestyle="--", label="plain decoding")
    for column in grid.columns[1:]:
        spreads = [grid.speedups((size, column)) for size in grid.batch_sizes]
        middles = [median(values) for values in spreads]
        below = [middle - min(values) for middle, values in zip(middles, spreads, strict=True)]
        above = [max(values) - middle for middle, values in zip(middles, spreads, strict=True)]
        style = "k--" if column == "auto" else "-"
        panel.errorbar(
            grid.batch_sizes, middles, yerr=(below, above), fmt=style, marker="o", capsize=3, label=column_name(column)
        )
    panel.set_xscale("log", base=2)
    panel.set_xticks(grid.batch_sizes, [str(size) for size in grid.batch_sizes])
    panel.set_ylim(bottom=0)
    panel.set_xlabel("batch size")
    panel.set_ylabel("speed-up over plain decoding")
    panel.set_title(title, fontsize=11, loc="left")
    panel.grid(color="#e5e5e5")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
    figure.savefig(path)
    return True


def grid_as_json(grid: Grid) -> dict[str, dict[str, Any]]:
    """By batch size and number of tokens; the keys are names of metrics."""
    return {
        f"batch_size_{size}": {
            f"k_{column}": {
                "tokens_per_second": _spread(grid.tokens_per_second[size, column][: grid.num_repeats]),
                "speedup": _spread(grid.speedups((size, column))),
                "num_full_steps": grid.num_full_steps[size, column],
            }
            for column in grid.columns
        }
        for size in grid.batch_sizes
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "lowest": min(values), "highest": max(values)}
