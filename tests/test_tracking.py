"""Runs are recorded as they went: numbers, status, parent, and nothing half-written marked finished."""

from __future__ import annotations

import csv
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.exc import OperationalError

from kernels.machine import git_sha
from runner.engine.errors import UserError
from runner.metrics import StepPoint
from runner.tracking import (
    PARENT_RUN_ENV,
    RUNS_FILE,
    Tracker,
    add_row,
    check_store,
    collecting_rows,
    open_tracker,
    start_sweep,
)
from runner.tracking.comparison import _errors, _label, write_comparison
from runner.tracking.flatten import MAX_KEY_LENGTH, flat_metrics, flat_params, flat_values
from runner.tracking.mlflow_store import resolve_tracking_uri, sqlite_path, store_errors
from runner.tracking.names import as_folder
from runner.tracking.series import step_series
from runner.tracking.tracker import MACHINE, comparison_row, status_of

SUMMARY = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "acceptance_rate": 0.5,
    "mean_acceptance_length": 3.0,
    "output_tokens_per_second": 120.5,
    "speedup": None,
    "whole_step_share": 0.75,
    "tpot_ms": {"median": 8.25, "p20": None},
    "acceptance_per_position": [0.75, None, 0.25],
    "identical_to_baseline": None,
    "categories": {"docs & logs": {"num_requests": 2}},
}


def point(step: int, *, drafts: int = 2, drafted: int = 8, accepted: int = 4) -> StepPoint:
    return StepPoint(
        finished_at=float(step),
        total_seconds=0.5,
        num_requests=4,
        num_drafts=drafts,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        num_output_tokens=6,
        is_decoding=step % 3 > 0,
        is_whole=(None, True, False)[step % 3],
    )


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for the whole file: a fresh one costs a second or more. The folder's name has a blank on purpose."""
    return f"sqlite:///{tmp_path_factory.mktemp('a store')}/mlflow.db"


@pytest.fixture
def client(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


@pytest.fixture
def no_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PARENT_RUN_ENV, raising=False)


pytestmark = pytest.mark.usefixtures("no_parent")


def test_mlflow_gets_parameters_numbers_series_artifacts_and_tags(uri: str, client: Any, tmp_path: Path) -> None:
    outputs = tmp_path / "outputs.jsonl"
    outputs.write_text("{}\n")
    hydra = tmp_path / ".hydra"
    hydra.mkdir()
    (hydra / "config.yaml").write_text("seed: 0\n")
    with open_tracker(
        "mlflow", experiment_name="tests", tracking_uri=uri, run_name="one", tags={"method": "ngram"}
    ) as tracker:
        assert client.get_run(tracker.run_id).info.status == "RUNNING"
        tracker.log_params({"seed": 0, "method": {"method": "ngram", "model": None}})
        tracker.log_summary(SUMMARY)
        tracker.log_series([point(0, drafts=0, drafted=0, accepted=0), point(1)])
        tracker.log_artifacts([outputs, hydra])
    run = client.get_run(tracker.run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "one")
    assert run.data.params == {"seed": "0", "method.method": "ngram", "method.model": "None"}
    assert run.data.tags["method"] == "ngram"
    assert run.data.tags.get("git_sha") == git_sha()
    numbers = {key: value for key, value in run.data.metrics.items() if not key.startswith("step/")}
    assert numbers == {
        "num_speculative_tokens": 4,
        "acceptance_rate": 0.5,
        "mean_acceptance_length": 3,
        "output_tokens_per_second": 120.5,
        "whole_step_share": 0.75,
        "tpot_ms/median": 8.25,
        "acceptance_per_position/0": 0.75,
        "acceptance_per_position/2": 0.25,
        "categories/docs _ logs-3b1b7010/num_requests": 2,
    }
    rates = client.get_metric_history(tracker.run_id, "step/acceptance_rate")
    assert [(m.step, m.value) for m in rates] == [(1, 0.5)]  # step 0 had no draft, so no rate
    assert [m.step for m in client.get_metric_history(tracker.run_id, "step/num_requests")] == [0, 1]
    assert sorted(f.path for f in client.list_artifacts(tracker.run_id)) == [".hydra", "outputs.jsonl"]
    assert f"mlflow ui --backend-store-uri '{uri}'" == tracker.ui_command
    assert tracker.run_id in str(tracker.location)


