"""Waits for a core are found, and told where they make a measurement doubtful."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner.metrics import CoreWait, core_wait, core_wait_notes

SCHEDSTAT = Path("/proc/self/schedstat")


def tell(threads: Path, name: str, nanoseconds: int) -> None:
    (threads / name).mkdir(exist_ok=True)
    (threads / name / "schedstat").write_text(f"987654321 {nanoseconds} 42\n")


def test_the_share_is_that_of_the_thread_that_waited_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_wait, "THREADS", tmp_path)
    now = iter([10.0, 20.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    tell(tmp_path, "1", 5_000_000_000)
    tell(tmp_path, "2", 100_000_000)
    tell(tmp_path, "4", 7_000_000_000)
    wait = CoreWait()
    tell(tmp_path, "1", 5_500_000_000)
    tell(tmp_path, "2", 1_600_000_000)
    tell(tmp_path, "3", 1_000_000_000)  # has come since
    (tmp_path / "4" / "schedstat").unlink()  # is ending
    assert wait.share() == 0.15


def test_a_system_that_counts_no_waits_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_wait, "THREADS", tmp_path / "nowhere")
    assert CoreWait().share() is None
    assert core_wait_notes(None, num_threads=None) == []


@pytest.mark.skipif(not SCHEDSTAT.exists(), reason="this system does not count how long a thread waits")
def test_a_thread_that_shares_its_core_is_found_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_wait, "THREADS", Path("/proc/self/task"))
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # the process that follows inherits it
    try:
        with subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=-1) as other:
            assert other.stdout is not None
            other.stdout.readline()  # it is busy from here on
            try:
                wait, end = CoreWait(), time.perf_counter() + 0.3
                while time.perf_counter() < end:
                    pass
                share = wait.share()
            finally:
                other.kill()
    finally:
        os.sched_setaffinity(0, cores)
    assert share is not None and 0.2 < share < 1.0


def test_a_note_tells_of_a_wait_that_makes_times_doubtful() -> None:
    assert core_wait_notes(0.03, num_threads=None) == []
    (note,) = core_wait_notes(0.234, num_threads=None)
    assert "waited for a core 23% of the time" in note and "or lower OMP_NUM_THREADS, and" in note


def test_the_note_names_the_threads_that_were_asked_for() -> None:
    """OMP_NUM_THREADS changes nothing where hardware.num_threads is set."""
    (note,) = core_wait_notes(0.234, num_threads=500)
    assert "or lower hardware.num_threads=500, and" in note
