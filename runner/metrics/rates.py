"""Counters to rates: pure functions from finished requests to the numbers of the summary.

The definitions are in `MetricsCollector.summary`. A zero denominator gives None, never 0 or NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from runner.metrics.core_wait import doubtful_waits
from runner.metrics.records import RequestRecord

SPREAD = ("median", "p20", "p80")  # of `percentiles`, what tables show
SHORT_PASS_S = 0.5  # a pass of so little time tells of its first steps


def count_identical(records: Iterable[RequestRecord], *others: Iterable[RequestRecord]) -> dict[str, int]:
    """Requests that finished in all passes, matched by request_id, and how many have the very same tokens in all.

    Raises:
        ValueError: the passes do not have the same requests, so there is nothing to compare.
    """
    first, *rest = ({record.request_id: record for record in each} for each in (records, *others))
    for other in rest:
        if first.keys() != other.keys():
            odd = ", ".join(sorted(first.keys() ^ other.keys())[:3])
            raise ValueError(f"what is compared must have the same requests; only in one of them: {odd}")
    groups = [[each[request_id] for each in (first, *rest)] for request_id in first]
    finished = [group for group in groups if not any(record.failed for record in group)]
    identical = sum(len({tuple(record.token_ids) for record in group}) == 1 for group in finished)
    return {"requests": len(finished), "identical": identical}


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """{median, p20, p80, p99}, linear between order statistics (numpy's default); all None without values."""
    ordered = sorted(values)

    def at(quantile: float) -> float | None:
        if not ordered:
            return None
        rank = quantile * (len(ordered) - 1)
        low = int(rank)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)

    return {"median": at(0.5), "p20": at(0.2), "p80": at(0.8), "p99": at(0.99)}


def draft_tree_depth(records: Iterable[RequestRecord]) -> int | None:
    """Levels of the deepest draft; None where every draft is a chain."""
    drafts = _drafts_of(records)
    is_tree = any(depth < drafted for drafted, depth, _ in drafts)
    return max(depth for _, depth, _ in drafts) if is_tree else None


def acceptance(records: Iterable[RequestRecord], num_positions: int) -> dict[str, Any]:
    """Counts and rates of the drafts; lists have num_positions entries, or as many as the deepest draft has tokens."""
    records = list(records)
    drafts = _drafts_of(records)
    num_positions = max([num_positions, *(depth for _, depth, _ in drafts)])
    accepted_at = [sum(accepted > i for _, _, accepted in drafts) for i in range(num_positions)]
    reached_at = [sum(depth > i and accepted >= i for _, depth, accepted in drafts) for i in range(num_positions)]
    own_lengths = [_acceptance_length(own) for record in records if (own := _drafts_of([record]))]
    return {
        **_counts(drafts),
        "mean_acceptance_length_per_request": ratio(sum(own_lengths), len(own_lengths)),
        "acceptance_per_position": [ratio(count, len(drafts)) for count in accepted_at],
        "conditional_acceptance_per_position": [ratio(a, r) for a, r in zip(accepted_at, reached_at, strict=True)],
        "acceptance_length_histogram": {
            str(1 + count): sum(accepted == count for _, _, accepted in drafts) for count in range(num_positions + 1)
        },
    }


def by_source(records: Iterable[RequestRecord]) -> dict[str, Any]:
    """Proposer -> what became of its drafts; empty where one drafts."""
    own: dict[str, list[tuple[int, int, int]]] = {}
    for record in records:
        for source, draft in record.sourced_drafts:
            if source is not None:
                own.setdefault(source, []).append(draft)
    return {source: _counts(drafts) for source, drafts in sorted(own.items())}


def categories(records: Sequence[RequestRecord], baseline: Mapping[str, Any] | None) -> dict[str, Any]:
    """Category -> its share of the summary; requests without a category are left out."""
    plain = baseline.get("categories", {}) if baseline else {}
    breakdown: dict[str, Any] = {}
    for category in sorted({record.category for record in records if record.category is not None}):
        own = [record for record in records if record.category == category]
        pooled = acceptance(own, 0)
        tpot_ms = percentiles(per_output_token_ms(own))
        breakdown[category] = {
            "num_requests": len(own),
            "num_output_tokens": sum(len(record.token_ids) for record in own),
            "acceptance_rate": pooled["acceptance_rate"],
            "mean_acceptance_length": pooled["mean_acceptance_length"],
            "tpot_ms": tpot_ms,
            "speedup": speedup(plain.get(category), tpot_ms),
        }
    return breakdown


