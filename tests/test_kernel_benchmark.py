"""python -m kernels.benchmark without a GPU: its words, its numbers, and that a wrong kernel gets no time."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.errors import TritonError

from kernels import benchmark
from kernels.benchmarks import case as parts
from kernels.benchmarks import linear as linear_cases
from kernels.benchmarks.timing import Timing, summarise

MESSAGE = "out of shared memory\nat a line"
TIMING = Timing(median_us=10.0, p20_us=9.0, p80_us=12.5)


class FakeTimer:
    """Runs every call once and says what it is told; raises KeyboardInterrupt instead of the last_time."""

    def __init__(self, last_time: int | None = None) -> None:
        self.times, self.last_time = 0, last_time

    def __call__(self, *contenders: Sequence[Callable[[], object]]) -> list[Timing]:
        self.times += 1
        if self.times == self.last_time:
            raise KeyboardInterrupt
        for calls in contenders:
            for call in calls:
                call()
        return [TIMING for _ in contenders]

    def copy_gb_per_second(self) -> float:
        return 4000.0


@pytest.fixture
def setting(kernel_device: torch.device) -> parts.Setting:
    return parts.Setting(device=kernel_device, dtype=torch.float32, is_small=True)


def test_help_names_every_op_and_the_check_for_machines_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        benchmark.main(["--help"])
    text = capsys.readouterr().out
    assert exited.value.code == 0
    assert all(op in text for op in benchmark.OPS) and "--json" in text and "TRITON_INTERPRET=1" in text


def test_every_op_has_a_module_and_every_module_an_op() -> None:
    folder = Path(benchmark.__file__).parent / "benchmarks"
    shared = {"__init__", "case", "conditions", "timing", "weights"}
    assert {path.stem for path in folder.glob("*.py")} == {*benchmark.OPS, *shared}


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["liner"], "did you mean linear? Ops are linear, experts, heads_linear"),
        (["--repetitions", "0"], "whole number >= 1"),
        (["--json", "/nowhere/at/all.json"], "make it first"),
    ],
)
def test_a_wrong_argument_is_answered_with_the_remedy(
    arguments: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        benchmark.main(arguments)
    assert exited.value.code == 2 and remedy in capsys.readouterr().err


@pytest.mark.parametrize(("interpret", "arguments"), [("0", []), ("0", ["--check"]), ("1", [])])
def test_without_a_gpu_one_line_says_so(
    interpret: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmark.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "needs a CUDA GPU" in err and "--check" in err


def test_percentiles_do_not_depend_on_the_order_of_samples() -> None:
    assert summarise([3.0, 1.0, 2.0, 5.0, 4.0, 6.0]) == Timing(median_us=3.5, p20_us=2.0, p80_us=5.0)
    assert summarise([7.0]) == Timing(median_us=7.0, p20_us=7.0, p80_us=7.0)


def test_copies_fill_the_cache_eight_times_or_are_said_to_come_from_it() -> None:
    setting = parts.Setting(device=torch.device("cpu"), dtype=torch.float32, cache_bytes=1000)
    copies = setting.copies(400, torch.arange(25.0), torch.zeros(75))
    assert len(copies) == 20 and all(len(own) == 2 for own in copies)
    assert len({own[0].data_ptr() for own in copies}) == 20 and all(torch.equal(*pair) for pair in _firsts(copies))
    assert setting.comes_from(400) == "memory" and len(setting.copies(40_000, torch.zeros(10_000))) == 1
    assert setting.comes_from(4) == "L2" and setting.num_copies(4) == parts.MOST_COPIES


def _firsts(copies: list[tuple[torch.Tensor, ...]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(copies[0][0], own[0]) for own in copies]


def test_an_error_beyond_twice_torchs_and_a_rounding_fails() -> None:
    exact = torch.tensor([1.0, -2.0], dtype=torch.float64)
    by_torch = torch.tensor([1.0, -2.0 - 2**-20])
    for shift, passes in ((2**-19, True), (2**-18, False), (math.nan, False)):
        found = torch.tensor([1.0, -2.0]) + torch.tensor([shift, 0.0])
        if passes:
            assert parts.check_error(found, by_torch, exact) == "accuracy"
        else:
            with pytest.raises(parts.CheckFailed, match="limit"):
                parts.check_error(found, by_torch, exact)


def test_a_draw_may_lose_to_the_best_score_by_no_more_than_scores_are_uncertain() -> None:
    scores = torch.tensor([[5.0, 4.5, float("-inf")]])
    uncertainty = torch.full_like(scores, 0.3)
    assert parts.check_draws(torch.tensor([1]), scores, uncertainty) == "draws"
    for token in (2, -1, 3):
        with pytest.raises(parts.CheckFailed):
            parts.check_draws(torch.tensor([token]), scores, uncertainty)
    with pytest.raises(parts.CheckFailed):
        parts.check_draws(torch.tensor([1]), scores, uncertainty / 2)


def test_rows_that_know_their_company_fail() -> None:
    rows = torch.arange(12.0).view(6, 2)
    assert parts.check_row_bits(lambda own: rows[own] * 2, 6) == "row bits"
    with pytest.raises(parts.CheckFailed, match="row 3"):
        parts.check_row_bits(lambda own: rows[own] - rows[own][0] * (rows[own] == 7).float(), 6)


def test_the_report_holds_conditions_checks_and_times(
    setting: parts.Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_cases, "SMALL_WEIGHTS", {"o": (64, 128)})
    path = tmp_path / "report.json"
    report = {"hardware": "none"}
    assert benchmark.run(["rms_norm", "linear"], [setting], FakeTimer(), report, path) == 0
    written = json.loads(path.read_text())
    assert written["hardware"] == "none" and written["copy_gb_per_second"] == 4000.0 and written["is_complete"]
    norm = written["cases"][1]
    linear, in_8_bits, in_4_bits, in_fp4 = (
        next(case for case in written["cases"] if case["case"] == f"o, 5 rows{held}")
        for held in ("", ", fp8", ", int4 in groups of 128", ", NVFP4")
    )
    assert (norm["op"], norm["case"], norm["dtype"]) == ("rms_norm", "add and norm, 3 rows", "float32")
    assert norm["checks"] == ["accuracy", "row bits"] and norm["failure"] is None and norm["torch_timing"] is None
    assert norm["timing"] == {"median_us": 10.0, "p20_us": 9.0, "p80_us": 12.5}
    assert norm["num_bytes"] == (4 * 3 + 1) * 100 * 4
    assert norm["gb_per_second"] == pytest.approx(5200 / 10e-6 / 1e9)
    assert norm["share_of_copy"] == pytest.approx(0.52 / 4000)
    assert linear["num_bytes"] == 4 * (64 * 128 + 5 * 128 + 5 * 64)
    assert in_8_bits["num_bytes"] == 64 * 128 + 4 * (64 + 5 * 128 + 5 * 64)
    assert in_4_bits["num_bytes"] == in_8_bits["num_bytes"] - 64 * 64 + 64, "with a zero point for each output"
    assert in_fp4["num_bytes"] == in_8_bits["num_bytes"] - 64 * 64 + 64 * 16, "with block scales of whole 16 bytes"
    assert linear["ratio_to_torch"] == 1.0 and linear["torch_timing"] == norm["timing"]
    out, err = capsys.readouterr()
    assert "10.00      9.00     12.50" in out and "4000 GB/s" in out
    assert "[1/13] rms_norm: add and norm, 1 rows, float32" in err


def test_a_report_replaces_the_one_before_at_once_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    benchmark.write_json(path, {"run": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
        with pytest.raises(OSError, match="full"):
            benchmark.write_json(path, {"run": 2})
    assert json.loads(path.read_text()) == {"run": 1} and list(tmp_path.iterdir()) == [path]
    benchmark.write_json(path, {"run": 3})
    assert json.loads(path.read_text()) == {"run": 3} and list(tmp_path.iterdir()) == [path]


def test_checks_alone_print_no_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kernel_device: torch.device
) -> None:
    path = tmp_path / "report.json"
    assert benchmark.main(["--check", "move_kv", "rejection", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "of copy" not in out and "FAILED" not in out and out.count("rejection ") == 2
    written = json.loads(path.read_text())
    assert {"hardware", "driver", "cuda", "torch", "triton", "commit", "repetitions"} < written.keys()
    assert written["copy_gb_per_second"] is None and all(found["timing"] is None for found in written["cases"])
    dtypes = {"float32", "float16"} if kernel_device.type == "cpu" else {"bfloat16"}
    assert {found["dtype"] for found in written["cases"] if found["op"] == "move_kv"} == dtypes


def _with_first(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The change, of the first of several results."""
    return lambda result: type(result)(change(result[0]), *result[1:])


