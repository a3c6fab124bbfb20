"""A drafter whose first guesses are mostly wrong is told, where guesses are judged by the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.config import SpeculativeConfig
from runner.drafter_fit import drafter_fit_notes
from runner.metrics import RequestRecord
from runner.run import execute
from runner.workload import WorkloadItem

HEADS = {"eagle3": {"model": "tiny-eagle3"}, "medusa": {"model": "tiny-medusa"}}


def record(accepted: list[int]) -> RequestRecord:
    return RequestRecord(
        request_id="a",
        prompt=None,
        prompt_token_ids=[1],
        text="",
        token_ids=[],
        finish_reason="length",
        category=None,
        seed=0,
        arrival_time=0.0,
        token_times=(),
        tokens_per_step=(),
        num_draft_tokens=(4,) * len(accepted),
        num_accepted_tokens=tuple(accepted),
    )


def notes(accepted: list[int], temperature: float = 0.0, load_format: str = "auto", **method: Any) -> list[str]:
    values = {
        "model": {"model": "tiny", "heads": HEADS, "load_format": load_format},
        "method": {"method": "eagle3", **method},
        "sampler": {"temperature": temperature},
    }
    items = [WorkloadItem(prompt="a")]
    return drafter_fit_notes(SpeculativeConfig.parse(values), items, [record(accepted), record([])])


FEW = [4] * 29 + [0] * 71
ENOUGH = [1] * 30 + [0] * 70


def test_few_right_first_guesses_are_told_with_what_to_check() -> None:
    (note,) = notes(FEW)
    assert note.startswith("only 29% of the first guesses of tiny-eagle3 were accepted at temperature 0; check")
    assert "(method.aux_hidden_state_layer_ids)" in note
    (of_medusa,) = notes(FEW, method="medusa")
    assert "tiny-medusa" in of_medusa and "aux_hidden_state_layer_ids" not in of_medusa
    for method in ({"method": "early_exit"}, {"method": "hybrid", "drafter": "early_exit"}):
        (of_itself,) = notes(FEW, **method)
        assert "of the target's first layers were" in of_itself and "another method.exit_layer" in of_itself
    (of_a_part,) = notes(FEW, method="sparse_kv")
    assert "of the target over a part of its cache were" in of_a_part and "raise method.num_recent_tokens" in of_a_part


@pytest.mark.parametrize(
    "case",
    [
        {"accepted": ENOUGH},
        {"accepted": FEW[:-1]},
        {"accepted": []},
        {"accepted": FEW, "temperature": 0.7},
        {"accepted": FEW, "load_format": "dummy"},
        {"accepted": FEW, "rejection_sample_method": "synthetic", "synthetic_acceptance_rate": 0.1},
        {"accepted": FEW, "method": "ngram"},
    ],
    ids=["enough", "too few to say", "none", "sampled", "random weights", "not judged", "no drafter"],
)
def test_nothing_is_told_where_it_would_say_nothing(case: dict[str, Any]) -> None:
    assert notes(**case) == []


@pytest.mark.parametrize(("taps", "num_notes"), [([2, 4, 5], 0), ([0, 0, 0], 1)])
def test_a_head_that_reads_other_states_than_it_learned_from_is_told_of(
    taps: list[int], num_notes: int, tmp_path: Path
) -> None:
    values = {
        "model": {"model": "tiny", "heads": HEADS},
        "method": {"method": "eagle3", "aux_hidden_state_layer_ids": taps},
        "sampler": {"temperature": 0.0, "max_tokens": 48},
        "workload": {"name": "demo", "limit": 8},
        "tracking": "none",
        "hardware": {"num_gpu_blocks_override": 320},
        "baseline": False,
    }
    summary = execute(SpeculativeConfig.parse(values), tmp_path)
    assert len([note for note in summary["notes"] if "of the first guesses of tiny-eagle3" in note]) == num_notes
