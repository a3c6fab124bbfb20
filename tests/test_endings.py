"""Interrupts wait for what must not end half done, and what nobody reads any more is printed to nobody."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from runner import endings
from runner.__main__ import main
from runner.endings import BROKEN_PIPE_STATUS, postponed_interrupts
from runner.tracking import open_tracker
from tests.command_line import logging_as_it_was

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals")


@pytest.fixture(autouse=True)
def _interruptible() -> Any:
    """As a process in the foreground is."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        assert signal.getsignal(number) is signal.default_int_handler
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_raised_behind_the_block_and_so_is_one_that_is_handed_on(number: signal.Signals) -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), postponed_interrupts():
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGINT)
        done.append("to its end")
    assert done == ["to its end"]


def test_whoever_interrupts_again_need_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "PATIENCE_S", 0.0)
    with pytest.raises(KeyboardInterrupt), postponed_interrupts():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_an_ignored_interrupt_and_other_threads_are_left_alone() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with postponed_interrupts():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found: list[Any] = []

    def look() -> None:
        with postponed_interrupts():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_an_interrupt_while_a_database_is_written_leaves_no_lock_and_a_run_that_is_marked_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its transaction stayed open: marking the run waited for the lock until that failed, and it stayed RUNNING."""
    from mlflow import MlflowClient
    from sqlalchemy.engine.default import DefaultDialect

    uri = f"sqlite:///{tmp_path / 'runs.db'}"
    is_armed = False

    def interrupted(execute: Any) -> Any:
        def call(self: Any, cursor: Any, statement: str, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_armed
            result = execute(self, cursor, statement, *args, **kwargs)
            if is_armed and statement.startswith("INSERT INTO metrics"):
                is_armed = False
                signal.raise_signal(signal.SIGINT)
            return result

        return call

    for name in ("do_execute", "do_executemany"):
        monkeypatch.setattr(DefaultDialect, name, interrupted(getattr(DefaultDialect, name)))
    tracker = open_tracker("mlflow", tracking_uri=uri, experiment_name="endings", run_name="interrupted", tags={})
    with pytest.raises(KeyboardInterrupt), tracker:
        is_armed = True
        tracker.log_summary({"num_steps": 3})
        pytest.fail("an interrupt comes behind what was written")
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("endings")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.data.metrics) == ("KILLED", {"num_steps": 3.0})


def run(*arguments: str, cwd: Path, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "runner", *arguments], cwd=cwd, stderr=subprocess.PIPE, **options)


def test_a_reader_that_leaves_sees_no_traceback(tmp_path: Path) -> None:
    with run("--help", cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == (b"", BROKEN_PIPE_STATUS)


def test_a_run_is_recorded_though_nobody_reads_its_summary(tmp_path: Path) -> None:
    """Of a sweep, logging showed a traceback for each of Hydra's lines."""
    arguments = ("-m", "workload.limit=1", "sampler.max_tokens=4", "method=none", "tracking=jsonl")
    with run(*arguments, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(60) == 0 and b"Traceback" not in errors
    (line,) = (tmp_path / "runs" / "runs.jsonl").read_text().splitlines()
    assert json.loads(line)["status"] == "FINISHED"


def test_tuning_keeps_what_it_found_though_nobody_reads_it(tmp_path: Path) -> None:
    """Its files were written behind its table."""
    options = ["--num-speculative-tokens", "1", "--batch-sizes", "1", "--repeats", "1", "--output", "found"]
    overrides = ["method=ngram", "workload.limit=1", "sampler.max_tokens=4", "tracking=jsonl"]
    command = [sys.executable, "-m", "runner.tune", *options, *overrides]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
    assert (tmp_path / "found" / "tuning.json").is_file()
    (line,) = (tmp_path / "runs" / "runs.jsonl").read_text().splitlines()
    assert json.loads(line)["status"] == "FINISHED"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
@pytest.mark.parametrize(
    ("redirection", "reason", "mode"),
    [(">/dev/full", "No space left on device", ["-m"]), (">&-", "it is closed", [])],
)
def test_a_run_is_recorded_where_stdout_is_full_or_closed(
    redirection: str, reason: str, mode: list[str], tmp_path: Path
) -> None:
    """Both ended in a traceback behind the measurement, which was lost, or FAILED."""
    arguments = ["workload.limit=1", "sampler.max_tokens=4", "method=none", "tracking=jsonl", "baseline=false", *mode]
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "runner", *arguments]
    done = subprocess.run(shell, cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False)
    (line,) = (tmp_path / "runs" / "runs.jsonl").read_text().splitlines()
    assert json.loads(line)["status"] == "FINISHED"
    last = f"error: stdout cannot be written to ({reason}): what was printed is lost"
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == last
    assert "Traceback" not in done.stderr and "Logging error" not in done.stderr


def test_a_name_that_is_no_text_is_printed_in_escapes(tmp_path: Path) -> None:
    """Of a directory in latin1 the table of a sweep was printed, and then a traceback."""
    code = "import sys; from runner.endings import printing; sys.exit(printing(lambda: print('sweep caf\\udce9') or 0))"
    environment = {"PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, b"sweep caf\\udce9", b"")


def test_paths_and_records_go_by_the_directory_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under hydra.job.chdir a workload was looked for in the run's own directory, and the run recorded there."""
    (tmp_path / "own.jsonl").write_text('{"prompt": "def f"}\n')
    arguments = ["workload=jsonl", "workload.path=own.jsonl", "sampler.max_tokens=4", "method=none", "tracking=jsonl"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["runner"])
    with logging_as_it_was():
        assert main([*arguments, "hydra.job.chdir=true"]) == 0
    assert (tmp_path / "runs" / "runs.jsonl").is_file()