def test_artifacts_lie_beside_the_database_wherever_the_run_was_started(uri: str, client: Any) -> None:
    with open_tracker("mlflow", tracking_uri=uri, experiment_name="a/b: c") as tracker:
        pass
    database = sqlite_path(uri)
    assert database is not None
    assert client.get_run(tracker.run_id).info.artifact_uri.startswith(str(database.parent / "mlruns" / "a_b__c"))


@pytest.mark.parametrize(
    ("error", "status"),
    [(RuntimeError("boom"), "FAILED"), (KeyboardInterrupt(), "KILLED"), (SystemExit(2), "FAILED")],
)
def test_a_run_that_did_not_finish_is_not_marked_finished(
    uri: str, client: Any, error: BaseException, status: str
) -> None:
    tracker = open_tracker("mlflow", experiment_name="tests", tracking_uri=uri)
    with pytest.raises(type(error)), tracker:
        tracker.log_summary(SUMMARY)
        raise error
    assert client.get_run(tracker.run_id).info.status == status


def test_leaving_with_exit_code_zero_is_finished() -> None:
    assert [status_of(SystemExit(code)) for code in (None, 0, 1, "message")] == [
        "FINISHED",
        "FINISHED",
        "FAILED",
        "FAILED",
    ]


def test_nothing_is_recorded_before_the_block_is_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_tracker("mlflow", experiment_name="tests", tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    open_tracker("jsonl", experiment_name="tests")
    assert list(tmp_path.iterdir()) == []


def test_a_long_series_and_many_parameters_fit_the_limits_of_one_call(uri: str, client: Any) -> None:
    """A server refuses a log_batch of more than 1000 metrics or 100 parameters; SQLite does not."""
    with open_tracker("mlflow", experiment_name="tests", tracking_uri=uri) as tracker:
        calls: list[tuple[int, int]] = []
        client_of_tracker: Any = vars(tracker)["_client"]
        log_batch: Callable[..., Any] = client_of_tracker.log_batch

        def counting(run_id: str, metrics: Any = (), params: Any = (), **kwargs: Any) -> Any:
            calls.append((len(metrics), len(params)))
            return log_batch(run_id, metrics=metrics, params=params, **kwargs)

        client_of_tracker.log_batch = counting
        tracker.log_params({f"key{i}": "v" * (7000 if i == 0 else 1) for i in range(150)})
        tracker.log_series([point(i) for i in range(300)])
        del client_of_tracker.log_batch
    assert calls == [(0, 100), (0, 50), (1000, 0), (400, 0)]
    run = client.get_run(tracker.run_id)
    assert len(run.data.params) == 150
    assert len(run.data.params["key0"]) == 6000


def test_children_of_a_sweep_are_compared_on_the_parent(uri: str, client: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tracking_uri": uri, "experiment_name": "sweep"}
    machine = {**dict.fromkeys(MACHINE), "device_name": "Some CPU", "torch": "2.13.0", "commit": git_sha()}
    ends = {"speedup_range": {"lowest": 1.5, "highest": 2.0}}
    fast = {
        **SUMMARY,
        **ends,
        "machine": machine,
        "speedup": 1.75,
        "identical_to_baseline": {"requests": 3, "identical": 2},
    }
    with start_sweep(params={"method": "none,ngram"}, run_name="parent", **options) as parent:
        assert os.environ[PARENT_RUN_ENV] == parent.run_id
        with open_tracker("mlflow", run_name="none", tags={"method": "none"}, **options) as child:
            child.log_summary({"num_speculative_tokens": 0, "speedup": 1.0})
        with pytest.raises(RuntimeError), open_tracker("mlflow", run_name="broken", **options):
            raise RuntimeError("boom")
        tags = {"method": "ngram", "device_name": "Some CPU", "torch": "2.13.0"}
        with open_tracker("mlflow", run_name="ngram k=4", tags=tags, **options) as child:
            child.log_summary(fast)
    assert PARENT_RUN_ENV not in os.environ
    with open_tracker("mlflow", **options):
        pass  # opened after the sweep, so not one of its runs
    assert client.get_run(child.run_id).data.tags["mlflow.parentRunId"] == parent.run_id
    run = client.get_run(parent.run_id)
    assert (run.info.status, run.data.params) == ("FINISHED", {"method": "none,ngram"})
    assert sorted(f.path for f in client.list_artifacts(parent.run_id)) == ["comparison.csv", "comparison.png"]
    table = client.download_artifacts(parent.run_id, "comparison.csv", str(tmp_path))
    with Path(table).open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["run_name"], row["status"], row["speedup"]) for row in rows] == [
        ("none", "FINISHED", "1.0"),
        ("broken", "FAILED", ""),
        ("ngram k=4", "FINISHED", "1.75"),
    ]
    row = parent.children()[2]
    assert row == comparison_row(fast, run_name="ngram k=4", status="FINISHED")
    assert (row["identical_to_baseline"], row["device_name"], row["commit"]) == ("2/3", "Some CPU", git_sha())