def _scaled(result: Any) -> Any:
    return result * 1.001


def _shifted(result: Any) -> Any:
    return result + 1


WRONG: list[tuple[str, str, str, Callable[[Any], Any] | None]] = [  # op, module, function; None: it does nothing
    ("linear", "linear", "linear", _scaled),
    ("partial_sums", "linear", "gated_linear", _scaled),
    ("experts", "experts_linear", "gated_linear_of_experts", _scaled),
    ("heads_linear", "heads_linear", "linear_of_heads", None),
    ("paged_attention", "paged_attention", "paged_attention", _scaled),
    ("rms_norm", "rms_norm", "add_rms_norm", lambda results: (_scaled(results[0]), results[1])),
    ("rope", "rope", "rope_and_write", None),
    ("latent_rows", "latent_rows", "rotate_and_store_latents", None),
    ("mask_and_penalise", "mask_and_penalise", "mask_and_penalise", _scaled),
    ("sampling", "sampling", "greedy", _shifted),
    ("uniforms", "uniforms", "uniforms", _shifted),
    ("top_logprobs", "top_logprobs", "top_logprobs", _scaled),
    ("truncation", "truncation", "truncate_rows", lambda truncated: truncated._replace(masses=truncated.masses + 1)),
    ("rejection", "rejection", "verify_strict", _with_first(_shifted)),
    ("probabilistic_rejection", "probabilistic_rejection", "verify_probabilistic", _with_first(_shifted)),
    ("ngram_match", "ngram_match", "ngram_match", _shifted),
    ("move_kv", "move_kv", "move_kv", None),
    ("chain_rows", "chain_rows", "chain_rows", lambda rows: rows._replace(slots=rows.slots + 1)),
    ("fit_drafts", "fit_drafts", "fit_drafts", lambda results: (_shifted(results[0]), results[1])),
    ("follow_verified", "follow_verified", "follow_verified", _shifted),
    ("tree_rows", "tree_rows", "tree_rows", lambda rows: rows._replace(branch_slots=rows.branch_slots + 1)),
    ("walk_tree", "walk_tree", "walk_tree", lambda walked: walked._replace(rows=walked.rows + 1)),
    ("match_in_tree", "match_in_tree", "match_in_tree", lambda tree: tree._replace(parents=tree.parents + 1)),
    ("remember_candidates", "remember_candidates", "remember_candidates", None),
    ("sum_of_ranks", "sum_of_ranks", "sum_of_ranks", _scaled),
    ("gated_delta", "gated_delta", "gated_delta", _scaled),
    ("short_conv", "short_conv", "short_conv", _scaled),
    ("gate", "gate", "gate", _scaled),
    ("cluster_logits", "cluster_logits", "cluster_logits", _scaled),
    ("block_conv", "block_conv", "block_conv", _scaled),
    ("candidate_logits", "candidate_logits", "candidate_logits", _scaled),
]


