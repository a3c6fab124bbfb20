"""The comparison of a sweep's runs as files: a table for machines and a picture for people."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.metrics.rates import fastest, measure_of_speed, range_of
from runner.tracking.tracker import comparison_row

BAR, BEST, GRID = "#9db4c0", "#2a6f97", "#e5e5e5"
_COMPARED_KEYS = comparison_row({}, run_name=None, status="")
SPEEDS = {
    "speedup": ("speedup", "speed-up over plain decoding", "{:.2f}x"),
    "output_tokens_per_second": ("output_tokens_per_second", "output tokens per second", "{:,.1f}"),
}
ON_TOP: Any = {"zorder": 4, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1}}


def write_comparison(directory: Path, rows: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Writes comparison.csv and, where matplotlib is there (it comes with full MLflow), comparison.png."""
    table = directory / "comparison.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    picture = directory / "comparison.png"
    try:
        _draw(picture, rows)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("matplotlib"):
            raise
        return [table]
    return [table, picture]


def _draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Two panels of horizontal bars, one bar a run with the range of its repeats, fastest on top.

    The best bar of a panel stands out, the fastest only where its range overlaps no other and no time is doubtful.
    """
    from matplotlib.figure import Figure  # without pyplot, so no display and no global state

    speed = measure_of_speed(rows)
    rows = sorted(rows, key=lambda row: row[speed] or 0.0)
    first = fastest(rows)
    labels = [_label(row) for row in rows]
    figure = Figure(figsize=(9, 1.2 + 0.38 * len(rows)), layout="constrained", dpi=140)
    panels = figure.subplots(1, 2, sharey=True)
    columns = (SPEEDS[speed], ("mean_acceptance_length",) * 2 + ("{:.2f}",))
    for panel, (key, title, pattern) in zip(panels, columns, strict=True):
        values = [row[key] or 0.0 for row in rows]
        best = first if key == speed else values.index(max(values))
        colours = [BEST if index == best and value > 0 else BAR for index, value in enumerate(values)]
        bars = panel.barh(range(len(rows)), values, xerr=_errors(rows, key), color=colours, height=0.7, zorder=2)
        texts = ["-" if row[key] is None else pattern.format(row[key]) for row in rows]
        panel.bar_label(bars, texts, padding=4, **ON_TOP)
        if key != "output_tokens_per_second":
            panel.axvline(1.0, color="#888888", linewidth=1, linestyle="--", zorder=3)  # plain decoding
        panel.set_title(title.replace("_", " "), fontsize=11, loc="left")
        highest = [range_of(row, key)[1] or 0.0 for row in rows]
        panel.set_xlim(0, 1.18 * max([*highest, 1.0]))
        panel.set_yticks(range(len(rows)), labels)
        panel.grid(axis="x", color=GRID, zorder=0)
        panel.tick_params(length=0)
        panel.spines[:].set_visible(False)
    figure.savefig(path)


def _errors(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]] | None:
    """How far the repeats of each run reach below and above its bar; None where no run has several."""
    if all(row.get(f"{key}_lowest") is None for row in rows):
        return None
    ranges = [(row[key], *range_of(row, key)) if row[key] is not None else (0.0, 0.0, 0.0) for row in rows]
    return [value - lowest for value, lowest, _ in ranges], [highest - value for value, _, highest in ranges]


def _label(row: Mapping[str, Any]) -> str:
    k = row["num_speculative_tokens"]
    name = row["run_name"] or (f"{row['method']} K={k}" if k else str(row["method"]))
    swept = [value for key, value in row.items() if key not in _COMPARED_KEYS]
    params = ["-" if value is None else str(value) for value in swept]
    promise = {False: ["lossy"], "unguaranteed": ["unguaranteed"]}.get(row.get("lossless"), [])
    name = ", ".join([name, *params, *promise])
    return name if row["status"] == "FINISHED" else f"{name} ({row['status'].lower()})"
