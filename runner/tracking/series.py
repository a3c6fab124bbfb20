"""Steps to time series of bounded length.

A run of more than MAX_POINTS steps is cut into buckets of equally many consecutive steps (the last may be shorter).
A bucket's rates are pooled over its steps (sum over sum, never an average of averages), and it stands at its last step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runner.metrics import StepPoint

MAX_POINTS = 2000


@dataclass(frozen=True, kw_only=True)
class SeriesPoint:
    """The value of every series at one step; a series without a value there (no draft, no time) is missing."""

    step: int  # index of the bucket's last step, from 0
    finished_at: float  # s, time.perf_counter
    values: dict[str, float]


def step_series(points: Sequence[StepPoint], max_points: int = MAX_POINTS) -> list[SeriesPoint]:
    """Over the steps: the acceptance_rate, mean_acceptance_length, num_requests, output_tokens_per_second and, where
    steps are captured, whole_step_share.
    """
    size = -(-len(points) // max_points) or 1
    return [_pooled(points[start : start + size], start) for start in range(0, len(points), size)]


def _pooled(bucket: Sequence[StepPoint], start: int) -> SeriesPoint:
    num_drafts = sum(point.num_drafts for point in bucket)
    accepted = sum(point.num_accepted_tokens for point in bucket)
    seconds = sum(point.total_seconds for point in bucket)
    values = {"num_requests": sum(point.num_requests for point in bucket) / len(bucket)}
    if num_drafts:
        values["acceptance_rate"] = accepted / sum(point.num_draft_tokens for point in bucket)
        values["mean_acceptance_length"] = 1 + accepted / num_drafts
    if forms := [point.is_whole for point in bucket if point.is_whole is not None]:
        values["whole_step_share"] = sum(forms) / len(forms)
    if seconds > 0:
        values["output_tokens_per_second"] = sum(point.num_output_tokens for point in bucket) / seconds
    return SeriesPoint(step=start + len(bucket) - 1, finished_at=bucket[-1].finished_at, values=values)
