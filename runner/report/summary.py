"""The summary of one run: the promise first (speed-up, same text), then why (acceptance), then the rest.

As a panel, and of a point of a sweep as a line, for the sweep ends with a table of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from runner.metrics.core_wait import doubtful_waits
from runner.report.console import MIN_WIDTH, open_wide_console
from runner.report.text import (
    bar,
    identical,
    identical_style,
    latency,
    machine_title,
    mebibytes,
    method_title,
    number,
    numbers_of,
    percent,
    printable,
    ranged,
    shares_of_steps,
    speedup_style,
    times,
)

MAX_POSITIONS = 12  # longer drafts are in metrics.json in full


def print_summary(
    summary: Mapping[str, Any],
    *,
    model: str,
    files: Sequence[str | Path] = (),
    location: str | None = None,
    ui_command: str | None = None,
    console: Console | None = None,
) -> None:
    """Prints a `MetricsCollector.summary`.

    Args:
        files: what was written.
        location, ui_command: of the tracker.
    """
    console = console or open_wide_console()
    parts: list[RenderableType] = [_numbers(summary, model, ascii_only=console.options.ascii_only)]
    if len(summary["categories"]) > 1:
        parts += ["", _categories(summary["categories"])]
    if summary["notes"]:
        parts += ["", *(_note(note) for note in summary["notes"])]
    title = Text(method_title(summary), style="bold")
    panel = Panel(Group(*parts), title=title, title_align="left", border_style="cyan", padding=(0, 1), width=MIN_WIDTH)
    console.print(panel, crop=False)
    lines = [("files", str(path)) for path in files] + [("run", location), ("show", ui_command)]
    previous = ""
    for label, line in lines:
        if line is not None:  # unboxed and unbroken, to be copied
            head = f"{label if label != previous else '':<6}"
            console.print(Text(head, style="dim") + Text(line), soft_wrap=True)
            previous = label


def print_point(
    summary: Mapping[str, Any], *, notes: Sequence[str], directory: str | Path, console: Console | None = None
) -> None:
    """Prints a `MetricsCollector.summary` as a point of a sweep.

    Args:
        notes: those of the summary that no earlier point had.
        directory: where the whole summary is.
    """
    console = console or open_wide_console()
    console.print(_line(summary), soft_wrap=True)
    for note in notes:
        console.print(Text("note: ", "bold yellow") + Text(printable(note)), soft_wrap=True)
    console.print(Text("files ", "dim") + Text(str(directory)), soft_wrap=True)


def _line(summary: Mapping[str, Any]) -> Text:
    """One such as "ngram, 4 tokens: 1.41x, identical 8/8, acceptance 64.0%, length 3.53, 2,269.7 tokens/s"."""
    lossless = summary["lossless"]
    parts = [] if summary["speedup"] is None else [_gain(summary)]
    for what, count in (
        ("identical", summary["identical_to_baseline"]),
        ("identical in every repeat", summary["identical_between_repeats"]),
    ):
        if count is not None:
            parts.append(Text(f"{what} {identical(count, lossless)}", identical_style(count, lossless)))
    if summary["num_speculative_tokens"] or summary["num_drafts"]:
        parts.append(Text(f"acceptance {percent(summary['acceptance_rate'])}"))
        parts.append(Text(f"length {number(summary['mean_acceptance_length'], '{:.2f}')}"))
    parts.append(Text(f"{_tokens_per_second(summary)} tokens/s"))
    if failed := summary["num_failed_requests"]:
        parts.append(Text(f"{failed:,} failed", "bold red"))
    return Text(f"{method_title(summary)}: ", "bold") + Text(", ").join(parts)


def _numbers(summary: Mapping[str, Any], model: str, *, ascii_only: bool) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    same, lossless, share = summary["identical_to_baseline"], summary["lossless"], summary["time_share"]
    failed = summary["num_failed_requests"]
    requests = Text(f"{summary['num_requests']:,}, {summary['num_output_tokens']:,} output tokens")
    if failed:
        requests.append(f", {failed:,} failed", style="bold red")
    machine = summary["machine"]
    grid.add_row("model", model if machine is None else f"{model} on {machine['device']}, {numbers_of(machine)}")
    if machine is not None:
        grid.add_row("machine", machine_title(machine))
    grid.add_row("requests", requests)
    grid.add_row("speed-up over plain decoding", _gain(summary))
    grid.add_row("identical to plain decoding", Text(identical(same, lossless), identical_style(same, lossless)))
    if (repeated := summary["identical_between_repeats"]) is not None:
        style = identical_style(repeated, lossless)
        grid.add_row("identical in every repeat", Text(identical(repeated, lossless), style))
    if summary["num_speculative_tokens"] or summary["num_drafts"]:
        _acceptance(grid, summary, ascii_only=ascii_only)
    grid.add_row("tokens per step", number(summary["tokens_per_step"], "{:.2f}"))
    grid.add_row("output tokens per second", _tokens_per_second(summary))
    if summary["baseline"] is not None:
        grid.add_row("  of plain decoding", _tokens_per_second({**summary, **summary["baseline"]}))
    grid.add_row("time per output token", latency(summary["tpot_ms"]))
    grid.add_row("time to first token", latency(summary["ttft_ms"]))
    parts = {phase.replace("_", " "): value for phase, value in share.items() if value != 0.0}
    grid.add_row("share of time", ", ".join(f"{name} {number(value, '{:.0%}')}" for name, value in parts.items()))
    if (whole := summary["whole_step_share"]) is not None:
        of_all = f"{summary['num_whole_steps']:,} of {summary['num_decoding_steps']:,} decoding steps"
        grid.add_row("whole steps", f"{percent(whole)} ({of_all})")
    grid.add_row("peak memory", mebibytes(summary["peak_memory_bytes"]))
    if summary["prefix_cache_hits"]:
        of_all = f"{summary['prefix_cache_hits']:,} of {summary['prefix_cache_queries']:,} prompt tokens"
        grid.add_row("prefix cache", f"{percent(summary['prefix_cache_hit_rate'])} ({of_all})")
    if summary["num_preemptions"]:
        grid.add_row("preemptions", number(summary["num_preemptions"]))
    return grid


def _gain(summary: Mapping[str, Any]) -> Text:
    gain = Text(times(summary["speedup"]), speedup_style(summary["speedup"]))
    gain += Text(_ranged("", summary, "speedup", "{:.2f}"))
    if summary["speedup"] is not None and doubtful_waits([summary]):
        gain.append(f", doubtful ({summary['core_wait_share']:.0%} without a core)", style="yellow")
    return gain


def _tokens_per_second(summary: Mapping[str, Any]) -> str:
    text = number(summary["output_tokens_per_second"], "{:,.1f}")
    return _ranged(text, summary, "output_tokens_per_second", "{:,.1f}")


def _ranged(text: str, summary: Mapping[str, Any], key: str, pattern: str) -> str:
    if (ends := summary[f"{key}_range"]) is None:
        return text
    return ranged(text, (ends["lowest"], ends["highest"]), pattern) + f" in {summary['repeats']} repeats"


def _acceptance(grid: Table, summary: Mapping[str, Any], *, ascii_only: bool) -> None:
    counts = f" ({summary['num_accepted_tokens']:,} of {summary['num_draft_tokens']:,} drafted tokens)"
    grid.add_row("acceptance rate", Text(percent(summary["acceptance_rate"]), "bold") + Text(counts))
    length = Text(number(summary["mean_acceptance_length"], "{:.2f}"), "bold")
    own = f" (mean over requests {number(summary['mean_acceptance_length_per_request'], '{:.2f}')})"
    grid.add_row("mean acceptance length", length + Text(own))
    if len(budgets := summary["decoding_steps_by_budget"]) > 1:
        grid.add_row("drafts of at most", f"{shares_of_steps(budgets)} tokens (of the steps)")
    for source, own in summary["acceptance_by_source"].items():
        of_source = number(own["mean_acceptance_length"], "{:.2f}")
        of_all = f"{own['num_drafts'] / summary['num_drafts']:.0%} of the drafts"
        grid.add_row(f"  of {source}", f"{of_source} ({of_all}, {percent(own['acceptance_rate'])} accepted)")
    rates = list(zip(summary["acceptance_per_position"], summary["conditional_acceptance_per_position"], strict=True))
    rates = rates[: summary["draft_tree_depth"]]  # a tree has fewer levels than nodes
    for position, (rate, conditional) in enumerate(rates[:MAX_POSITIONS], start=1):
        line = Text(f"{position:>2} ") + Text(bar(rate, ascii_only=ascii_only), "cyan") + Text(f" {percent(rate):>6}")
        if position > 1:
            line.append(f"  {percent(conditional)} if reached", style="dim")
        grid.add_row("acceptance by position" if position == 1 else "", line)
    if len(rates) > MAX_POSITIONS:
        grid.add_row("", Text(f"and {len(rates) - MAX_POSITIONS} more in metrics.json", "dim"))


def _categories(categories: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), header_style="dim", show_edge=False)
    table.add_column("category", overflow="fold")
    for heading in ("requests", "acceptance", "length", "speed-up"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in categories.items():
        table.add_row(
            Text(printable(name)),
            number(row["num_requests"]),
            percent(row["acceptance_rate"]),
            number(row["mean_acceptance_length"], "{:.2f}"),
            Text(times(row["speedup"]), speedup_style(row["speedup"])),
        )
    return table


def _note(note: str) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_row(Text("note:", style="bold yellow"), Text(printable(note), overflow="fold"))
    return grid
