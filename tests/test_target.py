"""The dtype of a run: what was asked for, or the checkpoint's own where the device computes with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from runner import target
from runner.engine.checkpoint import ModelSource
from runner.target import resolve_dtype
from runner.tiny import TARGET_DIR
from tests.conftest import TARGET_CONFIG

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("is_fast", [True, False], ids=["multiplies bfloat16", "does not"])
def test_auto_is_the_checkpoints_own_but_for_a_cpu_that_would_have_to_widen_it(
    is_fast: bool, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "multiplies_and_adds", lambda: True)
    monkeypatch.setattr(target, "multiplies_pairs", lambda: is_fast)
    (tmp_path / "config.json").write_text(json.dumps({**TARGET_CONFIG, "dtype": stored}))
    source = ModelSource(model=str(tmp_path))
    own = getattr(torch, stored)
    assert resolve_dtype("auto", GPU, source) == own
    assert resolve_dtype("auto", CPU, source) == (own if is_fast and stored == "bfloat16" else torch.float32)
    assert resolve_dtype("float16", CPU, source) == torch.float16


def test_the_tiny_family_computes_in_float32() -> None:
    assert resolve_dtype("auto", CPU, ModelSource(model=str(TARGET_DIR))) == torch.float32
