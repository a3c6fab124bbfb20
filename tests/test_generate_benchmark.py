"""python -m runner.benchmarks.generate: both sides have the same weights, and what is said of them is measured."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.benchmarks import generate
from runner.tiny import TARGET_DIR

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
    "eos_token_id": list(range(48)),  # which half of all tokens are
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
    quantized = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}  # dense are drawn
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **quantized}), encoding="utf-8")
    drawn = tmp_path / "temporary"
    drawn.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(drawn))
    before = torch.get_rng_state()
    found = _found(["--model", str(tmp_path)], tmp_path)
    shown = capsys.readouterr()
    assert "none: 16 of 16 texts equal transformers'" in shown.err and "ngram" not in shown.err
    assert str(tmp_path)[:20] in shown.out
    assert (found["conditions"]["model"], found["conditions"]["weights"]) == (str(tmp_path), "dense")
    assert set(found["ratios"]) == {
        "none, batch 1 / transformers, batch 1",
        "none, 16 concurrent / transformers, 16 one by one",
        "none, 16 concurrent / transformers, padded batch of 16",
    }
    assert list(drawn.iterdir()) == [] and torch.equal(before, torch.get_rng_state())


def test_what_a_checkpoint_says_of_generation_holds_on_neither_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(TARGET_DIR, tmp_path / "target")
    penalties = {"repetition_penalty": 2.0, "eos_token_id": list(range(0, 512, 2)), "do_sample": False}
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps(penalties), encoding="utf-8")
    _found(["--model", str(tmp_path / "target")], tmp_path)
    assert "none: 16 of 16 texts equal transformers'" in capsys.readouterr().err


def test_a_full_disk_is_told_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import PreTrainedModel

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", fail)
    assert generate.main([*LENGTHS, "--model", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert f"the weights of {tmp_path} must find room in " in message and "set TMPDIR" in message


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (None, [], "--model must be a directory with a config.json, got "),
        (SMALL, ["--output-len", "56"], "--prompt-len and --output-len must be 64 tokens together at most"),
        ({**SMALL, "model_type": "nope"}, [], "does not know; choose another model"),
        ({**SMALL, "num_attention_heads": 0}, [], "--model"),
        ({"model_type": "t5", "vocab_size": 9, "n_positions": 99}, [], "--model"),
        ("{", [], "--model"),
        (
            {"model_type": "mamba", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1},
            [],
            "'mamba' has",
        ),
    ],
    ids=["no config", "too long", "unknown", "no heads", "an encoder", "no JSON", "a state of others"],
)
def test_a_model_that_cannot_be_compared_is_refused_with_the_remedy(
    config: dict[str, Any] | str | None,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
    try:
        status = generate.main([*LENGTHS, "--model", str(tmp_path), *arguments])
    except SystemExit as ended:
        status = int(str(ended.code))
    shown = " ".join(capsys.readouterr().err.split())
    assert status == 2 and message in shown and tempfile.gettempdir() + "/tmp" not in shown