def test_a_comparison_shows_what_was_swept_and_which_runs_are_lossy(uri: str, tmp_path: Path) -> None:
    """MLflow's rows are read back from it, all others from the sweep's file; they are the same."""
    options: dict[str, Any] = {"experiment_name": "tests", "tracking_uri": uri}
    rule, k = "method.rejection_sample_method", "method.num_speculative_tokens"
    swept = {"method": "ngram", rule: "block,typical", k: "2,4"}
    with collecting_rows() as rows_of, start_sweep(params=swept, **options) as parent:
        for name, lossless in (("block", "distribution"), ("typical", False)):
            tags = {"method": "ngram", "lossless": str(lossless).lower()}
            params = {"method": {"method": "ngram", "rejection_sample_method": name}}
            with open_tracker("mlflow", run_name=name, tags=tags, **options) as child:
                child.log_params(params)
                child.log_summary({**SUMMARY, "lossless": lossless})
            add_row({**SUMMARY, "lossless": lossless, "machine": {"commit": git_sha()}}, params, name)
        rows = parent.children(tuple(swept))
        assert rows_of(tuple(swept)) == rows
    assert [(row[rule], row["lossless"]) for row in rows] == [("block", "distribution"), ("typical", False)]
    assert set(rows[0]) - set(parent.children()[0]) == {rule}  # the method and K have columns of their own
    assert [path.name for path in write_comparison(tmp_path, rows)] == ["comparison.csv", "comparison.png"]


def test_a_swept_group_tells_its_runs_apart() -> None:
    """A sweep over sampler=greedy,sampled compared runs of one name, and no column said which was which."""
    with collecting_rows() as rows_of:
        for sampler, seed in (("greedy", 0), ("sampled", 1)):
            add_row({}, {"sampler": sampler, "sampler.temperature": "0.5", "seed": seed}, "ngram")
        rows = rows_of(("sampler", "seed"))
    assert [(row["sampler"], row["seed"]) for row in rows] == [("greedy", "0"), ("sampled", "1")]
    assert [_label(row) for row in rows] == ["ngram, greedy, 0", "ngram, sampled, 1"]


def test_swept_values_are_told_as_they_are_written() -> None:
    """A sweep over speculative_token_tree=null,dynamic had the rows None and dynamic."""
    with collecting_rows() as rows_of:
        for params in ({"tree": None, "on": True}, {"tree": "dynamic", "on": False}, {"on": True}):
            add_row({}, params, "suffix")
        rows = rows_of(("tree", "on"))
    assert [(row["tree"], row["on"]) for row in rows] == [("null", "true"), ("dynamic", "false"), (None, "true")]
    assert [_label(row) for row in rows] == ["suffix, null, true", "suffix, dynamic, false", "suffix, -, true"]


