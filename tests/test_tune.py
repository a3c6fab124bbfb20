"""python -m runner.tune: which number of speculative tokens suits which load."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.cli.compose import Composer
from runner.tune import grid as grid_module
from runner.tune.command import main
from runner.tune.grid import Grid
from runner.tune.load_table import load_table, method_keys

SMALL = ("method=draft_model", "workload.limit=2", "sampler.max_tokens=12", "hardware.num_gpu_blocks_override=320")


@given(
    best=st.dictionaries(st.integers(1, 300), st.integers(0, 8), min_size=1),
    max_num_seqs=st.integers(1, 300),
)
def test_a_load_table_holds_every_load_once_and_each_measured_one_at_its_best(
    best: dict[int, int], max_num_seqs: int
) -> None:
    table = load_table(best, max_num_seqs)
    assert table[0][0] == 1 and table[-1][1] >= max_num_seqs
    for (_, end, count), (start, _, following) in itertools.pairwise(table):
        assert start == end + 1 and following != count
    counts = {size: count for start, end, count in table for size in range(start, end + 1)}
    last = table[-1]
    assert {size: counts.get(size, last[2]) for size in best} == best


def test_a_batch_size_between_two_goes_with_the_nearer_one_by_ratio() -> None:
    assert load_table({1: 4, 4: 2, 16: 0}, 64) == [(1, 1, 4), (2, 7, 2), (8, 64, 0)]
    assert load_table({1: 4, 4: 4, 16: 2}, 8) == [(1, 7, 4), (8, 8, 2)]


def test_one_number_for_every_load_needs_no_table() -> None:
    assert method_keys(load_table({1: 3, 8: 3}, 64)) == {"num_speculative_tokens": 3}


def test_the_best_number_is_that_of_the_highest_median_repeat_by_repeat() -> None:
    """The machine halves its speed in the second repeat, which says nothing of the numbers."""
    grid = Grid(batch_sizes=[1], num_speculative_tokens=[0, 2, 4])
    grid.tokens_per_second.update({(1, 0): [100, 50, 100], (1, 2): [150, 80, 148], (1, 4): [170, 70, 120, 900]})
    assert grid.num_repeats == 3
    assert grid.speedups((1, 2)) == [1.5, 1.6, 1.48]
    assert grid.best(1) == 2
    assert grid.is_close(1), "4 tokens were faster once"
    grid.tokens_per_second[1, 4] = [120, 70, 120]
    assert not grid.is_close(1)
    grid.tokens_per_second.update({(1, 2): [90, 45, 90], (1, 4): [80, 40, 80]})
    assert grid.best(1) == 0, "guesses that cost more than they bring"


def test_tuning_measures_every_place_and_says_what_to_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "tuned"
    options = ("--batch-sizes", "1,2", "--num-speculative-tokens", "1,3", "--repeats", "2")
    assert main([*SMALL, "tracking=jsonl", *options, "--output", str(output)]) == 0
    result = json.loads((output / "tuning.json").read_text())
    places = [(cell["batch_size"], cell["num_speculative_tokens"]) for cell in result["grid"]]
    assert places == [(size, count) for size in (1, 2) for count in (0, 1, 3)]
    assert all(cell["tokens_per_second"]["median"] > 0 for cell in result["grid"])
    assert [cell["speedup"]["median"] for cell in result["grid"] if cell["num_speculative_tokens"] == 0] == [1.0, 1.0]
    assert result["identical"] == {"requests": 2, "identical": 2}
    lengths = result["mean_acceptance_length"]
    assert lengths["0"] is None and 1 < lengths["1"] <= 2 < lengths["3"] <= 4
    assert result["config"]["method"]["num_speculative_tokens"] == 3
    (run,) = [json.loads(line) for line in (output / "runs.jsonl").read_text().splitlines()]
    assert (run["status"], run["summary"]["best"]) == ("FINISHED", result["best"])
    printed = capsys.readouterr().out
    assert "identical in every pass, whatever the batch and the tokens: 2/2" in printed
    assert "method=none" in printed or "use it: python -m runner method=draft_model" in printed


def test_what_is_found_can_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    keys = method_keys([(1, 1, 4), (2, 7, 2), (8, 64, 0)])
    overrides = [f"method.{key}={value}".replace(" ", "") for key, value in keys.items()]
    with Composer() as composer:
        method = composer.config(["method=ngram", *overrides]).method
    assert method.num_speculative_tokens_per_batch_size == ((1, 1, 4), (2, 7, 2), (8, 64, 0))


def test_an_interrupt_keeps_the_repeats_that_were_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_pass, num_passes = grid_module.run_pass, 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_passes
        num_passes += 1
        if num_passes == 6:  # two of the warm-up, two of the first repeat, one of the second
            raise KeyboardInterrupt
        return run_pass(*args, **kwargs)

    monkeypatch.setattr(grid_module, "run_pass", interrupted)
    options = ("--batch-sizes", "1", "--num-speculative-tokens", "2", "--output", str(tmp_path))
    assert main([*SMALL, "tracking=jsonl", *options]) == 130
    result = json.loads((tmp_path / "tuning.json").read_text())
    assert (result["repeats"], result["is_complete"]) == (1, False)
    (run,) = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert run["status"] == "KILLED"
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["method=none"], "method must guess tokens, got 'none'"),
        (["method.disable_by_batch_size=4"], "method.disable_by_batch_size must be null, got 4"),
        (["workload.request_rate=2"], "workload.request_rate must be null, got 2.0"),
        (["--batch-sizes", "1,3"], "--batch-sizes must be <= 2, the smaller of hardware.max_num_seqs"),
        (["--output", "/dev/null/tuned"], "--output must be a directory that can be made, got '/dev/null/tuned'"),
        (["workload=jsonl", "workload.path=/nowhere.jsonl", "~workload.limit"], "/nowhere.jsonl"),
    ],
)
def test_what_cannot_be_tuned_is_refused_with_the_remedy(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "tracking=none", *arguments]) == 2
    assert complaint in capsys.readouterr().err
