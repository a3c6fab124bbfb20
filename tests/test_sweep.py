"""Sweeps: all points are checked before the first runs, and the same run is not run twice."""

from __future__ import annotations

import json
import pickle
import re
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import runner.assembly
import runner.tracking
from runner.__main__ import main
from runner.cli.compose import Composer
from runner.cli.sweep import BASIC_SWEEPER, SweepError, hydra_node, read_sweep
from runner.config import ConfigError, Problem, SpeculativeConfig
from runner.config.method_union import METHODS
from runner.earlier_points import EarlierPoints
from runner.engine.errors import UserError
from runner.metrics import MetricsCollector
from runner.ranks.ranks import Ranks
from runner.tracking.sweep_file import add_row
from runner.tracking.tracker import comparison_row
from tests.command_line import CommandLine, Ending


def points(ending: Ending) -> list[tuple[str, int]]:
    return [(config.method.method, config.method.num_speculative_tokens) for config, _ in ending.jobs]


def test_a_sweep_runs_the_cross_product_each_in_its_own_directory(cli: CommandLine) -> None:
    ending = cli("-m", "method=ngram,draft_model", "method.num_speculative_tokens=2,4", "tracking=none")
    assert ending.status == 0, ending.err
    assert points(ending) == [("ngram", 2), ("ngram", 4), ("draft_model", 2), ("draft_model", 4)]
    assert len({output_dir for _, output_dir in ending.jobs}) == 4
    assert all(output_dir.is_dir() for _, output_dir in ending.jobs)


@pytest.mark.parametrize(
    ("swept", "key"),
    [
        ("method=eagle,mtp", "method.speculative_token_tree=dynamic"),
        ("method=ngram,ngram_gpu", "method.prompt_lookup_max=3"),
    ],
)
def test_a_key_that_the_default_option_of_a_swept_group_lacks_is_set_in_every_point(
    swept: str, key: str, cli: CommandLine
) -> None:
    """Hydra looked for it in the default option too, and said "Could not override"."""
    ending = cli("-m", swept, key, "tracking=none")
    assert ending.status == 0, ending.err
    name, _, value = key.removeprefix("method.").partition("=")
    assert [str(getattr(config.method, name)) for config, _ in ending.jobs] == [value, value]


def test_a_sweep_goes_over_the_options_of_a_users_own_class(cli: CommandLine) -> None:
    own = ["method=custom_class", "method.model=a.B", "method.options={y: null}", "method.options.x=1,[2]"]
    ending = cli("-m", *own, "tracking=none")
    assert ending.status == 0, ending.err
    options = [config.method.model_dump()["options"] for config, _ in ending.jobs]
    assert options == [{"y": None, "x": 1}, {"y": None, "x": [2]}]


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_a_swept_key_that_hydra_adds_tells_the_points_apart(cli: CommandLine, prefix: str) -> None:
    """It was looked for with its ++, under which no run is recorded: the rows of two points were the same."""

    def record(config: SpeculativeConfig) -> None:
        add_row({"method": "custom_class"}, config.model_dump(mode="json"), "r")
        raise UserError("failed")

    cli.on_job = record
    ending = cli("-m", "method=custom_class", "method.model=a.B", "tracking=none", f"{prefix}method.options.x=11,12")
    table = [line.split()[2] for line in ending.out.splitlines() if line.startswith((" custom_class", " method"))]
    assert table == ["x", "11", "12"], ending.out
    named = [line.strip().lstrip("+") for line in ending.err.splitlines() if "method.options" in line]
    assert named == ["method.options.x=11", "method.options.x=12"], ending.err


def test_one_invalid_point_stops_the_sweep_before_anything_runs(cli: CommandLine) -> None:
    ending = cli("-m", "method=ngram,draft_model", "method.num_speculative_tokens=2,4", "method.prompt_lookup_min=4")
    assert (ending.status, ending.jobs, ending.out) == (2, [], "")
    assert ending.err.splitlines()[0] == "error: 2 of 4 points of this sweep are invalid; nothing was run"
    assert list(Path.cwd().iterdir()) == []


def test_a_missing_workload_stops_the_sweep_before_anything_runs(cli: CommandLine, tmp_path: Path) -> None:
    """It used to show behind the points that had run."""
    there = tmp_path / "there.jsonl"
    there.write_text('{"prompt": "a"}\n')
    ending = cli("-m", "workload=jsonl", f"workload.path={there},{tmp_path / 'missing.jsonl'}", "method=none,ngram")
    assert ending.status == 2 and not ending.jobs
    assert ending.err.splitlines()[0] == "error: 2 of 4 points of this sweep are invalid; nothing was run"
    assert "missing.jsonl' it does not exist" in " ".join(ending.err.split())


