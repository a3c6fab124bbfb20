"""The terminal says what the numbers say, at 80 columns, in a pipe and without Unicode."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from runner.metrics import MetricsCollector, RequestRecord, RequestStep, StepRecord
from runner.report import RunProgress, print_comparison, print_point, print_summary
from runner.report import progress as progress_module
from runner.report.text import BAR_WIDTH, bar, identical_style, method_title, speedup_style


def record(index: int, *, k: int, num_categories: int) -> RequestRecord:
    """Four tokens, 10 ms a step; with k > 0, two drafts of k tokens, of which one token is accepted."""
    tokens = (1, 2, 1) if k else (1, 1, 1, 1)
    return RequestRecord(
        request_id=str(index),
        prompt="p",
        prompt_token_ids=(1,),
        text="t",
        token_ids=(1, 2, 3, 4),
        finish_reason="length",
        category=f"category {index % num_categories}",
        seed=0,
        arrival_time=0.0,
        token_times=tuple(0.01 * (step + 1) for step in range(len(tokens))),
        tokens_per_step=tokens,
        num_draft_tokens=(0, *[k] * (len(tokens) - 1)),
        num_accepted_tokens=tuple(n - 1 for n in tokens),
    )


MACHINE = {"device": "cpu", "device_name": "Some CPU", "dtype": "float32", "torch": "2.13.0", "commit": "0123456789"}


def summary(*, method: str = "ngram", k: int = 2, num_categories: int = 2, **options: Any) -> dict[str, Any]:
    collector = MetricsCollector()
    for index in range(2):
        collector.finish(record(index, k=k, num_categories=num_categories))
    collector.observe(
        StepRecord(
            finished_at=0.03,
            seconds={"verify": 0.02},
            total_seconds=0.04,
            request_steps=(),
            is_decoding=False,
            max_draft_tokens=0,
            in_parts=None,
        )
    )
    return collector.summary(method=method, num_speculative_tokens=k, **{"machine": MACHINE, **options})


def console(*, terminal: bool = False, encoding: str = "utf-8") -> tuple[Console, io.BytesIO]:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    return Console(file=stream, width=80, force_terminal=terminal), raw


def shown(numbers: Mapping[str, Any], *, encoding: str = "utf-8", **options: Any) -> str:
    out, raw = console(encoding=encoding)
    print_summary(numbers, model="tiny", console=out, **options)
    return raw.getvalue().decode(encoding)


def row(**fields: Any) -> dict[str, Any]:
    defaults = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "acceptance_rate": 0.5,
        "mean_acceptance_length": 3.0,
        "output_tokens_per_second": 100.0,
        "speedup": 1.5,
        "num_repeats": 1,
    }
    return {**defaults, **fields}


def compared(*rows: Mapping[str, Any], params: Sequence[str] = (), terminal: bool = False) -> list[str]:
    out, raw = console(terminal=terminal)
    print_comparison(rows, params=params, console=out)
    return raw.getvalue().decode().splitlines()


def test_the_summary_shows_the_numbers_of_the_run() -> None:
    plain = summary(method="none", k=0) | {"output_tokens_per_second_range": {"lowest": 150.0, "highest": 250.0}}
    same = {"requests": 2, "identical": 2}
    numbers = summary(
        baseline=plain, identical_to_baseline=same, identical_between_repeats=same, peak_memory_bytes=2**22
    )
    text = shown(
        numbers
        | {"repeats": 3, "speedup_range": {"lowest": 1.2, "highest": 1.7}}
        | {"num_decoding_steps": 1000, "num_whole_steps": 588, "whole_step_share": 0.588}
    )
    for words in (
        "ngram, 2 tokens",
        "tiny on cpu, float32",
        "Some CPU, torch 2.13.0, commit 0123456",
        "2, 8 output tokens",
        "speed-up over plain decoding  1.50x (1.20 to 1.70) in 3 repeats",
        "identical to plain decoding   2/2",
        "identical in every repeat     2/2",
        "25.0% (2 of 8 drafted tokens)",
        "mean acceptance length        1.50 (mean over requests 1.50)",
        "50.0%",
        "0.0% if reached",
        "tokens per step               1.33",
        "output tokens per second      200.0",
        "  of plain decoding           200.0 (150.0 to 250.0) in 3 repeats",
        "6.67 ms (p20 6.67, p80 6.67, p99 6.67)",
        "share of time                 verify 50%, other 50%",
        "whole steps                   58.8% (588 of 1,000 decoding steps)",
        "4 MiB",
        "category 1",
    ):
        assert words in text, words


def test_the_summary_fits_80_columns_and_has_no_escape_codes_in_a_pipe() -> None:
    text = shown(summary(notes=["the bitwise promise is off on this path " * 4]))
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) == 80


def test_files_and_commands_are_never_broken_or_boxed() -> None:
    path, command = f"/{'a' * 90}/metrics.json", f"mlflow ui --backend-store-uri sqlite:////{'b' * 90}/mlflow.db"
    lines = shown(summary(), files=[path, "outputs.jsonl"], location="run 1", ui_command=command).splitlines()
    assert lines[-4:] == [f"files {path}", "      outputs.jsonl", "run   run 1", f"show  {command}"]


def test_brackets_in_names_are_text_not_markup() -> None:
    text = shown(summary(notes=["got [red]7[/red]"]), files=["out/[bold]x"], location="[a]")
    assert "got [red]7[/red]" in text
    assert "out/[bold]x" in text


def test_what_was_not_measured_is_a_dash() -> None:
    text = shown(MetricsCollector().summary(method="ngram", num_speculative_tokens=2))
    assert "None" not in text
    assert "nan" not in text
    assert "speed-up over plain decoding  -" in text


def test_plain_decoding_has_no_lines_about_drafts() -> None:
    text = shown(summary(method="none", k=0))
    assert "acceptance rate" not in text
    assert "whole steps" not in text  # nothing was captured
    assert "of plain decoding " not in text  # it is this
    assert "speed-up over plain decoding  1.00x" in text


def test_failed_requests_are_shown_only_when_there_are_some() -> None:
    assert "failed" not in shown(summary())
    assert "2, 8 output tokens, 3 failed" in shown({**summary(), "num_failed_requests": 3})


def test_the_prefix_cache_is_shown_only_where_something_was_found() -> None:
    found = {"prefix_cache_hits": 1200, "prefix_cache_queries": 4800, "prefix_cache_hit_rate": 0.25}
    assert "prefix cache                  25.0% (1,200 of 4,800 prompt tokens)" in shown(summary() | found)
    assert "prefix cache" not in shown(summary())


def told_as_point(numbers: Mapping[str, Any], *, notes: Sequence[str] = ()) -> list[str]:
    out, raw = console()
    print_point(numbers, notes=notes, directory=f"/{'a' * 90}/[bold]0", console=out)
    return raw.getvalue().decode().splitlines()


def test_a_point_of_a_sweep_is_a_line_the_notes_that_are_new_and_its_directory() -> None:
    same = {"requests": 2, "identical": 2}
    numbers = summary(
        baseline=summary(method="none", k=0), identical_to_baseline=same, notes=["told before", "got [red]7"]
    )
    assert told_as_point(numbers, notes=["got [red]7"]) == [
        "ngram, 2 tokens: 1.50x, identical 2/2, acceptance 25.0%, length 1.50, 200.0 tokens/s",
        "note: got [red]7",
        f"files /{'a' * 90}/[bold]0",
    ]


def test_a_points_line_says_what_qualifies_its_numbers() -> None:
    plain, same = summary(method="none", k=0), {"requests": 2, "identical": 1}
    numbers = summary(baseline=plain, identical_to_baseline=same, identical_between_repeats=same, core_wait_share=0.26)
    ranges = {"repeats": 3, "speedup_range": {"lowest": 1.2, "highest": 1.7}}
    assert told_as_point(numbers | ranges | {"num_failed_requests": 3, "lossless": "unguaranteed"})[0] == (
        "ngram, 2 tokens: 1.50x (1.20 to 1.70) in 3 repeats, doubtful (26% without a core), "
        "identical 1/2, unguaranteed, identical in every repeat 1/2, unguaranteed, "
        "acceptance 25.0%, length 1.50, 200.0 tokens/s, 3 failed"
    )
    assert told_as_point(summary(lossless=False))[0].startswith("ngram, 2 tokens, lossy: acceptance 25.0%, ")
    assert told_as_point(plain)[0] == "none: 1.00x, 200.0 tokens/s"


def test_one_category_needs_no_table() -> None:
    assert "category" not in shown(summary(num_categories=1))


def test_control_characters_of_a_workload_do_not_reach_the_terminal() -> None:
    """A category may hold any text, and so may a field's name, which a note tells."""
    numbers = summary()
    named = dict(zip(["a\x1b[2Jb\r", "\u6570\u5b66"], numbers["categories"].values(), strict=True))
    text = shown({**numbers, "categories": named, "notes": ["no run reads: x\x9b1m"]})
    told = told_as_point(numbers, notes=["no run reads: x\x9b1m"])
    assert r"a\x1b[2Jb\r " in text and "\u6570\u5b66" in text and r"no run reads: x\x9b1m" in text
    assert any(r"no run reads: x\x9b1m" in line for line in told)


