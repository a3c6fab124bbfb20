"""python -m runner.benchmarks.decoding: what it says it times is what it times, on a very small shape on the CPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.benchmarks import decoding, generate, ngram, suffix
from runner.benchmarks.decoding_cases import CASES, NUM_PROMPTS, DecodingCase, Quantities, read_ratio
from runner.benchmarks.identical_texts import NUM_TEXTS, VARIANTS
from runner.benchmarks.shared_target import SharedTarget
from runner.benchmarks.steady_steps import SteadyRun, TimedStep, decode_steadily
from runner.engine.errors import UserError
from tests.conftest import TARGET_CONFIG

LENGTHS = ["--prompt-tokens", "6", "--new-tokens", "8"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a config.json and nothing else."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(TARGET_CONFIG))
    return str(directory)


@pytest.fixture(scope="module")
def target(model: str) -> SharedTarget:
    return SharedTarget(model, device="cpu", prompt_tokens=6, new_tokens=200, max_batch_size=64)


def run(model: str, *options: str) -> int:
    return decoding.main(["--model", model, "--device", "cpu", *LENGTHS, *options])


def test_a_whole_run_writes_every_case(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "decoding.json"
    assert run(model, "--rounds", "2", "--json", str(file)) == 0
    found = json.loads(file.read_text())
    cases: dict[str, Any] = found["cases"]
    assert found["is_complete"] and list(cases) == list(decoding.CASE_NAMES)
    assert {"cpu", "gpu", "versions", "commit"} <= found.keys() and {"torch", "triton"} <= found["versions"].keys()
    assert found["conditions"]["shape"] == TARGET_CONFIG and found["conditions"]["dtype"] == "float32"
    assert cases["start"]["total_s"] == cases["start"]["assemble_s"] + cases["start"]["first_steps_s"] > 0
    for name, case in CASES.items():
        assert cases[name]["rounds"] == 2 and cases[name]["goal"] is None, "goals are for another machine"
        spread = cases[name][case.quantity]
        assert 0 < spread["p20"] <= spread["median"] <= spread["p80"]
    assert [cases[name]["tokens_per_step"]["median"] for name in ("plain", "plain-64")] == [1, 1]
    assert cases["eagle3-64"]["tokens_per_step"]["median"] == pytest.approx(2.6, abs=0.2)
    speed, seconds = cases["plain-64"]["tokens_per_second"]["median"], cases["plain-64"]["ms_per_step"]["median"] / 1000
    assert speed * seconds == pytest.approx(64, rel=0.3), "medians of two rounds"
    assert cases["identical"].keys() == {variant.label for variant in VARIANTS}
    assert all(counts["identical"] == counts["requests"] == NUM_TEXTS for counts in cases["identical"].values())
    assert cases["identical"]["suffix, 8 tokens, texts seen before"]["accepted"] > NUM_TEXTS, "drafts were tested"
    table = capsys.readouterr().out
    assert "batch 64" in table and "goal" not in table


def test_a_cpu_is_timed_in_the_dtype_that_is_asked_for(model: str, tmp_path: Path) -> None:
    file = tmp_path / "decoding.json"
    assert (
        run(model, "--dtype", "bfloat16", "--cases", "identical", "verify", "--rounds", "1", "--json", str(file)) == 0
    )
    found = json.loads(file.read_text())
    assert found["conditions"]["dtype"] == "bfloat16"
    assert all(counts["identical"] == NUM_TEXTS for counts in found["cases"]["identical"].values())


def test_synthetic_acceptance_makes_the_tokens_a_step_that_the_label_says(target: SharedTarget) -> None:
    """100 steps of 3.9 tokens: the mean's standard deviation is 0.03."""
    found = [CASES["free"].measure(target, seed)["tokens_per_step"] for seed in (1, 2)]
    assert sum(found) / 2 == pytest.approx(3.9, abs=0.1)
    assert found[0] != found[1], "rounds of one seed would all have the same luck"