@pytest.mark.parametrize(("op", "module", "function", "change"), WRONG, ids=[op for op, *_ in WRONG])
def test_the_check_of_an_op_finds_a_wrong_kernel(
    op: str,
    module: str,
    function: str,
    change: Callable[[Any], Any] | None,
    setting: parts.Setting,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And its time is not taken."""
    kernel = importlib.import_module(f"kernels.{module}")
    right = getattr(kernel, function)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return None if change is None else change(right(*args, **kwargs))

    first = importlib.import_module(f"kernels.benchmarks.{op}").cases(setting)[0]
    timer = FakeTimer()
    assert benchmark.measure(first, timer, 4000.0).failure is None and timer.times == 1
    monkeypatch.setattr(kernel, function, wrong)
    result = benchmark.measure(first, timer, 4000.0)
    assert result.failure is not None and result.timing is None and timer.times == 1


@pytest.mark.parametrize("error", [TritonError(MESSAGE), RuntimeError(MESSAGE)], ids=["Triton", "the driver"])
def test_a_failed_check_is_told_and_the_rest_goes_on(
    error: Exception, setting: parts.Setting, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kernel that is wrong, and one that does not compile, or that the driver refuses."""

    def no_program(*_: Any, **__: Any) -> None:
        raise error

    norm = importlib.import_module("kernels.rms_norm")
    right = norm.add_rms_norm
    monkeypatch.setattr(norm, "add_rms_norm", lambda *args: (right(*args)[0] + 1, right(*args)[1]))
    monkeypatch.setattr(importlib.import_module("kernels.rope"), "rope_and_write", no_program)
    report: dict[str, Any] = {}
    assert benchmark.run(["rms_norm", "rope", "rejection"], [setting], FakeTimer(), report, None) == 1
    out, err = capsys.readouterr()
    failures = [found["failure"] is not None for found in report["cases"]]
    assert (
        failures == [True, True, True, True, False, False, *[True] * 3, False, False, False] and report["is_complete"]
    )
    assert [found["timing"] is None for found in report["cases"]] == failures
    assert out.count("FAILED: error ") == 4 and f"FAILED: {type(error).__name__}: out of shared memory\n" in out
    assert out.count("10.00") == 5 and "7 of 12 checks failed." in err


def test_ctrl_c_leaves_the_rows_so_far(
    setting: parts.Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    assert benchmark.run(["rejection"], [setting], FakeTimer(last_time=2), {}, path) == 130
    out, err = capsys.readouterr()
    assert "strict" in out and "synthetic" not in out and "Interrupted after 1 of 2 cases." in err
    written = json.loads(path.read_text())
    assert len(written["cases"]) == 1 and not written["is_complete"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_replays_of_a_graph_are_timed_on_a_gpu() -> None:
    from kernels.benchmarks.timing import GraphTimer

    device = torch.device("cuda")
    small, large = (torch.zeros(size, device=device) for size in (1 << 20, 1 << 28))
    few, many = GraphTimer(device, 5)([small.zero_], [large.zero_])
    assert 0 < few.p20_us <= few.median_us <= few.p80_us < many.p20_us


def test_a_reader_that_leaves_ends_the_benchmark_without_a_traceback() -> None:
    command = [sys.executable, "-m", "kernels.benchmark", "--check", "chain_rows"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert b"Error" not in process.stderr.read()
    assert process.returncode == benchmark.BROKEN_PIPE