@pytest.mark.parametrize(
    ("lossless", "label"),
    [("tokens", "ngram"), ("distribution", "ngram"), ("unguaranteed", "ngram, unguaranteed"), (False, "ngram, lossy")],
)
def test_the_picture_marks_a_run_that_does_not_keep_plain_decodings_text(lossless: Any, label: str) -> None:
    with collecting_rows() as rows_of:
        add_row({"lossless": lossless}, {}, "ngram")
        (row,) = rows_of(())
    assert _label(row) == label


def test_an_interrupted_sweep_is_killed_and_still_compares_what_ran(uri: str, client: Any) -> None:
    with pytest.raises(KeyboardInterrupt), start_sweep(params={}, experiment_name="tests", tracking_uri=uri) as parent:
        with open_tracker("mlflow", experiment_name="tests", tracking_uri=uri, tags={"method": "ngram"}) as child:
            child.log_summary(SUMMARY)
        raise KeyboardInterrupt
    assert PARENT_RUN_ENV not in os.environ
    assert client.get_run(parent.run_id).info.status == "KILLED"
    assert len(client.list_artifacts(parent.run_id)) == 2


def test_processes_may_open_a_fresh_database_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a lock, the migrations of MLflow 3.17 race: all fail, and the file stays broken for every later run.

    The same runs show that a parent reaches jobs in other processes, and that creating a database is silent.
    """
    code = """
import sys
from mlflow import MlflowClient
from runner.tracking import open_tracker
print("ready", flush=True)
sys.stdin.readline()
with open_tracker("mlflow", experiment_name="fresh") as tracker:
    tracker.log_summary({"speedup": 2.0})
print(tracker.run_id)
"""
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.setenv(PARENT_RUN_ENV, "0" * 32)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as job:
        from mlflow import MlflowClient

        assert job.stdout and job.stdout.readline() == "ready\n", job.communicate(timeout=120)
        capfd.readouterr()
        assert job.stdin
        job.stdin.write("go\n")
        job.stdin.flush()
        with open_tracker("mlflow", experiment_name="fresh") as tracker:
            tracker.log_summary({"speedup": 2.0})
        output, error = job.communicate(timeout=120)
    assert (job.returncode, error, capfd.readouterr()) == (0, "", ("", ""))
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    for run_id in (output.strip(), tracker.run_id):
        run = client.get_run(run_id)
        assert (run.info.status, run.data.tags["mlflow.parentRunId"]) == ("FINISHED", "0" * 32)


def test_an_interrupt_while_the_database_is_made_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It left tables half made, which no later start could open."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    path = tmp_path / "mlflow.db"
    store = {"tracking_uri": f"sqlite:///{path}", "experiment_name": "tests"}

    def interrupted(_: Any, uri: str, artifacts: str) -> None:
        made = sqlite_path(uri)
        assert made is not None
        with closing(sqlite3.connect(made)) as tables:
            tables.execute("CREATE TABLE latest_metrics (step INTEGER)")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SqlAlchemyStore, "__init__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            check_store("mlflow", **store)
    assert not path.exists()
    check_store("mlflow", **store)
    assert {own.name for own in tmp_path.iterdir()} == {"mlflow.db", "mlflow.db.lock"}


@pytest.mark.parametrize("reason", ["duplicate column name: step", "table latest_metrics already exists"])
def test_a_database_that_was_left_half_made_is_to_be_deleted(tmp_path: Path, reason: str) -> None:
    path = tmp_path / "mlflow.db"
    with (
        pytest.raises(UserError, match=rf"{reason}.*\n.*half made.*: delete {path}, or run with tracking=jsonl"),
        store_errors(f"sqlite:///{path}"),
    ):
        raise OperationalError("ALTER TABLE ...", {}, Exception(reason))


def test_the_default_store_is_a_file_here_unless_the_environment_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert resolve_tracking_uri(None) == f"sqlite:///{tmp_path}/mlflow.db"
    assert sqlite_path("sqlite:///mlflow.db?timeout=5") == tmp_path / "mlflow.db"
    assert sqlite_path("http://server:5000") is None
    assert sqlite_path("sqlite:///:memory:") is None and sqlite_path("sqlite:///file:x?mode=memory&uri=true") is None
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    assert resolve_tracking_uri(None) == "http://server:5000"
    assert resolve_tracking_uri("sqlite:///x.db") == "sqlite:///x.db"


@pytest.mark.skipif(sys.platform == "win32", reason="names hold no question marks there")
def test_the_default_store_works_in_a_directory_whose_name_means_something_in_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database was looked for in another directory, or under half its name, and artifacts went to "x y"."""
    from mlflow import MlflowClient

    directory = tmp_path / "q?x%20y#z"
    directory.mkdir()
    monkeypatch.chdir(directory)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (directory / "notes.txt").write_text("kept")
    with open_tracker("mlflow", experiment_name="tests") as tracker:
        tracker.log_artifacts([directory / "notes.txt"])
    address = resolve_tracking_uri(None)
    assert sqlite_path(address) == directory / "mlflow.db" and (directory / "mlflow.db").is_file()
    assert [file.path for file in MlflowClient(tracking_uri=address).list_artifacts(tracker.run_id)] == ["notes.txt"]
    assert (directory / "mlruns" / "tests" / str(tracker.run_id) / "artifacts" / "notes.txt").is_file()
    assert list(tmp_path.iterdir()) == [directory]