@pytest.mark.parametrize("name", ["plain", "free", "verify", "eagle3-64", "sparse-8"])
def test_every_timed_step_has_the_full_batch_and_uncut_drafts(name: str, target: SharedTarget) -> None:
    case = CASES[name]
    llm = target.engine(case.method, case.batch_size)
    timed = decode_steadily(llm, target.prompts(case.batch_size), num_new_tokens=12, seed=0)
    num_drafts = case.batch_size * llm.engine.proposer.num_speculative_tokens
    assert {step.num_draft_tokens for step in timed.steps} == {num_drafts}
    assert all(step.num_tokens >= case.batch_size for step in timed.steps)
    assert sum(step.seconds for step in timed.steps) <= timed.seconds
    if name == "plain":
        assert timed.num_tokens == len(timed.steps) == 11, "the first of 12 tokens comes with the prompt"
    llm.engine.block_manager.check_integrity([])


def test_prompts_are_a_step_each_and_compared_with_an_engine_that_is_not_invariant(target: SharedTarget) -> None:
    case = CASES["invariant-prompt"]
    assert case.compared_with is not None
    for each, is_invariant in ((case, True), (case.compared_with, False)):
        run = each.run(target, seed=0)
        assert [step.num_tokens for step in run.steps] == [target.longest_prompt] * NUM_PROMPTS
        llm = target.engine(None, 1, batch_invariant=is_invariant)
        assert llm.config.hardware.batch_invariant is is_invariant
        llm.engine.block_manager.check_integrity([])


def test_the_ratio_is_of_medians_of_steps_with_and_without_drafts() -> None:
    def run(*seconds: float) -> SteadyRun:
        steps = tuple(TimedStep(seconds=each, num_draft_tokens=0, num_tokens=1) for each in seconds)
        return SteadyRun(batch_size=1, seconds=sum(seconds), steps=steps)

    found = read_ratio(run(0.3, 0.3, 9.0), run(0.2, 0.1, 0.2))
    assert found["ratio"] == pytest.approx(1.5) and found["ms_per_step_of_other"] == pytest.approx(200)


