"""A process that is told to stop has its say first, whoever tells it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runner.cli.termination import ends_without_a_word

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals")

PROGRAM = """
import signal, sys, time
from pathlib import Path
from runner.cli.termination import interrupt_on_termination
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[2] == "nohup" else signal.SIG_DFL)
interrupt_on_termination()
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    signal.raise_signal(signal.SIGHUP if sys.argv[2] == "hangup" else signal.SIGCHLD)  # the kernel's, after the shell's
    print("saving", file=sys.stderr, flush=True)
    Path(sys.argv[1]).write_text("kept")
"""


IMPORTING = """
import runpy, signal, sys

class Interrupt:
    def find_spec(name, path=None, target=None):
        if name == "omegaconf":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt)
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=True)
"""


def start(path: Path, how: str, output: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PROGRAM, str(path), how]
    return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_leaves_time_to_save(tmp_path: Path, sent: signal.Signals) -> None:
    """SIGHUP, of a closed terminal, ended the process on the spot."""
    with start(tmp_path / "results", "hangup" if sent is signal.SIGHUP else "", subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(sent)
        assert (process.wait(30), process.stdout.read()) == (0, b"saving\n")
    assert (tmp_path / "results").read_text() == "kept"


def test_results_are_saved_though_their_terminal_is_gone(tmp_path: Path) -> None:
    """What is printed to it then raises OSError, in the middle of the saving."""
    terminal, output = os.openpty()
    with start(tmp_path / "results", "hangup", output) as process:
        os.close(output)
        with open(terminal, "rb", buffering=0) as lines:  # a terminal may hand out half a line
            assert lines.readline() == b"ready\r\n"
        process.send_signal(signal.SIGHUP)
        assert process.wait(30) == 0
    assert (tmp_path / "results").read_text() == "kept"


def test_under_nohup_the_end_of_the_terminal_changes_nothing(tmp_path: Path) -> None:
    with start(tmp_path / "results", "nohup", subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.kill()
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("program", ["runner", "runner.tune", "runner.train"])
def test_an_interrupt_while_modules_are_imported_ends_without_a_word(program: str) -> None:
    """Ctrl-C in the first half second of a run showed the traceback of whatever was imported then."""
    run = subprocess.run([sys.executable, "-c", IMPORTING, program], capture_output=True, timeout=60, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (130, b"", b"")


def test_an_interrupt_that_is_ignored_stays_ignored_while_modules_are_imported() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ends_without_a_word():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