def test_a_directory_that_no_address_leads_to_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As SQLAlchemy before 2.1 has it, which reads no escapes: a question mark ends the name."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(sqlalchemy, "make_url", lambda uri: SimpleNamespace(database=uri.partition(":///")[2]))
    (tmp_path / "a%b").mkdir()
    monkeypatch.chdir(tmp_path / "a%b")
    with pytest.raises(UserError, match=r"tracking_uri must be given here: .*a%b.mlflow\.db'; set it to .*=jsonl"):
        check_store("mlflow", tracking_uri=None, experiment_name="tests")


@pytest.mark.skipif(sys.platform != "linux", reason="names are text there")
def test_a_directory_whose_name_is_no_text_has_no_default_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a UnicodeEncodeError's traceback."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "caf\udce9").mkdir()
    monkeypatch.chdir(tmp_path / "caf\udce9")
    with pytest.raises(UserError, match=r"tracking_uri must be .*surrogates not allowed\n.*tracking=jsonl"):
        check_store("mlflow", tracking_uri=None, experiment_name="tests")


@pytest.mark.parametrize(("name", "got"), [("", "0: ''"), ("x" * 501, "501: 'x+'")])
def test_a_name_that_no_experiment_can_have_is_not_blamed_on_the_store(name: str, got: str, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/mlflow.db"
    with pytest.raises(
        UserError, match=f"^experiment_name must have 1 to 500 characters, got {got}; set experiment_na"
    ):
        check_store("mlflow", tracking_uri=store, experiment_name=name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["x" * 300, "\u6570" * 500, "..", ".", "/", "\u6570\u5b66"])
def test_an_experiment_of_any_name_has_a_directory_for_its_artifacts(name: str, uri: str, tmp_path: Path) -> None:
    """Long ones passed the check, and failed behind the measurement: File name too long."""
    (tmp_path / "notes.txt").write_text("kept")
    with open_tracker("mlflow", experiment_name=name, tracking_uri=uri) as tracker:
        tracker.log_artifacts([tmp_path / "notes.txt"])
    database = sqlite_path(uri)
    assert database is not None
    (artifacts,) = (database.parent / "mlruns").glob(f"*/{tracker.run_id}/artifacts")
    assert [file.name for file in artifacts.iterdir()] == ["notes.txt"]


def test_long_names_that_begin_alike_have_directories_of_their_own() -> None:
    assert as_folder("x" * 300) != as_folder("x" * 301)
    assert max(len(as_folder(name * 200).encode()) for name in ("x", "\u6570", "a\u6570")) <= 120


def test_the_reason_of_a_store_is_what_the_database_said(tmp_path: Path) -> None:
    """Of a full disk the first line was SQLAlchemy's: "raised as a result of Query-invoked autoflush"."""
    from mlflow.exceptions import MlflowException

    advice = "(raised as a result of Query-invoked autoflush; consider using a session.no_autoflush block)\n..."
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    with pytest.raises(UserError, match=r"mlflow\.db': database or disk is full\nUse "), store_errors(uri):
        try:
            raise OperationalError("INSERT ...", {}, sqlite3.OperationalError("database or disk is full"))
        except OperationalError as error:
            raise MlflowException(advice) from error


@pytest.mark.parametrize("bad", ["./mlruns", "foo://bar", "http://127.0.0.1:9", "sqlite:////proc/no/mlflow.db"])
def test_a_store_that_cannot_be_used_is_one_clear_message(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with (
        pytest.raises(UserError, match=r"tracking_uri must be .* got '.*") as caught,
        open_tracker("mlflow", experiment_name="tests", tracking_uri=bad),
    ):
        pass
    assert bad in str(caught.value)
    assert "tracking=jsonl" in str(caught.value)


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.db"
    path.write_text("not a database, but somebody's notes\n" * 100)
    with (
        pytest.raises(UserError, match="file is not a database"),
        open_tracker("mlflow", experiment_name="tests", tracking_uri=f"sqlite:///{path}"),
    ):
        pass
    assert path.read_text().startswith("not a database")


def test_a_directory_in_place_of_the_database_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow tried it eight times, for 100 seconds, and printed a screen each time."""
    (tmp_path / "mlflow.db").mkdir()
    monkeypatch.setitem(sys.modules, "mlflow", None)  # nothing is left to MLflow
    with pytest.raises(UserError, match=r"tracking_uri must be .*mlflow\.db': .*[Dd]irectory.*\n.*tracking=jsonl"):
        check_store("mlflow", tracking_uri=f"sqlite:///{tmp_path}/mlflow.db", experiment_name="tests")
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


def test_a_deleted_experiment_is_refused_with_the_remedy(uri: str, client: Any) -> None:
    with open_tracker("mlflow", tracking_uri=uri, experiment_name="old"):
        pass
    client.delete_experiment(client.get_experiment_by_name("old").experiment_id)
    with (
        pytest.raises(UserError, match="mlflow experiments restore"),
        open_tracker("mlflow", tracking_uri=uri, experiment_name="old"),
    ):
        pass


def test_without_mlflow_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with (
        pytest.raises(UserError, match="pip install mlflow, or run with tracking=jsonl"),
        open_tracker("mlflow", experiment_name="tests", tracking_uri=f"sqlite:///{tmp_path}/x.db"),
    ):
        pass


def test_only_tracking_to_mlflow_imports_mlflow(tmp_path: Path) -> None:
    code = """
import sys
from runner.tracking import open_tracker
for tracking in ("none", "jsonl"):
    with open_tracker(tracking, experiment_name="tests") as tracker:
        tracker.log_params({}); tracker.log_summary({}); tracker.log_series([]); tracker.log_artifacts([])
open_tracker("mlflow", experiment_name="tests")
sys.exit("mlflow" in sys.modules or "torch" in sys.modules or "matplotlib" in sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=False).returncode == 0


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "runs" / "runs.jsonl").read_text().splitlines()]


