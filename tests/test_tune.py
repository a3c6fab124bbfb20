"""python -m runner.tune: which number of speculative tokens suits which load."""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proposers.base import Proposer
from proposers.suffix import SuffixProposer
from runner.cli.compose import Composer
from runner.engine.errors import UserError
from runner.llm import LLM
from runner.metrics import MetricsCollector, StepPoint
from runner.passes import Pass
from runner.tune import grid as grid_module
from runner.tune.command import _advice, _batch_sizes, _numbers_of_tokens, main
from runner.tune.grid import Grid, full_steps
from runner.tune.load_table import load_table, method_keys

SMALL = ("method=draft_model", "workload.limit=2", "sampler.max_tokens=12", "hardware.num_gpu_blocks_override=320")


@given(
    best=st.dictionaries(st.integers(1, 300), st.integers(0, 8), min_size=1),
    max_num_seqs=st.integers(300, 400),
)
def test_a_load_table_holds_every_load_once_and_each_measured_one_at_its_best(
    best: dict[int, int], max_num_seqs: int
) -> None:
    table = load_table(best, max_num_seqs)
    assert table[0][0] == 1 and table[-1][1] == max_num_seqs
    for (_, end, count), (start, _, following) in itertools.pairwise(table):
        assert start == end + 1 and following != count
    counts = {size: count for start, end, count in table for size in range(start, end + 1)}
    assert {size: counts[size] for size in best} == best


def test_a_batch_size_between_two_goes_with_the_nearer_one_by_ratio() -> None:
    assert load_table({1: 4, 4: 2, 16: 0}, 64) == [(1, 1, 4), (2, 7, 2), (8, 64, 0)]
    assert load_table({1: 4, 4: 4, 16: 2}, 16) == [(1, 7, 4), (8, 16, 2)]


def test_one_number_for_every_load_needs_no_table() -> None:
    assert method_keys(load_table({1: 3, 8: 3}, 64)) == {"num_speculative_tokens": 3}


def test_numbers_are_compared_within_a_repeat_and_the_fewest_that_none_beats_every_time_is_best() -> None:
    """The machine halves its speed in the second repeat, which says nothing of the numbers."""
    grid = Grid(batch_sizes=[1], num_speculative_tokens=[0, 2, 4])
    grid.tokens_per_second.update({(1, 0): [100, 50, 100], (1, 2): [150, 80, 148], (1, 4): [160, 85, 140, 900]})
    assert grid.num_repeats == 3
    assert grid.speedups((1, 2)) == [1.5, 1.6, 1.48]
    assert (grid.fastest(1), grid.best(1)) == (4, 2), "4 tokens are not faster in the third repeat"
    grid.tokens_per_second[1, 4] = [160, 85, 150]
    assert (grid.fastest(1), grid.best(1)) == (4, 4)
    grid.tokens_per_second.update({(1, 2): [90, 45, 90], (1, 4): [80, 40, 80]})
    assert grid.best(1) == 0, "guesses that cost more than they bring"


def point(num_requests: int, num_tokens: int, seconds: float, *, is_decoding: bool = True) -> StepPoint:
    return StepPoint(
        finished_at=0.0,
        total_seconds=seconds,
        num_requests=num_requests,
        num_drafts=0,
        num_draft_tokens=0,
        num_accepted_tokens=0,
        num_output_tokens=num_tokens,
        is_decoding=is_decoding,
        is_whole=None,
    )


def test_a_batch_size_is_measured_by_the_steps_that_are_full() -> None:
    one = Pass(metrics=MetricsCollector(), requests=[], errors={})
    one.metrics.step_points += [point(2, 2, 9.0), point(4, 6, 0.5), point(4, 10, 1.5), point(3, 99, 1.0)]
    one.metrics.step_points.append(point(4, 4, 3.0, is_decoding=False))  # prompts, which small batches fill more often
    grid = Grid(batch_sizes=[4], num_speculative_tokens=[0])
    grid.add((4, 0), one, full_steps(one, batch_size=4))
    assert (grid.tokens_per_second, grid.num_full_steps) == ({(4, 0): [8.0]}, {(4, 0): 2})
    with pytest.raises(UserError, match="5 requests never decoded in one step"):
        full_steps(one, batch_size=5)