@pytest.mark.parametrize("method", ["suffix", "suffix_recycling", "hybrid"])
def test_missing_earlier_responses_stop_the_sweep_before_anything_runs(cli: CommandLine, method: str) -> None:
    """The points without them ran first; what else is missing is told in the same screen."""
    missing = ["method.suffix_decoding_corpus=no.jsonl,null", "workload=jsonl", "workload.path=none.jsonl"]
    ending = cli("-m", f"method={method}", *missing, "tracking=none")
    assert (ending.status, ending.jobs) == (2, [])
    assert "method.suffix_decoding_corpus must be a .jsonl file, got 'no.jsonl'\n        it does not ex" in ending.err
    assert ending.err.count("workload.path must be a .jsonl file, got 'none.jsonl'") == 2


@pytest.mark.parametrize("subdir", ["same", "x/../same", "${now:%H-%M-%S-%f}", "${method.method}"])
def test_points_that_would_write_over_each_others_files_are_no_sweep(cli: CommandLine, subdir: str) -> None:
    """All ran, and the files of the last alone were left. A time is told once where the directory above has it too."""
    ending = cli("-m", "method=ngram,suffix,ngram_gpu", "seed=0,1", "tracking=none", f"hydra.sweep.subdir={subdir}")
    assert (ending.status, ending.jobs, ending.out) == (2, [], "")
    assert "hydra.sweep.subdir must give every point of a sweep a directory of its own, got" in ending.err
    assert f"is that of {2 if 'method' in subdir else 6} points; leave it out, or name the job in it: ${{" in ending.err
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    "subdir",
    ["a-${hydra.job.num}", "${hydra:job.num}", "${now:%f}", "${hydra.job.override_dirname}", "x${seed}"],
)
def test_points_with_directories_of_their_own_are_a_sweep_however_these_are_named(
    cli: CommandLine, subdir: str
) -> None:
    ending = cli("-m", "method=ngram", "seed=0,1", "tracking=none", f"hydra.sweep.subdir={subdir}")
    assert ending.status == 0, ending.err
    assert len({directory for _, directory in ending.jobs}) == 2


def test_the_screen_of_a_sweep_names_the_points_and_their_problems(cli: CommandLine) -> None:
    ending = cli("-m", "method=none,ngrm", "method.num_speculative_tokens=2,-1", "tracking=none")
    assert ending.err.splitlines() == [
        "error: 3 of 4 points of this sweep are invalid; nothing was run",
        "",
        "  method=none method.num_speculative_tokens=-1 tracking=none",
        "    method.num_speculative_tokens must be >= 0, got -1",
        "        tokens drafted per request and step at most, in [0, 128]; 0: none",
        "",
        "  method=ngrm method.num_speculative_tokens=2 tracking=none   (and 1 more)",
        f"    method must be one of {', '.join(sorted(METHODS))}, got 'ngrm'",
        "        did you mean 'ngram'?",
    ]


def test_a_single_invalid_point_is_spoken_of_in_the_singular(cli: CommandLine) -> None:
    ending = cli("-m", "method.num_speculative_tokens=2,4,8,-1")
    assert ending.err.startswith("error: 1 of 4 points of this sweep is invalid; nothing was run\n")


def test_none_runs_once_whatever_the_common_keys_are(cli: CommandLine) -> None:
    ending = cli("-m", "method=none,ngram", "method.num_speculative_tokens=2,4,8", "tracking=none")
    assert points(ending) == [("none", 2), ("ngram", 2), ("ngram", 4), ("ngram", 8)]
    assert ending.out.startswith("2 points are the same runs as earlier ones and are left out: method=none ")


def test_batches_of_a_sweep_hold_the_distinct_points_only(cli: CommandLine) -> None:
    ending = cli(
        "-m",
        "method=none,ngram",
        "method.num_speculative_tokens=2,4",
        "tracking=none",
        "hydra.sweeper.max_batch_size=2",
    )
    assert points(ending) == [("none", 2), ("ngram", 2), ("ngram", 4)]


def test_a_later_sweep_has_its_own_points(cli: CommandLine) -> None:
    """The sweeper is told the points of one sweep; it must not keep them."""
    cli("-m", "method=none,ngram", "tracking=none")
    cli.jobs.clear()
    assert points(cli("-m", "method.num_speculative_tokens=3", "tracking=none")) == [("draft_model", 3)]


