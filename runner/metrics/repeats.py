"""Several passes over one workload as one summary: medians, and the spread that a single number hides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

REPEATED = ("speedup", "output_tokens_per_second")  # have a median and a range over the repeats


def middle_repeat(summaries: Sequence[Mapping[str, Any]]) -> int:
    """The repeat in the middle by speed-up, then by tokens per second; the slower of two middle ones."""
    order = sorted(range(len(summaries)), key=lambda repeat: [summaries[repeat][key] or 0.0 for key in REPEATED])
    return order[(len(order) - 1) // 2]


def over_repeats(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The middle repeat's summary (`MetricsCollector.summary`) with the medians and ranges of all of them."""
    summary = dict(summaries[middle_repeat(summaries)])
    summary |= {"repeats": len(summaries), **_median_and_range(summaries, REPEATED)}
    if summary["baseline"] is not None:
        baselines = [each["baseline"] for each in summaries]
        summary["baseline"] |= _median_and_range(baselines, ("output_tokens_per_second",))
    return summary


def _median_and_range(summaries: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in keys:
        values = [each[key] for each in summaries if each[key] is not None]
        found[key] = median(values) if values else None
        is_spread = values and len(summaries) > 1
        found[f"{key}_range"] = {"lowest": min(values), "highest": max(values)} if is_spread else None
    return found