def test_batch_sizes_are_those_that_the_engine_and_the_workload_fill() -> None:
    options = argparse.Namespace(batch_sizes=None)
    assert _batch_sizes(options, max_num_seqs=64, num_requests=1000) == [1, 4, 16, 64]
    assert _batch_sizes(options, max_num_seqs=64, num_requests=40) == [1, 4, 16]
    assert _batch_sizes(options, max_num_seqs=64, num_requests=1) == [1]


def test_numbers_of_tokens_are_those_that_the_drafter_drafts() -> None:
    options = argparse.Namespace(num_speculative_tokens=None)
    assert _numbers_of_tokens(options, most=6) == [0, 1, 2, 4, 6]
    options.num_speculative_tokens = [3, 2]
    assert _numbers_of_tokens(options, most=3) == [0, 2, 3]
    with pytest.raises(UserError, match="--num-speculative-tokens must be <= 2"):
        _numbers_of_tokens(options, most=2)


def test_tuning_measures_every_place_and_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "tuned"
    options = ("--batch-sizes", "1,2", "--num-speculative-tokens", "1,3", "--repeats", "2")
    assert main([*SMALL, "tracking=jsonl", *options, "--output", str(output)]) == 0
    result = json.loads((output / "tuning.json").read_text())
    sizes = {size: list(cells) for size, cells in result["grid"].items()}
    assert sizes == {key: ["k_0", "k_1", "k_3"] for key in ("batch_size_1", "batch_size_2")}
    for cells in result["grid"].values():
        assert all(cell["tokens_per_second"]["median"] > 0 < cell["num_full_steps"] for cell in cells.values())
        assert cells["k_0"]["speedup"] == {"median": 1.0, "lowest": 1.0, "highest": 1.0}
    assert result["identical"] == {"requests": 2, "identical": 2}
    lengths = result["mean_acceptance_length"]
    assert lengths["0"] is None and 1 < lengths["1"] <= 2 < lengths["3"] <= 4
    assert result["config"]["method"]["num_speculative_tokens"] == 3
    (run,) = [json.loads(line) for line in (tmp_path / "runs" / "runs.jsonl").read_text().splitlines()]
    assert (run["status"], run["summary"]["best"]) == ("FINISHED", result["best"])
    tags = {"lossless": "tokens", "device": "cpu", "device_name": result["machine"]["device_name"], "dtype": "float32"}
    assert run["tags"].items() >= tags.items()
    printed = capsys.readouterr().out
    assert "identical in every pass, whatever the batch and the tokens: 2/2" in printed
    assert _advice([*SMALL, "tracking=jsonl"], result["best"]) in printed


def test_the_engines_own_choice_is_measured_beside_the_numbers_and_is_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    output, auto = tmp_path / "tuned", "method.num_speculative_tokens_per_batch_size=auto"
    options = ("--batch-sizes", "1", "--num-speculative-tokens", "2", "--repeats", "1")
    assert main([*SMALL, auto, "tracking=none", *options, "--output", str(output)]) == 0
    result = json.loads((output / "tuning.json").read_text())
    assert list(result["grid"]["batch_size_1"]) == ["k_0", "k_2", "k_auto"]
    assert result["auto_choices"]["1"]["2"] > 0
    assert result["best"]["num_speculative_tokens"] in (0, 2)
    printed = capsys.readouterr().out
    assert "batch size 1: auto allowed " in printed
    assert auto not in printed.split("use it:")[-1]


def test_what_is_found_can_be_run() -> None:
    keys = method_keys([(1, 1, 4), (2, 7, 2), (8, 64, 0)])
    line = _advice(["method=ngram", "method.num_speculative_tokens=8"], keys)
    command, overrides = shlex.split(line)[:5], shlex.split(line)[5:]
    assert command == ["use", "it:", "python", "-m", "runner"]
    with Composer() as composer:
        method = composer.config(overrides).method
    assert (method.method, method.num_speculative_tokens) == ("ngram", 4)
    assert method.num_speculative_tokens_per_batch_size == ((1, 1, 4), (2, 7, 2), (8, 64, 0))
    assert "method=none" in _advice(["method=ngram"], method_keys([(1, 64, 0)]))