def test_jsonl_appends_one_line_a_run_whatever_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters had flat keys in runs, and were nested in tunings and trainings."""
    monkeypatch.chdir(tmp_path)
    with open_tracker("jsonl", experiment_name="tests", run_name="good", tags={"method": "ngram"}) as tracker:
        tracker.log_params({"seed": 0, "method": {"model": None, "options": {}}, "sampler.stop": ["a"]})
        tracker.log_summary(SUMMARY)
        tracker.log_series([point(0)])
        tracker.log_artifacts([tmp_path / "metrics.json"])
    with pytest.raises(KeyboardInterrupt), open_tracker("jsonl", experiment_name="tests"):
        raise KeyboardInterrupt
    good, killed = read_lines(tmp_path)
    assert (good["run_name"], good["status"], good["parent_run_id"]) == ("good", "FINISHED", None)
    assert good["params"] == {"seed": 0, "method.model": None, "method.options": {}, "sampler.stop": ["a"]}
    assert good["summary"] == SUMMARY
    assert good["tags"]["method"] == "ngram"
    assert good["artifacts"] == [str(tmp_path / "metrics.json")]
    assert (killed["status"], killed["summary"]) == ("KILLED", {})


def test_the_lines_of_a_sweep_share_a_parent_that_no_other_run_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their parent_run_id was null, so that nothing told the points of one sweep from those of another."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with collecting_rows():
            for name in ("first", "second"):
                with open_tracker("jsonl", experiment_name="tests", run_name=name):
                    pass
    with open_tracker("jsonl", experiment_name="tests"):
        pass
    parents = [line["parent_run_id"] for line in read_lines(tmp_path)]
    assert parents[0] == parents[1] != parents[2] == parents[3] and parents[4] is None
    assert all(len(parent) == 32 for parent in parents[:4])


@pytest.mark.skipif(sys.platform == "win32", reason="no limit stands in for a full disk there")
def test_a_line_that_a_full_disk_has_no_room_for_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of it was written, the run ended well, and the next line was appended to the half: both were lost."""
    import resource

    monkeypatch.chdir(tmp_path)
    with open_tracker("jsonl", experiment_name="tests", run_name="first"):
        pass
    before, limits = (tmp_path / RUNS_FILE).read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    full = rf"{RUNS_FILE} cannot be written \(File too large\); make room there"
    try:
        with pytest.raises(UserError, match=full), open_tracker("jsonl", experiment_name="tests"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limits[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / RUNS_FILE).read_bytes() == before


def test_a_line_does_not_go_on_where_another_broke_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / RUNS_FILE).write_bytes(b'{"run_name": "hal')
    with open_tracker("jsonl", experiment_name="tests", run_name="whole"):
        pass
    half, whole = (tmp_path / RUNS_FILE).read_text().splitlines()
    assert (half, json.loads(whole)["run_name"]) == ('{"run_name": "hal', "whole")


