"""python -m runner.benchmarks.generate: both sides have the same weights, and what is said of them is measured."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.benchmarks import generate

SMALL = {
    "model_type": "granitemoehybrid",
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 32,
    "shared_intermediate_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["mamba", "attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": None,
}
LENGTHS = ["--prompt-len", "9", "--output-len", "5", "--rounds", "2"]


def _found(arguments: list[str], tmp_path: Path) -> dict[str, Any]:
    threads = torch.get_num_threads()
    assert generate.main([*LENGTHS, *arguments, "--threads", str(threads), "--json", str(tmp_path / "found.json")]) == 0
    found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    return found


def test_the_tiny_target_says_what_transformers_says_by_every_method(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _found([], tmp_path)
    err = capsys.readouterr().err
    assert all(f"{method}: 16 of 16 texts equal transformers'" in err for method in ("none", "ngram", "draft_model"))
    assert found["conditions"]["model"] == "tiny" and found["conditions"]["dtype"] == "float32"
    assert len(found["ratios"]) == len(generate._COMPARISONS)


def test_another_model_is_compared_by_its_config_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights are drawn once, for both sides, and nothing is left of them."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")
    drawn = tmp_path / "temporary"
    drawn.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(drawn))
    before = torch.get_rng_state()
    found = _found(["--model", str(tmp_path)], tmp_path)
    shown = capsys.readouterr()
    assert "none: 16 of 16 texts equal transformers'" in shown.err and "ngram" not in shown.err
    assert str(tmp_path)[:20] in shown.out and found["conditions"]["model"] == str(tmp_path)
    assert set(found["ratios"]) == {
        "none, batch 1 / transformers, batch 1",
        "none, 16 concurrent / transformers, 16 one by one",
        "none, 16 concurrent / transformers, padded batch of 16",
    }
    assert list(drawn.iterdir()) == [] and torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (None, [], "--model must be a directory with a config.json, got "),
        (SMALL, ["--output-len", "56"], "--prompt-len and --output-len must be 64 tokens together at most"),
        (
            {**SMALL, "model_type": "nope"},
            [],
            "--model must hold the config.json of a language model that transformers",
        ),
    ],
    ids=["no config", "too long", "unknown"],
)
def test_a_model_that_cannot_be_compared_is_refused_with_the_remedy(
    config: dict[str, Any] | None,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    try:
        status = generate.main([*LENGTHS, "--model", str(tmp_path), *arguments])
    except SystemExit as ended:
        status = int(str(ended.code))
    assert status == 2 and message in " ".join(capsys.readouterr().err.split())