def test_what_is_found_replaces_what_was_said_with_a_plus_and_keeps_as_many_rates_as_tokens() -> None:
    """Four rates beside two tokens were printed, and refused when they were run."""
    tuned = ["method=ngram", "++method.num_speculative_tokens=4", "++method.disable_by_batch_size=null"]
    tuned += ["method.rejection_sample_method=synthetic", "method.synthetic_acceptance_rates=[0.9,0.5,0.3,1e-05]"]
    with Composer() as composer:
        rates = composer.config(tuned).method.synthetic_acceptance_rates
        line = _advice(tuned, method_keys([(1, 64, 3)], rates))
        assert line.count("num_speculative_tokens") == line.count("synthetic_acceptance_rates") == 1
        method = composer.config(shlex.split(line)[5:]).method
    assert (method.num_speculative_tokens, method.synthetic_acceptance_rates) == (3, (0.9, 0.5, 0.3))
    assert "disable_by_batch_size" not in line


def test_every_pass_begins_with_what_the_proposer_knew_when_it_was_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Suffix decoding remembers responses: a second pass would find them all."""
    begins, restart, run = list[tuple[str, bool]](), SuffixProposer.restart, LLM.run

    def restarted(proposer: SuffixProposer) -> None:
        begins.append(("restart", True))
        restart(proposer)

    def recorded(llm: LLM, requests: Any, proposer: Proposer, *args: Any, **options: Any) -> Any:
        begins.append((proposer.name, options["restarts"]))
        return run(llm, requests, proposer, *args, **options)

    monkeypatch.setattr(SuffixProposer, "restart", restarted)
    monkeypatch.setattr(LLM, "run", recorded)
    options = ("--num-speculative-tokens", "2", "--batch-sizes", "1", "--repeats", "1", "--output", str(tmp_path))
    assert main([*SMALL, "method=suffix", "tracking=none", *options]) == 0
    plain, method = [("NoneProposer", True)], [("SuffixProposer", True), ("restart", True)]
    assert begins[begins.index(plain[0]) :] == [*plain, *method, *method, *plain]


@pytest.mark.parametrize("last", [6, 3])
def test_an_interrupt_keeps_the_repeats_that_were_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], last: int
) -> None:
    """Passes: two of the warm-up, two of the first repeat, two of the second."""
    run_pass, num_passes = grid_module.run_pass, 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_passes
        num_passes += 1
        if num_passes == last:
            raise KeyboardInterrupt
        return run_pass(*args, **kwargs)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grid_module, "run_pass", interrupted)
    output = tmp_path / "tuned"
    options = ("--batch-sizes", "1", "--num-speculative-tokens", "2", "--output", str(output))
    assert main([*SMALL, "tracking=jsonl", *options]) == 130
    assert output.exists() == (last == 6)
    if last == 6:
        result = json.loads((output / "tuning.json").read_text())
        assert (result["repeats"], result["is_complete"]) == (1, False)
    (run,) = [json.loads(line) for line in (tmp_path / "runs" / "runs.jsonl").read_text().splitlines()]
    assert run["status"] == "KILLED"
    kept = (
        f"the repeats that were complete are in {output}" if last == 6 else "no repeat was complete; nothing was saved"
    )
    assert f"interrupted; {kept}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["method=none"], "method must guess tokens, got 'none'"),
        (["repeats=5"], "repeats must be left out, got 5"),
        (["method.rejection_sample_method=synthetic", "method.synthetic_acceptance_rate=0.5"], "must judge tokens"),
        (["method.disable_by_batch_size=4"], "method.disable_by_batch_size must be null, got 4"),
        (
            ["method.num_speculative_tokens_per_batch_size=[[1,9,2]]"],
            "method.num_speculative_tokens_per_batch_size must be null or auto, got ((1, 9, 2),)",
        ),
        (["method=ngram,suffix"], "method must be one value, got 'ngram,suffix'\n      give one of them\n"),
        (["workload.request_rate=2"], "workload.request_rate must be null, got 2.0"),
        (["--batch-sizes", "1,3"], "--batch-sizes must be <= 2, the smaller of hardware.max_num_seqs"),
        (["workload=jsonl", "workload.path=/nowhere.jsonl", "~workload.limit"], "/nowhere.jsonl"),
    ],
)
def test_what_cannot_be_tuned_is_refused_with_the_remedy(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "tracking=none", *arguments]) == 2
    assert complaint in capsys.readouterr().err
