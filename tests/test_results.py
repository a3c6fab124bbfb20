"""metrics.json and outputs.jsonl hold what the run produced, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.engine.errors import UserError
from runner.metrics import RequestRecord
from runner.results import remove_other_results, write_metrics, write_outputs, write_vllm_config


def record(**fields: Any) -> RequestRecord:
    defaults: dict[str, Any] = {
        "request_id": "7",
        "prompt": "def f",
        "prompt_token_ids": (3, 4),
        "text": "(x):\n",
        "token_ids": (5, 6, 7),
        "finish_reason": "length",
        "category": "code",
        "seed": 2**64 - 1,
        "arrival_time": 5.0,
        "token_times": (5.125, 5.25),
        "tokens_per_step": (1, 2),
        "num_draft_tokens": (0, 4),
        "num_accepted_tokens": (0, 1),
        "num_cached_tokens": 1,
    }
    return RequestRecord(**{**defaults, **fields})


NO_STEPS = dict.fromkeys(("token_times", "tokens_per_step", "num_draft_tokens", "num_accepted_tokens", "token_ids"), ())
LATER: dict[str, Any] = {"request_id": "8", "text": "\u00e9 \u2028 \u65e5", "arrival_time": 6.5, **NO_STEPS}


def test_a_directory_holds_the_results_of_one_run(tmp_path: Path) -> None:
    """A second run in it left the first one's vLLM config beside its own notes, metrics beside an interrupted end."""
    config, notes = write_vllm_config(tmp_path, {"method": "ngram"}, ["nothing"])
    write_metrics(tmp_path / "metrics.json", {})
    write_outputs(tmp_path / "partial_outputs.jsonl", [])
    (tmp_path / "mine.txt").touch()
    remove_other_results(tmp_path, [tmp_path / "metrics.json", notes])
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "metrics.json", tmp_path / "mine.txt", notes])
    assert not config.exists()


def test_metrics_come_back_as_written(tmp_path: Path) -> None:
    summary = {"method": "ngram", "speedup": None, "tpot_ms": {"median": 1.25}, "acceptance_per_position": [0.5, None]}
    write_metrics(tmp_path / "new" / "metrics.json", summary)
    assert json.loads((tmp_path / "new" / "metrics.json").read_text()) == summary


def test_a_number_that_is_none_is_refused_rather_than_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_metrics(tmp_path / "metrics.json", {"speedup": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_outputs_have_text_tokens_times_and_per_step_counts(tmp_path: Path) -> None:
    write_outputs(tmp_path / "outputs.jsonl", [record(), record(**LATER)])
    first, second = ((json.loads(line)) for line in (tmp_path / "outputs.jsonl").read_bytes().split(b"\n")[:2])
    assert first == {
        "request_id": "7",
        "category": "code",
        "prompt": "def f",
        "text": "(x):\n",
        "token_ids": [5, 6, 7],
        "finish_reason": "length",
        "seed": 2**64 - 1,
        "arrival": 0.0,
        "num_cached_tokens": 1,
        "ttft_ms": 125.0,
        "tpot_ms": 62.5,
        "num_draft_tokens": [0, 4],
        "num_accepted_tokens": [0, 1],
        "tokens_per_step": [1, 2],
    }
    assert (second["request_id"], second["text"]) == ("8", LATER["text"])
    assert (second["arrival"], second["ttft_ms"], second["tpot_ms"]) == (1.5, None, None), "it came later, and failed"


def test_a_prompt_of_token_ids_is_written_as_token_ids(tmp_path: Path) -> None:
    write_outputs(tmp_path / "outputs.jsonl", [record(prompt=None)])
    line = json.loads((tmp_path / "outputs.jsonl").read_text())
    assert (line["prompt"], line["prompt_token_ids"]) == (None, [3, 4])


def test_text_that_utf8_cannot_hold_is_escaped(tmp_path: Path) -> None:
    write_outputs(tmp_path / "outputs.jsonl", [record(text="bad \ud800")])
    assert json.loads((tmp_path / "outputs.jsonl").read_text())["text"] == "bad \ud800"


def test_a_broken_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "outputs.jsonl"
    path.write_text("old\n")

    def records() -> Iterator[RequestRecord]:
        yield record()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_outputs(path, records())
    assert path.read_text() == "old\n"
    assert [p.name for p in tmp_path.iterdir()] == ["outputs.jsonl"]


def test_what_cannot_be_written_is_said_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").mkdir()
    (tmp_path / "file").write_text("")
    for path, reason in ((tmp_path / "metrics.json", "Is a directory"), (tmp_path / "file" / "x.json", "exists")):
        with pytest.raises(UserError, match=rf"{path} cannot be written .*{reason}"):
            write_metrics(path, {})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "metrics.json"]


def test_written_files_have_the_usual_permissions(tmp_path: Path) -> None:
    """A temporary file made with mkstemp would be readable by its owner alone, also after the rename."""
    (tmp_path / "plain").write_text("")
    write_metrics(tmp_path / "metrics.json", {})
    assert (tmp_path / "metrics.json").stat().st_mode == (tmp_path / "plain").stat().st_mode