def test_long_drafts_do_not_flood_the_screen() -> None:
    rates = [0.5] * 40
    text = shown({**summary(), "acceptance_per_position": rates, "conditional_acceptance_per_position": rates})
    assert "and 28 more in metrics.json" in text


def test_a_terminal_without_unicode_gets_ascii() -> None:
    assert "####" in shown(summary(), encoding="ascii")


@pytest.mark.parametrize(
    ("encoding", "model"), [("ascii", "mod\\xe8le"), ("utf-8", "mod\u00e8le"), ("utf-8:surrogateescape", "mod\u00e8le")]
)
def test_a_pipe_does_not_break_on_a_path_that_its_encoding_lacks(encoding: str, model: str) -> None:
    """A run's name or path may hold anything: with LANG=C, or of bytes that are no UTF-8, it ended measured runs."""
    code = """
from runner.metrics import MetricsCollector
from runner.report import print_summary
numbers = MetricsCollector().summary(method="none", num_speculative_tokens=0)
print_summary(numbers, model="mod\u00e8le", files=["/home/\\ud800/x"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ".", "PYTHONIOENCODING": encoding, "COLUMNS": "40"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"model                         {model}" in done.stdout  # nor is it cut at 40 columns
    assert "/home/\\ud800/x" in done.stdout


def test_bars_are_as_long_as_their_share() -> None:
    assert bar(1.0, ascii_only=False) == "█" * BAR_WIDTH
    assert bar(0.5, ascii_only=True) == "#" * (BAR_WIDTH // 2) + " " * (BAR_WIDTH // 2)
    assert bar(1 / BAR_WIDTH / 2, ascii_only=False).rstrip() == "▌"
    assert {len(bar(i / 100, ascii_only=False)) for i in range(101)} == {BAR_WIDTH}
    assert bar(None, ascii_only=False) == bar(0.0, ascii_only=False) == " " * BAR_WIDTH


def test_colours_follow_the_value() -> None:
    assert [speedup_style(value) for value in (1.5, 1.0, 0.5, None)] == ["bold green", "bold yellow", "bold red", ""]
    assert identical_style({"requests": 2, "identical": 2}) == "bold green"
    assert identical_style("1/2") == "bold red"


@pytest.mark.parametrize(("k", "title"), [(0, "ngram"), (1, "ngram, 1 token"), (2, "ngram, 2 tokens"), (None, "ngram")])
def test_titles_count_their_tokens(k: int | None, title: str) -> None:
    assert method_title({"method": "ngram", "num_speculative_tokens": k}) == title


def test_a_tree_is_titled_by_its_nodes_and_has_as_many_positions_as_levels() -> None:
    """It had the title of a chain, and a position for every node, most of which no tree could reach."""
    collector = MetricsCollector()
    collector.finish(replace(record(0, k=8, num_categories=1), draft_depths=(0, 3, 2)))
    numbers = collector.summary(method="eagle3", num_speculative_tokens=8)
    assert numbers["draft_tree_depth"] == 3 and len(numbers["acceptance_per_position"]) == 8
    text = shown(numbers)
    assert "eagle3, tree of 8 nodes" in text
    assert " 3  " in text and " 4  " not in text
    assert summary(k=8)["draft_tree_depth"] is None, "a chain"


def test_a_sweep_is_one_row_a_run_with_the_fastest_marked() -> None:
    lines = compared(
        row(method="none", num_speculative_tokens=0, speedup=1.0, acceptance_rate=None, mean_acceptance_length=None)
        | MACHINE,
        row(num_speculative_tokens=2, identical_to_baseline={"requests": 3, "identical": 3}),
        row(speedup=1.75, identical_to_baseline="2/3"),
    )
    assert lines[0].split() == ["method", "K", "acceptance", "length", "tokens/s", "speed-up", "identical"]
    assert lines[2].split() == ["none", "-", "-", "-", "100.0", "1.00x", "-"]
    assert lines[3].split() == ["ngram", "2", "50.0%", "3.00", "100.0", "1.50x", "3/3"]
    assert lines[4].split() == ["ngram", "*", "4", "50.0%", "3.00", "100.0", "1.75x", "2/3"]
    chance = "* highest speed-up, of one pass; repeats=3 tells whether it is by chance"
    assert [line.strip() for line in lines[5:]] == [chance, "on Some CPU, torch 2.13.0, commit 0123456"]
    assert max(map(len, lines)) <= 80


def test_swept_values_have_a_column() -> None:
    key = "method.speculative_token_tree"
    lines = compared(*(row(speedup=1.0, **{key: value}) for value in ("null", "dynamic", None)), params=[key])
    assert [line.split("50.0%")[0].split()[-1] for line in lines if "50.0%" in line] == ["null", "dynamic", "-"]


def test_the_share_of_whole_steps_is_a_column_where_steps_were_captured() -> None:
    lines = compared(row(whole_step_share=0.925), row(method="suffix", whole_step_share=0.0), row(method="none"))
    assert lines[0].split()[-1] == "whole"
    assert [line.split()[-1] for line in lines[2:5]] == ["92.5%", "0.0%", "-"]


def spread(speedup: float, lowest: float, highest: float, **fields: Any) -> dict[str, Any]:
    tokens = {"output_tokens_per_second_lowest": 90.0, "output_tokens_per_second_highest": 110.0}
    own = {"speedup_lowest": lowest, "speedup_highest": highest, "num_repeats": 3, **tokens}
    return row(speedup=speedup, **{**own, **fields})


def test_only_a_run_whose_repeats_all_beat_every_other_run_is_the_fastest() -> None:
    """A sweep of five points starred the wrong method: one pass of each says nothing of how far passes differ."""
    slow = spread(1.5, 1.4, 1.7, num_speculative_tokens=2)
    twice = compared(slow | {"num_repeats": 2}, spread(2.0, 1.8, 2.1, num_repeats=2))
    assert twice[4].strip() == "* highest speed-up, of 2 passes; repeats=3 tells whether it is by chance"
    clear, close = compared(slow, spread(2.0, 1.8, 2.1)), compared(slow, spread(2.0, 1.6, 2.1))
    assert clear[3].split()[1] == "*" and clear[4].strip() == "* highest speed-up"
    assert clear[3].endswith("100.0 (90.0 to 110.0)  2.00x (1.80 to 2.10) ")
    assert not any("*" in line for line in close)
    assert close[4].strip() == "no run is the fastest: the ranges of their repeats overlap"


def test_ranges_stand_below_their_values_on_a_terminal_of_80_columns() -> None:
    """The table that README shows was 103 columns wide, and wrapped within its cells."""
    same, params = {"identical_to_baseline": "40/40", "whole_step_share": 1.0}, ("method",)
    lines = compared(spread(1.5, 1.4, 1.7, **same), spread(2.0, 1.8, 2.1, **same), params=params, terminal=True)
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in lines[:7]) <= 80
    assert "90 to 110" in lines[3] and "1.40 to 1.70" in lines[3] and "1.50x" in lines[2]


def test_a_methods_name_is_never_broken() -> None:
    """At 80 columns it was `suffix_recyclin`, and a `g` below."""
    named = row(
        method="suffix_recycling", num_speculative_tokens=16, whole_step_share=1.0, identical_to_baseline="40/40"
    )
    for terminal in (False, True):
        assert "suffix_recycling" in compared(named, terminal=terminal)[2]


def test_a_run_slower_than_plain_decoding_is_not_the_fastest() -> None:
    """In a sweep without method=none the star stood at 0.71x."""
    lines = compared(row(speedup=0.71), row(speedup=0.55, num_speculative_tokens=8))
    assert not any("*" in line for line in lines)
    assert lines[4].strip() == "no run is faster than plain decoding"


def test_a_sweep_tells_which_of_its_times_are_doubtful() -> None:
    quiet, waited = row(core_wait_share=0.02), row(method="suffix", core_wait_share=0.31)
    assert "doubtful" not in " ".join(compared(quiet, row()))
    last = compared(quiet, waited)[-1]
    assert last == " doubtful times: in 1 of 2 runs a thread waited for a core, up to 31% of the time"
    assert "*" not in " ".join(compared(row(speedup=1.2), row(method="suffix", speedup=1.9, core_wait_share=0.31)))


def test_a_speed_up_that_is_doubtful_says_so_itself() -> None:
    """The large number stood there as any other, and the doubt in a note below."""
    waited = {**summary(method="ngram"), "speedup": 1.4, "core_wait_share": 0.46}
    assert "speed-up over plain decoding  1.40x, doubtful (46% without a core)" in shown(waited)
    assert "doubtful" not in shown(waited | {"core_wait_share": 0.02})


def test_a_sweep_without_a_baseline_is_ranked_by_throughput() -> None:
    lines = compared(row(speedup=None, output_tokens_per_second=90.0), row(num_speculative_tokens=8, speedup=None))
    assert ["*" in line.split() for line in lines[2:4]] == [False, True] and lines[4].startswith(
        " * fastest, of one pass"
    )


def test_plain_decoding_is_not_the_fastest_for_being_the_only_one_with_a_speedup() -> None:
    """experiment=compare_methods runs method=none itself, without a baseline, and its star stood at none."""
    lines = compared(
        row(method="none", speedup=1.0, output_tokens_per_second=100.0),
        row(method="ngram", speedup=None, output_tokens_per_second=250.0),
    )
    assert [line.split()[0] for line in lines if " * " in line and "fastest" not in line] == ["ngram"]


def test_a_failed_run_is_shown_as_failed_and_never_the_fastest() -> None:
    lines = compared(row(speedup=9.0, status="FAILED"), row(num_speculative_tokens=8, status="FINISHED"))
    assert lines[2].split()[:2] == ["ngram", "(failed)"]
    assert lines[3].split()[:2] == ["ngram", "*"]


def test_runs_go_by_name_where_method_and_tokens_do_not_tell_them_apart() -> None:
    lines = compared(row(run_name="ngram t=0"), row(run_name="ngram t=1"))
    assert lines[0].split()[0] == "run"
    assert lines[3].split()[:2] == ["ngram", "t=1"]
    assert compared(row(run_name="a"), row(method="none", run_name="b"))[0].split()[0] == "method"


def test_swept_keys_are_columns_that_tell_runs_apart() -> None:
    rule, drafting, temperature = "method.rejection_sample_method", "method.draft_sample_method", "sampler.temperature"
    rows = [
        row(run_name="r", speedup=None, **{rule: "probabilistic", drafting: "probabilistic", temperature: value})
        for value in ("0.0", "0.7")
    ]
    lines = compared(*rows, params=("method", "seed", rule, drafting, temperature))
    text = " ".join(lines[:3]).split()
    assert {"rejection", "draft", "temperature", "acceptance"} <= set(text)
    assert "run" not in text
    assert lines[-2].split() == ["ngram", "4", *["probabilistic"] * 2, "0.7", "50.0%", "3.00", "100.0"]
    assert "speed-up" not in text and "identical" not in text, "nobody measured them"


def test_a_run_that_may_change_tokens_is_marked_in_title_summary_and_comparison() -> None:
    text = shown(summary(lossless=False))
    assert "ngram, 2 tokens, lossy" in text
    assert "identical to plain decoding   lossy" in text
    assert compared(row(lossless=False))[2].split()[-1] == "lossy"
    same = {"requests": 2, "identical": 2}
    text = shown(summary(lossless="unguaranteed", identical_to_baseline=same))
    assert "identical to plain decoding   2/2, unguaranteed" in text
    assert (
        compared(row(lossless="unguaranteed", identical_to_baseline="2/2"))[2].rstrip().endswith(" 2/2, unguaranteed")
    )
    for lossless in ("tokens", "distribution", None):
        assert "lossy" not in shown(summary(lossless=lossless))
        assert "unguaranteed" not in shown(summary(lossless=lossless))
        assert "lossy" not in compared(row(lossless=lossless))[2]


def test_an_empty_sweep_is_an_empty_table() -> None:
    assert compared()[0].split()[0] == "method"


def one_step(*, num_draft_tokens: int) -> StepRecord:
    request_step = RequestStep(
        request_id="0", num_draft_tokens=num_draft_tokens, num_accepted_tokens=0, num_output_tokens=1
    )
    return StepRecord(
        finished_at=0.0,
        seconds={},
        total_seconds=0.1,
        request_steps=(request_step,),
        is_decoding=True,
        max_draft_tokens=4,
        in_parts=None,
    )


def run(out: Console, *, num_draft_tokens: int = 4) -> None:
    collector = MetricsCollector()
    with RunProgress("ngram", 2, console=out) as progress:
        for _ in range(2):
            collector.observe(one_step(num_draft_tokens=num_draft_tokens))
            progress.update(collector)


def test_in_a_pipe_progress_is_one_line_at_the_end() -> None:
    out, raw = console()
    run(out)
    lines = raw.getvalue().decode().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("ngram: 0/2 requests in ")
    assert lines[0].endswith("mean acceptance length 1.00")
    assert "2 tokens" in lines[0]


def test_in_a_terminal_progress_is_a_bar_that_ends_with_the_last_counts() -> None:
    out, raw = console(terminal=True)
    run(out)
    last = raw.getvalue().decode().split("\r")[-1]
    assert "ngram" in last
    assert "2 tokens" in last


def test_progress_without_drafts_has_no_acceptance_length() -> None:
    out, raw = console()
    run(out, num_draft_tokens=0)
    assert "length" not in raw.getvalue().decode()


def test_progress_is_not_drawn_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes a millisecond, which is a decode step of a small model."""
    monkeypatch.setattr(progress_module, "SECONDS_BETWEEN_DRAWINGS", 3600.0)
    out, raw = console(terminal=True)
    collector = MetricsCollector()
    with RunProgress("ngram", 2, console=out) as progress:
        size = len(raw.getvalue())
        for _ in range(100):
            progress.update(collector)
        assert len(raw.getvalue()) == size


def test_an_interrupted_run_prints_no_final_line() -> None:
    out, raw = console()
    with pytest.raises(KeyboardInterrupt), RunProgress("ngram", 2, console=out) as progress:
        progress.update(MetricsCollector())
        raise KeyboardInterrupt
    assert raw.getvalue() == b""