def test_tracking_none_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with open_tracker("none", experiment_name="tests") as tracker:
        tracker.log_summary(SUMMARY)
    assert list(tmp_path.iterdir()) == []


def test_unknown_tracking_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of mlflow, jsonl, none, got 'wandb'"):
        open_tracker("wandb", experiment_name="tests")


def test_flat_metrics_keep_finite_numbers_only() -> None:
    nested = {
        "a": {"b": 1, "c": None},
        "d": [0.5, None],
        "e": float("nan"),
        "f": True,
        "g": "text",
        "h@i/j": 2,
        "..": 3,
    }
    assert flat_metrics(nested) == {"a/b": 1.0, "d/0": 0.5, "h_i_j-d9048f09": 2.0, "__-5ec1f7e7": 3.0}


def test_categories_that_keys_cannot_hold_stay_apart() -> None:
    """Of names in other scripts, and of a/b and a_b, the last was recorded for all; long ones failed a measured run."""
    categories = ["a_b", "a/b", "\u6570\u5b66", "\u7f16\u7a0b", "", "\ud800", "x" * 300, "x" * 301]
    summary = {"categories": {name: {"conditional_acceptance_per_position": [0.5] * 128} for name in categories}}
    keys = list(flat_metrics(summary))
    assert len(set(keys)) == len(keys) == 128 * len(categories)
    assert keys[0] == "categories/a_b/conditional_acceptance_per_position/0"
    assert max(map(len, keys)) <= MAX_KEY_LENGTH


