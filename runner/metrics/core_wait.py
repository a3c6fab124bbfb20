"""How long this process waited for a core: what other processes, or too many threads, cost a measurement.

A thread that has work and no core is slow through no fault of the method, and the threads of one product wait for the
slowest of them. Linux counts the time for each thread (/proc/<pid>/schedstat, the second number, in nanoseconds:
Documentation/scheduler/sched-stats.rst).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

THREADS = Path("/proc/self/task")
TOLERATED_SHARE = 0.05  # an idle machine's own housekeeping costs 1 to 3 %


class CoreWait:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._waited = _seconds_waited()

    def share(self) -> float | None:
        """Of the time since: the longest wait of a thread. None where the system does not count it."""
        elapsed = time.perf_counter() - self._started
        waits = [seconds - self._waited.get(thread, 0.0) for thread, seconds in _seconds_waited().items()]
        return max(waits) / elapsed if waits and elapsed > 0.0 else None


def core_wait_notes(share: float | None, *, num_threads: int | None) -> list[str]:
    """One note where the wait makes the times doubtful; num_threads: as hardware.num_threads sets it."""
    if share is None or share < TOLERATED_SHARE:
        return []
    threads = "OMP_NUM_THREADS" if num_threads is None else f"hardware.num_threads={num_threads}"
    return [
        f"a thread of this process waited for a core {share:.0%} of the time, so times and speed-up are doubtful; "
        f"end what else runs on this machine, or lower {threads}, and measure again"
    ]


def doubtful_waits(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """The shares of those runs that waited too long for their times to be compared; summaries, or rows of a sweep."""
    return [share for row in rows if (share := row.get("core_wait_share") or 0.0) >= TOLERATED_SHARE]


def _seconds_waited() -> dict[str, float]:
    """Of every thread that lives, by its id."""
    waited = {}
    for thread in THREADS.glob("*"):
        try:
            waited[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):  # it has just ended, or the kernel counts nothing
            continue
    return waited
