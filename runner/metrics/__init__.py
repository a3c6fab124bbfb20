"""Counts, rates and latencies of a run: the one place where every reported number is defined.

Pure Python without torch. The step loop hands `StepRecord`s and `RequestRecord`s to a `MetricsCollector`; its `summary`
does the arithmetic, in plain dicts and lists that go to metrics.json as they are.
"""

from runner.metrics.collector import MetricsCollector
from runner.metrics.core_wait import CoreWait, core_wait_notes
from runner.metrics.in_parts import InParts, in_parts_notes
from runner.metrics.rates import count_identical, short_pass_notes
from runner.metrics.records import RequestRecord, RequestStep, StepPoint, StepRecord

__all__ = [
    "CoreWait",
    "InParts",
    "MetricsCollector",
    "RequestRecord",
    "RequestStep",
    "StepPoint",
    "StepRecord",
    "core_wait_notes",
    "count_identical",
    "in_parts_notes",
    "short_pass_notes",
]