def test_an_experiment_brings_its_sweep_along(cli: CommandLine) -> None:
    ending = cli("experiment=compare_methods", "tracking=none")
    swept = ("ngram", "suffix", "token_recycling", "suffix_recycling", "draft_model", "hybrid")
    expected = [
        ("none", 2),
        *[(method, k) for method in swept for k in (2, 4, 8)],
    ]
    assert points(ending) == expected
    assert all(config.baseline for config, _ in ending.jobs), "that of none, the first one"


def test_the_command_line_overrides_what_an_experiment_sweeps(cli: CommandLine) -> None:
    ending = cli("experiment=compare_methods", "tracking=none", "method=ngram", "method.num_speculative_tokens=1,3")
    assert points(ending) == [("ngram", 1), ("ngram", 3)]


def test_every_rule_meets_every_way_to_draft_that_it_takes_once(cli: CommandLine) -> None:
    """At one temperature, for composing a point takes a while; the experiment has three of them."""
    ending = cli("experiment=verification_rules", "tracking=none", "sampler.temperature=0.7")
    assert ending.status == 0, ending.err
    cells = [
        (config.method.rejection_sample_method, config.method.draft_sample_method, config.sampler.temperature)
        for config, _ in ending.jobs
    ]
    assert len(set(cells)) == len(cells)
    assert {cell[2] for cell in cells} == {0.7}
    experiment = (files("conf") / "experiment" / "verification_rules.yaml").read_text()
    assert "sampler.temperature: 0.0,0.7,1.0\n" in experiment
    assert {cell[:2] for cell in cells} == {
        *((rule, drafting) for rule in ("strict", "typical") for drafting in ("coupled", "probabilistic", "greedy")),
        *((rule, drafting) for rule in ("probabilistic", "block") for drafting in ("probabilistic", "greedy")),
    }


def test_synthetic_acceptance_is_swept_at_set_rates(cli: CommandLine) -> None:
    ending = cli("experiment=synthetic_acceptance", "tracking=none", "method.num_speculative_tokens=4")
    rates = [config.method.synthetic_conditional_rates() for config, _ in ending.jobs]
    assert rates == [pytest.approx([1, 0.6, 0, 0]), pytest.approx([1, 1, 0.4, 0]), pytest.approx([1, 1, 1, 0.2])]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["seed=interval(0,1)"], "does not support sweep type"),
        (["hydra/launcher=nope"], "hydra/launcher must be one of"),
    ],
)
def test_a_sweep_that_cannot_be_expanded_is_refused(cli: CommandLine, argv: list[str], text: str) -> None:
    ending = cli("-m", *argv)
    assert (ending.status, ending.jobs) == (2, [])
    assert text in ending.err
    assert "Traceback" not in ending.err


def test_points_that_would_be_recorded_apart_are_no_sweep(cli: CommandLine, tmp_path: Path) -> None:
    """Those of another experiment than the first point's were missing in the table, which said "1 of 2 points ran"."""
    ending = cli("-m", "experiment_name=a,b", "tracking=mlflow,none")
    assert (ending.status, ending.jobs, ending.out) == (2, [], "")
    rule = "must be the same in every point of a sweep, which is one comparison"
    assert ending.err.splitlines()[2:] == [
        f"  tracking {rule}, got ['mlflow', 'none']",
        "      start a sweep for each",
        f"  experiment_name {rule}, got ['a', 'b']",
        "      start a sweep for each",
    ]
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    for name in "ab":
        text = f"# @package _global_\ntracking_uri: sqlite:///{name}.db\n"
        (tmp_path / "own" / "experiment" / f"{name}.yaml").write_text(text)
    ending = cli("-m", "--config-dir", "own", "experiment=a,b")
    assert ending.jobs == [] and f"tracking_uri {rule}, got ['sqlite:///a.db', 'sqlite:///b.db']" in ending.err


def test_a_point_that_fails_leaves_the_others_running_and_fails_the_sweep(cli: CommandLine) -> None:
    def fail(config: SpeculativeConfig) -> None:
        if config.method.method == "ngram":
            raise UserError("model.model must fit the device's memory")

    cli.on_job = fail
    ending = cli("-m", "method=ngram,none", "tracking=none")
    assert points(ending) == [("ngram", 4), ("none", 4)]
    assert ending.status == 2
    assert ending.err.count("error: model.model must fit the device's memory") == 1
    assert "Traceback" not in ending.err and "Error executing job" not in ending.err
    last = ["error: 1 of 2 points failed", "", "  method=ngram", "      model.model must fit the device's memory"]
    assert ending.err.splitlines()[-4:] == last