def test_parameters_of_long_names_keep_to_the_same_limit_though_they_are_flattened_twice() -> None:
    flat = flat_values({"options": {"y" * 300: 1, "y" * 301: 2, "plain": 3}})
    assert max(map(len, flat)) == MAX_KEY_LENGTH and len(flat) == 3 and flat["options.plain"] == 3
    assert flat_params(flat) == {key: str(value) for key, value in flat.items()}


@pytest.mark.parametrize("category", ["\u6570" * 300, "a|b" * 100])
def test_mlflow_takes_a_category_of_any_length_and_script(category: str, uri: str, client: Any) -> None:
    with open_tracker("mlflow", experiment_name="tests", tracking_uri=uri) as tracker:
        tracker.log_summary({"categories": {category: {"num_requests": 2}}})
    assert list(client.get_run(tracker.run_id).data.metrics.values()) == [2.0]


def test_flat_params_keep_every_value_as_text() -> None:
    nested = {"method": {"model": None, "rates": [0.5, 1]}, "hf_config": {}, "stop": [], "seed": 0, "on": True}
    assert flat_params(nested) == {
        "method.model": "None",
        "method.rates": "[0.5, 1]",
        "hf_config": "{}",
        "stop": "[]",
        "seed": "0",
        "on": "True",
    }
    assert flat_params({}) == {}


@given(st.integers(0, 60), st.integers(1, 20))
def test_buckets_of_a_series_keep_the_sums_of_its_steps(num_steps: int, max_points: int) -> None:
    steps = [point(i, drafts=1, drafted=4, accepted=i % 5) for i in range(num_steps)]
    series = step_series(steps, max_points)
    assert len(series) <= max_points
    ends = [p.step + 1 for p in series]
    assert ends[-1:] == ([num_steps] if num_steps else [])
    for bucket, start, end in zip(series, [0, *ends], ends, strict=False):
        accepted = sum(step.num_accepted_tokens for step in steps[start:end])
        assert bucket.values["mean_acceptance_length"] == pytest.approx(1 + accepted / (end - start))
        assert bucket.values["acceptance_rate"] == pytest.approx(accepted / (4 * (end - start)))
        assert bucket.values["output_tokens_per_second"] == pytest.approx(12)
        forms = [step.is_whole for step in steps[start:end] if step.is_whole is not None]
        assert bucket.values.get("whole_step_share") == (sum(forms) / len(forms) if forms else None)
        assert bucket.finished_at == end - 1


def test_the_comparison_is_drawn_for_runs_without_numbers_too(tmp_path: Path) -> None:
    repeated = {**SUMMARY, "speedup": 1.5, "speedup_range": {"lowest": 1.25, "highest": 2.0}}
    rows = [
        comparison_row({"method": "none"}, run_name=None, status="FAILED"),
        comparison_row(repeated, run_name="three times", status="FINISHED"),
    ]
    assert _errors(rows, "speedup") == ([0.0, 0.25], [0.0, 0.5])
    assert [path.name for path in write_comparison(tmp_path, rows)] == ["comparison.csv", "comparison.png"]
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_comparison_is_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    rows = [comparison_row(SUMMARY, run_name="a", status="FINISHED")]
    assert [path.name for path in write_comparison(tmp_path, rows)] == ["comparison.csv"]


def test_every_tracker_has_a_status_and_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    none: Tracker = open_tracker("none", experiment_name="tests")
    jsonl: Tracker = open_tracker("jsonl", experiment_name="tests")
    with none, jsonl:
        assert (none.run_id, none.location, none.ui_command) == (None, None, None)
        assert jsonl.location == str(tmp_path / "runs" / "runs.jsonl")
