"""What a run says of the bitwise promise: kept, or off with the reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import create_autospec

import pytest
import torch

from runner.assembly import Assembly
from runner.config import SpeculativeConfig
from runner.engine.decoder import Decoder
from runner.engine.transformers_model import TransformersModel
from runner.promise import kept_by_run, promise_notes
from runner.workload import WorkloadItem


def of_run(
    *,
    rule: str = "strict",
    batch_invariant: bool = True,
    is_ours: bool = True,
    can_keep: bool = True,
    of_check: bool = True,
    device: str,
) -> tuple[Any, list[str]]:
    """can_keep: what of rows' bits a launch decides is computed in other ways; of_check: the start found them equal."""
    config = SpeculativeConfig.parse(
        {
            "model": {"model": "tiny"},
            "method": {"method": "ngram", "rejection_sample_method": rule},
            "sampler": {"temperature": 1.0},
            "hardware": {"batch_invariant": batch_invariant},
        }
    )
    model = create_autospec(Decoder if is_ours else TransformersModel, instance=True)
    if not is_ours:
        model.keeps_rows = can_keep
    target = SimpleNamespace(model=model, is_row_invariant=batch_invariant and can_keep and of_check)
    engine = cast(Assembly, SimpleNamespace(target=target, device=torch.device(device)))
    items = [WorkloadItem(prompt="a")]
    return kept_by_run(config, engine, items), promise_notes(config, engine, items)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_kept_promise_needs_no_note(device: str) -> None:
    assert of_run(device=device) == of_run(device=device, is_ours=False) == ("tokens", [])


@pytest.mark.parametrize(
    ("off", "note"),
    [
        ({"is_ours": False, "can_keep": False, "device": "cuda"}, "modelling code, whose rows depend on the batch"),
        ({"is_ours": False, "of_check": False, "device": "cpu"}, "depend on the batch, as a check at the start found"),
        ({"batch_invariant": False, "device": "cuda"}, "hardware.batch_invariant=false"),
        ({"batch_invariant": False, "is_ours": False, "device": "cpu"}, "hardware.batch_invariant=false"),
        ({"of_check": False, "device": "cpu"}, "this CPU's matrix products depend on a row's place, as a check"),
        ({"of_check": False, "device": "cuda"}, "this GPU's kernels depend on a row's place, as a check"),
    ],
)
def test_a_promise_that_is_off_says_why_and_marks_the_tokens(off: dict[str, Any], note: str) -> None:
    kept, notes = of_run(**off)
    assert kept == "unguaranteed" and len(notes) == 1
    assert notes[0].startswith("bitwise promise off: ") and note in notes[0]


def test_a_rule_that_keeps_less_than_the_tokens_says_so_whatever_the_rows_do() -> None:
    for of_check in (True, False):
        kept, notes = of_run(rule="probabilistic", of_check=of_check, device="cuda")
        assert kept == "distribution" and len(notes) == 1 + (not of_check)
        assert "keeps the distribution of plain decoding's tokens, not the very tokens" in notes[0]