@pytest.mark.parametrize("batches", [[], ["hydra.sweeper.max_batch_size=1"]])
def test_every_point_that_fails_is_shown_and_a_bug_decides_the_status(cli: CommandLine, batches: list[str]) -> None:
    """Hydra raised the first failure alone: a bug behind a user's error was shown nowhere, and its status lost.

    In batches the points behind the one with a failure were not even run.
    """

    def fail(config: SpeculativeConfig) -> None:
        if config.seed == 0:
            raise UserError("model.model must fit the device's memory")
        if config.seed < 3:
            raise ZeroDivisionError(f"a bug at {config.seed}")

    cli.on_job = fail
    ending = cli("-m", "seed=0,1,2,3", "method=ngram", "tracking=none", *batches)
    assert [config.seed for config, _ in ending.jobs] == [0, 1, 2, 3]
    assert ending.status == 1
    assert ending.err.count("Traceback") == 2 and "Error executing job" not in ending.err
    assert ending.err.index("Traceback") < ending.err.index("a bug at 1") < ending.err.index("a bug at 2")
    assert ending.err.splitlines()[-10:] == [
        "error: 3 of 4 points failed",
        "",
        "  seed=0",
        "      model.model must fit the device's memory",
        "",
        "  seed=1",
        "      ZeroDivisionError: a bug at 1",
        "",
        "  seed=2",
        "      ZeroDivisionError: a bug at 2",
    ]