def to_first_token_ms(records: Iterable[RequestRecord]) -> list[float]:
    return [1e3 * (record.token_times[0] - record.arrival_time) for record in records if record.token_times]


def per_output_token_ms(records: Iterable[RequestRecord]) -> list[float]:
    return [
        1e3 * (record.token_times[-1] - record.token_times[0]) / (len(record.token_ids) - 1)
        for record in records
        if len(record.token_ids) >= 2
    ]


def inter_token_ms(records: Iterable[RequestRecord]) -> list[float]:
    gaps: list[float] = []
    for record in records:
        times = record.token_times
        for before, now, num_tokens in zip(times, times[1:], record.tokens_per_step[1:], strict=False):
            gaps += [1e3 * (now - before) / num_tokens] * num_tokens
    return gaps


def speedup(baseline: Mapping[str, Any] | None, tpot_ms: Mapping[str, float | None]) -> float | None:
    plain, own = baseline["tpot_ms"]["median"] if baseline else None, tpot_ms["median"]
    return None if plain is None or own is None else ratio(plain, own)


def short_pass_notes(durations_s: Sequence[float]) -> list[str]:
    """One note where a pass, of those that are compared, is too short for its times to mean much."""
    if (shortest := min(durations_s)) >= SHORT_PASS_S:
        return []
    return [
        f"a pass took {shortest:.2f} s only, so times and speed-up mean little; "
        "add prompts, or raise sampler.max_tokens"
    ]


def ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def measure_of_speed(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the finished runs are ranked by: without a baseline only plain decoding has a speed-up, which is 1."""
    finished = [row for row in rows if row.get("status", "FINISHED") == "FINISHED"]
    has_speedups = all(row.get("speedup") is not None for row in finished)
    return "speedup" if has_speedups else "output_tokens_per_second"


def fastest(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The finished run with the highest speed; None where its repeats' range overlaps another run's, or without any, or
    where one waited for cores so long that times cannot be compared."""
    if doubtful_waits(rows):
        return None
    key = measure_of_speed(rows)
    finished = [index for index, row in enumerate(rows) if row.get("status", "FINISHED") == "FINISHED"]
    ranges = {index: range_of(rows[index], key) for index in finished if rows[index].get(key) is not None}
    if not ranges:
        return None
    best = max(ranges, key=lambda index: float(rows[index][key]))
    if all(lowest == highest for lowest, highest in ranges.values()):  # single passes: nobody knows their spread
        return best
    return best if all(ranges[best][0] > high for index, (_, high) in ranges.items() if index != best) else None


def range_of(row: Mapping[str, Any], key: str) -> tuple[float, float]:
    """Lowest and highest over the repeats of a comparison's row; its value twice where there was one."""
    lowest, highest = row.get(f"{key}_lowest"), row.get(f"{key}_highest")
    return (row[key], row[key]) if lowest is None or highest is None else (lowest, highest)


def _drafts_of(records: Iterable[RequestRecord]) -> list[tuple[int, int, int]]:
    return [draft for record in records for draft in record.drafts]


def _counts(drafts: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    num_draft_tokens = sum(drafted for drafted, _, _ in drafts)
    num_accepted_tokens = sum(accepted for _, _, accepted in drafts)
    return {
        "num_drafts": len(drafts),
        "num_draft_tokens": num_draft_tokens,
        "num_accepted_tokens": num_accepted_tokens,
        "acceptance_rate": ratio(num_accepted_tokens, num_draft_tokens),
        "mean_acceptance_length": _acceptance_length(drafts) if drafts else None,
    }


def _acceptance_length(drafts: Sequence[tuple[int, int, int]]) -> float:
    return 1 + sum(accepted for _, _, accepted in drafts) / len(drafts)