def test_an_interrupt_leaves_the_rounds_that_are_there(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = DecodingCase.measure

    def interrupted(case: DecodingCase, target: SharedTarget, seed: int) -> Quantities:
        if seed == 3:
            raise KeyboardInterrupt
        return measure(case, target, seed)

    monkeypatch.setattr(DecodingCase, "measure", interrupted)
    file = tmp_path / "decoding.json"
    assert run(model, "--rounds", "5", "--cases", "plain", "--json", str(file)) == 130
    found = json.loads(file.read_text())
    assert not found["is_complete"] and found["cases"]["plain"]["rounds"] == 2
    table = capsys.readouterr().out
    assert CASES["plain"].label in table and "2 rounds" in " ".join(table.split())


def test_an_error_of_the_device_leaves_the_rounds_that_are_there(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lost all that had been measured before it."""
    measure = DecodingCase.measure

    def failing(case: DecodingCase, target: SharedTarget, seed: int) -> Quantities:
        if seed == 3:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return measure(case, target, seed)

    monkeypatch.setattr(DecodingCase, "measure", failing)
    file = tmp_path / "decoding.json"
    with pytest.raises(RuntimeError, match="CUDA error"):
        run(model, "--rounds", "5", "--cases", "plain", "--json", str(file))
    found = json.loads(file.read_text())
    assert not found["is_complete"] and found["cases"]["plain"]["rounds"] == 2


def test_shapes_are_read_where_there_is_no_hydra(model: str) -> None:
    """A directory's, and those that have a name."""
    without = (
        "import sys; sys.modules |= {'hydra': None, 'omegaconf': None}; import runner.benchmarks.decoding; "
        "from runner.benchmarks.shared_target import SharedTarget; "
        "[SharedTarget(model, device='cpu', prompt_tokens=4, new_tokens=4, max_batch_size=1) "
        "for model in (sys.argv[1], 'llama8b')]"
    )
    done = subprocess.run([sys.executable, "-c", without, model], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_names_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        decoding.main(["--help"])
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in decoding.CASE_NAMES) and "(default: llama8b)" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cases", "fast"], r"invalid choice: 'fast' \(choose from '?start"),
        (["--rounds", "0"], r"--rounds: must be an integer >= 1, got '0'"),
    ],
)
def test_a_mistaken_option_is_refused_with_the_remedy(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        decoding.main(options)
    assert re.search(message, capsys.readouterr().err)


def test_the_default_shape_is_refused_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "decoding.json"
    assert decoding.main(["--json", str(file)]) == 2
    message = capsys.readouterr().err
    assert "--model llama8b needs a CUDA GPU" in message and "--model tiny" in message and "--device cpu" in message
    assert not file.exists()


@pytest.mark.parametrize(
    ("gpu", "options", "shown"),
    [
        ("NVIDIA H200", [], True),
        ("NVIDIA H200", ["--new-tokens", "8"], False),
        ("NVIDIA H200", ["--model", "tiny"], False),
        ("NVIDIA H200", ["--device", "cpu"], False),
        ("NVIDIA H100 80GB HBM3", [], False),
    ],
)
def test_goals_stand_only_beside_numbers_of_their_conditions(
    gpu: str, options: list[str], shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
    assert decoding._has_goals(decoding._parse(options)) is shown


def test_the_default_shape_needs_no_hub() -> None:
    target = SharedTarget("llama8b", device="cpu", prompt_tokens=128, new_tokens=256, max_batch_size=64)
    assert target.model.load_format == "dummy" and target.model.hf_config is not None
    assert (target.model.hf_config["hidden_size"], target.model.hf_config["num_hidden_layers"]) == (4096, 32)
    assert target.model.heads is not None
    head = target.model.heads["eagle3"].hf_config
    assert head is not None and (head["num_hidden_layers"], head["draft_vocab_size"]) == (1, 32_000)


def test_the_head_of_a_target_whose_layers_differ_is_one_layer(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "gpt_oss", **sizes, "head_dim": 16, "num_hidden_layers": 4, "num_local_experts": 4}
    config |= {"vocab_size": 96, "layer_types": ["sliding_attention", "full_attention"] * 2}
    assert CASES["eagle3"].measure(_target_of(config, tmp_path), 0)


@pytest.mark.parametrize("is_nested", [False, True], ids=["a language model", "one inside a model that sees"])
def test_the_head_of_another_family_is_like_llamas(is_nested: bool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "gemma3_text", **sizes, "head_dim": 16, "num_hidden_layers": 4, "vocab_size": 96}
    config |= {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "pad_token_id": 0}
    nested = {"model_type": "gemma3", "text_config": config, "vision_config": {"model_type": "siglip_vision_model"}}
    assert CASES["eagle3"].measure(_target_of(nested if is_nested else config, tmp_path), 0)


def _target_of(config: dict[str, Any], directory: Path) -> SharedTarget:
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return SharedTarget(str(directory), device="cpu", prompt_tokens=8, new_tokens=16, max_batch_size=1)


def test_texts_that_outgrow_the_model_are_refused_with_the_remedy(model: str) -> None:
    target = SharedTarget(model, device="cpu", prompt_tokens=100, new_tokens=150, max_batch_size=1)
    with pytest.raises(UserError, match=r"must be 240 together at most \(the model takes 256\), got 100 \+ 150; lower"):
        CASES["free"].measure(target, 0)


def test_prompts_that_outlast_the_first_text_are_refused(target: SharedTarget) -> None:
    """A batch of which a part has ended is not the batch that the label says."""
    llm = target.engine(None, 64)
    with pytest.raises(UserError, match="--new-tokens must outlast the prompts, got 1"):
        decode_steadily(llm, target.prompts(64), num_new_tokens=1, seed=0)
    llm.engine.block_manager.check_integrity([])


@pytest.mark.parametrize(
    ("benchmark", "option", "minimum"),
    [(generate, "--rounds", 1), (ngram, "--requests", 1), (suffix, "--responses", 1), (suffix, "--length", 101)],
)
def test_a_size_that_leaves_nothing_to_measure_is_refused(
    benchmark: Any, option: str, minimum: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """They ran, some for a minute, and ended in a division by zero, in numba's compiler or at an empty list."""
    with pytest.raises(SystemExit) as ended:
        benchmark.main([option, str(minimum - 1)])
    assert ended.value.code == 2
    assert f"argument {option}: must be an integer >= {minimum}, got '{minimum - 1}'" in capsys.readouterr().err


@pytest.mark.parametrize("benchmark", [generate, decoding, ngram, suffix])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, complaint in (
        (tmp_path / "missing" / "found.json", "must lie in a directory that exists"),
        (tmp_path, f"must be a file that can be written, got '{tmp_path}': it is a directory; choose another"),
        (tmp_path / ("x" * 300), "File name too long; choose another"),
    ):
        with pytest.raises(SystemExit) as ended:
            benchmark.main(["--json", str(path)])
        assert ended.value.code == 2
        error = capsys.readouterr().err
        assert "argument --json: must " in error and complaint in error
    assert list(tmp_path.iterdir()) == []