def test_an_mlflow_sweep_runs_inside_one_parent_run(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    parents: list[dict[str, Any]] = []
    is_open = []

    @contextmanager
    def start_sweep(**options: Any) -> Iterator[Any]:
        parents.append(options)
        is_open.append(True)
        row = comparison_row({"method": "ngram", "num_speculative_tokens": 2}, run_name="r", status="FINISHED")
        yield types.SimpleNamespace(children=lambda params: [row], location="at home", ui_command="mlflow ui")
        is_open.clear()

    def check(_: SpeculativeConfig) -> None:
        assert is_open

    monkeypatch.setattr(runner.tracking, "start_sweep", start_sweep)
    cli.on_job = check
    ending = cli("-m", "method=ngram,none", "method.num_speculative_tokens=2", "experiment_name=e", "run_name=r")
    assert ending.status == 0, ending.err
    assert len(ending.jobs) == 2
    assert ending.out.splitlines()[-3:] == [" 1 of 2 points are recorded", "sweep at home", "show  mlflow ui"]
    assert parents == [
        {
            "params": {"method": "ngram,none"},
            "tracking_uri": None,
            "experiment_name": "e",
            "run_name": "r",
        }
    ]


def test_a_job_is_told_how_its_point_was_written(cli: CommandLine) -> None:
    swept = """speculative_config={"method": "ngram"},{"method": "ngram", "prompt_lookup_max": 3}"""
    cli("-m", "sampler=greedy,sampled", swept, "tracking=none")
    groups = {"model": "tiny", "hardware": "auto", "workload": "demo"}
    assert len(cli.written) == 4 and all(written.items() >= groups.items() for written in cli.written)
    assert [written["sampler"] for written in cli.written] == ["greedy", "greedy", "sampled", "sampled"]
    assert "prompt_lookup_max" in cli.written[1]["speculative_config"]
    assert "method" not in cli.written[0], "the configuration names it, also where a speculative_config does"


def test_an_invalid_sweep_opens_no_parent_run(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.tracking, "start_sweep", None)  # calling it would be a TypeError
    assert cli("-m", "method=ngram,ngrm").status == 2


def test_points_are_left_to_a_sweeper_that_chooses_them_while_it_runs() -> None:
    hydra = OmegaConf.create({"sweeper": {"_target_": "hydra_plugins.optuna.OptunaSweeper", "params": None}})
    with Composer() as composer:
        assert read_sweep(composer, ["seed=1,2"], hydra) is None


def test_the_sweeper_whose_points_we_set_is_hydras_default() -> None:
    with Composer() as composer:
        assert hydra_node(composer, ["method=ngram,none"]).sweeper["_target_"] == BASIC_SWEEPER


def test_a_sweep_error_survives_the_trip_between_processes() -> None:
    error = SweepError(3, [(("seed=-1",), ConfigError([Problem(name="seed", rule="must be >= 0", value=-1)]))])
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(error).startswith("1 of 3 points of this sweep is invalid")


def test_points_of_a_sweep_share_the_target_and_one_baseline_and_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each loaded the target anew and had a baseline of its own, so that they were ranked by how these differed."""
    monkeypatch.chdir(tmp_path)
    loaded = []
    load_target = runner.assembly.load_target
    monkeypatch.setattr(
        runner.assembly, "load_target", lambda config, shard: loaded.append(config) or load_target(config, shard)
    )
    arguments = ["-m", "method=none,ngram", "method.num_speculative_tokens=2", "tracking=jsonl"]
    assert main([*arguments, "workload.limit=1", "sampler.max_tokens=4", "hardware.num_gpu_blocks_override=320"]) == 0
    printed = capsys.readouterr()
    lines = [line for line in printed.out.splitlines() if line.strip()]
    points, table = lines[:-7], [line.split() for line in lines[-7:]]
    assert table[0][-3:] == ["speed-up", "whole", "identical"], table
    assert [line[0] for line in table[2:]] == ["none", "ngram", "*", "on", "sweep"], table
    none, ngram = (json.loads(path.read_text()) for path in sorted(tmp_path.rglob("metrics.json")))
    assert len(loaded) == 1 and "plain decoding" not in printed.err
    assert ngram["baseline"]["tpot_ms"] == none["tpot_ms"]
    assert ngram["baseline"]["measured_in"] == "method=none"
    of_sweep, of_time = ngram["notes"]
    assert of_sweep == "plain decoding was measured in an earlier point, method=none"
    assert re.fullmatch(r"a pass took 0\.\d\d s only, so times .* mean little; add prompts, or .*", of_time)
    assert ngram["identical_to_baseline"] == {"requests": 1, "identical": 1}
    of_points = [line for line in points if "HYDRA" not in line]
    heads = [line.partition(" ")[0] for line in of_points]
    assert heads == ["none:", "note:", "files", "ngram,", "note:", "note:", "files"]
    for line, point in ((of_points[2], none), (of_points[-1], ngram)):
        assert json.loads((Path(line.removeprefix("files ")) / "metrics.json").read_text()) == point

    # Every run had a runs.jsonl of its own, with one line.
    arguments = ["method=none", "tracking=jsonl", "workload.limit=1", "sampler.max_tokens=4"]
    assert main([*arguments, "hardware.num_gpu_blocks_override=320"]) == 0
    assert "─ none ─" in capsys.readouterr().out, "a run by itself has its whole summary"
    (runs,) = tmp_path.rglob("runs.jsonl")
    assert runs == tmp_path / "runs" / "runs.jsonl"
    lines = [json.loads(line) for line in runs.read_text().splitlines()]
    assert [line["params"]["method.method"] for line in lines] == ["none", "ngram", "none"]
    assert lines[0]["parent_run_id"] == lines[1]["parent_run_id"] is not None and lines[2]["parent_run_id"] is None


def test_a_note_is_told_again_where_it_says_something_else() -> None:
    earlier, waited = EarlierPoints(), "a thread waited for a core {}% of the time"
    lowered = "num_speculative_tokens={} is more than what is drafted"
    assert earlier.untold([waited.format(7), lowered.format(8)]) == [waited.format(7), lowered.format(8)]
    again = [waited.format(26), "a pass took 0.37 s only", lowered.format(8), lowered.format(16)]
    assert earlier.untold(again) == ["a pass took 0.37 s only", lowered.format(16)]
    assert earlier.untold(["a pass took 0.41 s only"]) == []
    earlier.forget()
    assert earlier.untold(again) == again, "another sweep"


def test_a_point_of_other_conditions_takes_nothing_over() -> None:
    def config(**changes: Any) -> SpeculativeConfig:
        return SpeculativeConfig.parse({"model": {"model": "m"}, "method": {"method": "ngram"}} | changes)

    earlier, target = EarlierPoints(), object()
    earlier.keep_target(config(), target, Ranks())  # type: ignore[arg-type]
    earlier.keep_baseline(config(), MetricsCollector())
    other_method = config(method={"method": "suffix"}, seed=1)
    held = earlier.target_for(other_method)
    assert held is not None and held.info is target
    assert earlier.baseline_for(other_method) is None, "another seed"
    found = earlier.baseline_for(config(method={"method": "suffix"}))
    assert found is not None and found.point == "method=ngram method.num_speculative_tokens=4"
    assert earlier.target_for(config(hardware={"dtype": "bfloat16"})) is None
    assert earlier.target_for(config()) is None, "it was let go of for the other one"
