"""`python -m runner.train`: a head of every kind for targets that are not ours, saved so that the engine runs it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from runner.cli.compose import Composer
from runner.config.checkpoint_method import method_of_model
from runner.engine.errors import UserError
from runner.engine.memory import release_unused
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM
from runner.tiny import DEMO_PATH, TARGET_DIR
from runner.tiny.recipe import HEAD_OPTIMIZER
from runner.train import fit, training
from runner.train.command import main
from runner.train.heads.for_target import METHODS, head_for, tapped_layers
from runner.train.texts import split_prompts, write_texts
from runner.train.training import RECORD_FILE
from runner.tune.command import main as tune
from runner.workload import WorkloadItem
from tests.quantized_checkpoints import LAYOUTS, pack_experts, quantize_checkpoint

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 2048,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def random_target(directory: Path, model_type: str, **keys: Any) -> Path:
    """A checkpoint of another family with the tiny family's tokenizer, as it would come from the hub."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SMALL, **keys}))
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET_DIR / name, directory / name)
    return directory


@pytest.fixture(autouse=True)
def _few_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training frees memory twice, each time in a search for garbage over all that tests have imported."""
    monkeypatch.setattr(training, "release_unused", lambda: None)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"def f{index}(x):\n    return x"}) + "\n" for index in range(4)))
    return path


def train(target: Path, prompts: Path, output: Path, *argv: str) -> int:
    return main(
        [
            *("--output", str(output), "--steps", "2", "--rows", "2", "--length", "16", "--texts", "2"),
            *("model=hf", f"model.model={target}", "workload=jsonl", f"workload.path={prompts}"),
            *("sampler.max_tokens=12", "hardware=cpu", "hardware.num_threads=1", "tracking=none", *argv),
        ]
    )


@pytest.mark.parametrize(
    ("method", "model_type", "keys"),
    [
        *((method, "qwen3", {}) for method in METHODS),
        ("eagle3", "mixtral", {"num_local_experts": 2}),
        ("eagle3", "granitemoe", {"num_local_experts": 2, "num_experts_per_tok": 1}),  # by transformers' own code
    ],
)
def test_a_head_for_any_target_is_read_by_the_engine_and_changes_no_token(
    tmp_path: Path,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
    method: str,
    model_type: str,
    keys: dict[str, Any],
) -> None:
    target, output = random_target(tmp_path / "target", model_type, **keys), tmp_path / "a head's"
    shortest = ("method.num_speculative_tokens=3", "--length", "5")
    assert train(target, prompts, output, f"method={method}", *shortest) == 0
    assert method_of_model(str(output)) == method
    record = json.loads((output / RECORD_FILE).read_text())
    assert record["steps"] == 2 and record["tokens"] == 2 * 2 * 5
    held_out = record["held_out"]
    assert held_out["identical_to_baseline"] == {"requests": 1, "identical": 1}
    assert held_out["num_draft_tokens"] > 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix("use it: python -m runner "))
    with Composer() as composer:
        assert composer.config(command).model_dump()["method"]["model"] == str(output)


def test_training_teaches_a_head_what_the_target_says_next() -> None:
    target = fit.load_frozen(TARGET_DIR, device=CPU, dtype=torch.float32, trust_remote_code=False)
    texts = [json.loads(line)["prompt"] for line in DEMO_PATH.read_text().splitlines()[:20]]
    tokens = AutoTokenizer.from_pretrained(TARGET_DIR)(texts)["input_ids"]
    flat = torch.tensor([token for text in tokens for token in text])
    windows = flat[: len(flat) // 64 * 64].view(-1, 64)
    learnt, unseen = windows[:-8], fit.read_states(target, windows[-8:])
    head = head_for(
        "eagle",
        target,
        num_speculative_tokens=2,
        token_counts=torch.bincount(flat, minlength=2048),
        states=unseen,
        seed=0,
    )

    def share_of_right_guesses() -> float:
        guesses = head.draft(unseen, 1)[:, 1:-1, 0]
        return (guesses == unseen.token_ids[:, 2:]).float().mean().item()

    before = share_of_right_guesses()
    fit.fit_head(
        head, learnt, num_steps=20, num_rows=4, optimizer=HEAD_OPTIMIZER, seed=0, report=lambda done, total, note: None
    )
    assert before < 0.05 and share_of_right_guesses() > 0.04


def test_what_cannot_be_trained_is_said_before_anything_is_loaded(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "missing"
    for argv, message in (
        (["method=ngram"], "method must be one of eagle, eagle3"),
        ([], "method must be one of eagle, eagle3"),
        (["~method"], "method must be one of eagle, eagle3"),
        (["method=eagle", "model.load_format=dummy"], "must not be dummy"),
        (["method=eagel"], "did you mean 'eagle'"),
        (["method=eagle", "method.num_speculative_tokens=0"], "num_speculative_tokens must be >= 1"),
        (["method=eagle", "+model.hf_overrides.rope_theta=3"], "model.hf_overrides must be null"),
    ):
        assert train(target, prompts, tmp_path / "new", *argv) == 2
        assert message in capsys.readouterr().err
    missing = ["method=eagle", "tracking=jsonl", f"workload.path={tmp_path / 'missing.jsonl'}"]
    assert train(target, prompts, tmp_path / "new", *missing) == 2
    assert "workload.path must be a .jsonl file" in capsys.readouterr().err
    assert main(["--output", str(tmp_path / "new"), "method=eagle", "workload=synthetic"]) == 2
    assert "workload must have prompts" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompts.jsonl"]


@pytest.mark.parametrize(("program", "purpose"), [(main, "to train a head"), (tune, "to be tuned")])
@pytest.mark.parametrize("config", ['{"method": "eagle3", "num_speculative_tokens": 2}', "{method: ngram}"])
def test_a_speculative_config_is_to_be_written_as_a_method(
    program: Callable[..., int], purpose: str, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training found fault with the default method instead, and JSON was told to be written as it was."""
    assert program(["--output", str(tmp_path / "new"), f"speculative_config={config}"]) == 2
    told = capsys.readouterr().err
    assert f"speculative_config must be null {purpose}\n" in told and "write its keys as method=<method>" in told


@pytest.mark.parametrize("program", [main, tune])
def test_options_of_a_users_own_class_are_taken_by_every_program(
    program: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["method=custom_class", "method.model=a.B", "method.options.x=1"]
    assert program(["--output", str(tmp_path / "new"), *own, "repeats=2"]) == 2
    told = capsys.readouterr().err
    assert "repeats must be left out" in told if program is tune else "method must be one of eagle" in told, told


@pytest.mark.parametrize("program", [main, tune])
def test_an_output_that_is_taken_or_has_no_room_is_refused_and_left_alone(
    program: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """runner.tune wrote over what an earlier run had found. What root may not do only the attempt shows."""
    notes = tmp_path / "full" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    for output, message in (
        (notes.parent, "argument --output: must be a new or empty directory"),
        (notes, "argument --output: must be a new or empty directory"),
        (notes / "head", "argument --output: must be a directory that can be made"),
        (tmp_path / ("x" * 300), "fails: File name too long; choose another"),
        ("", "got '': it is empty"),
        *([("/proc/x", "writing to /proc fails")] if sys.platform == "linux" else []),
    ):
        with pytest.raises(SystemExit) as ended:
            program(["method=eagle", "--output", str(output)])
        assert ended.value.code == 2 and message in capsys.readouterr().err
    assert list(tmp_path.rglob("*")) == [notes.parent, notes]


def test_a_target_that_scales_its_embeddings_is_refused(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = random_target(tmp_path / "target", "gemma2", query_pre_attn_scalar=16)
    assert train(target, prompts, tmp_path / "head", "method=eagle") == 2
    assert "no published layout of a head can say" in capsys.readouterr().err
    assert not (tmp_path / "head").exists()


def test_a_target_in_mxfp4_is_trained_for_as_it_is(tmp_path: Path, prompts: Path) -> None:
    shape = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 96, "pad_token_id": 0}
    target = random_target(tmp_path / "target", "gpt_oss", **shape)
    pack_experts(target)
    assert train(target, prompts, tmp_path / "head", "method=eagle3", "method.num_speculative_tokens=3") == 0
    record = json.loads((tmp_path / "head" / RECORD_FILE).read_text())
    assert record["held_out"]["identical_to_baseline"] == {"requests": 1, "identical": 1}


def test_a_quantized_checkpoint_is_refused_before_it_writes_a_text(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = random_target(tmp_path / "target", "llama")
    quantize_checkpoint(target, LAYOUTS["GPTQ"])
    assert train(target, prompts, tmp_path / "head", "method=eagle") == 2
    message = capsys.readouterr().err
    assert "must be a dense checkpoint to train a head for, got a quantized one (gptq); name the" in message
    assert not (tmp_path / "head").exists()


def test_an_interrupt_while_it_trains_leaves_nothing_behind(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any, **keys: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fit, "run_steps", interrupt)
    target = random_target(tmp_path / "target", "llama")
    assert train(target, prompts, tmp_path / "head", "method=medusa", "tracking=jsonl") == 130
    assert "interrupted; nothing was saved" in capsys.readouterr().err
    assert json.loads((tmp_path / "runs" / "runs.jsonl").read_text())["status"] == "KILLED"
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl", "runs", "target"}


def test_a_training_run_is_tracked_as_other_runs_are(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "release_unused", release_unused)  # here it frees memory as it does for users
    target = random_target(tmp_path / "target", "llama")
    assert train(target, prompts, tmp_path / "head", "method=medusa", "tracking=jsonl") == 0
    (run,) = map(json.loads, (tmp_path / "runs" / "runs.jsonl").read_text().splitlines())
    assert run["status"] == "FINISHED" and run["run_name"] == "target-medusa-training"
    assert run["summary"]["training"]["steps"] == run["params"]["training.steps"] == 2
    machine = run["summary"]["machine"]
    tags = {"lossless": "tokens", "device": "cpu", "device_name": machine["device_name"], "dtype": machine["dtype"]}
    assert run["tags"].items() >= tags.items()
    assert run["summary"]["num_requests"] == 1 and run["artifacts"] == [str(tmp_path / "head" / RECORD_FILE)]


def test_texts_shorter_than_a_window_are_refused(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = random_target(tmp_path / "target", "llama")
    assert train(target, prompts, tmp_path / "head", "method=eagle", "--length", "128", "--texts", "1") == 2
    assert "--length 128 asks for more" in capsys.readouterr().err
    assert train(target, prompts, tmp_path / "head", "method=eagle", "--length", "129") == 2
    assert "--length must be <= 128" in capsys.readouterr().err
    assert train(target, prompts, tmp_path / "head", "method=eagle", "--length", "4") == 2
    assert "--length must be >= 6, method.num_speculative_tokens + 2, got 4; raise it" in capsys.readouterr().err


def test_training_stops_where_the_loss_is_no_number_any_more(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = random_target(tmp_path / "target", "llama")
    assert train(target, prompts, tmp_path / "head", "method=medusa", "--learning-rate", "1e30", "--steps", "9") == 2
    assert re.search(r"the loss is (nan|inf) at step \d; lower --learning-rate", capsys.readouterr().err)
    assert not (tmp_path / "head").exists()


def test_a_line_of_its_own_length_is_learnt_at_that_length() -> None:
    """A head learnt from answers of the sampler's length, and was measured on answers of the line's."""
    llm = LLM("tiny", device="cpu")
    items = [WorkloadItem(prompt={"prompt_token_ids": [5, 6]}, sampling=own) for own in ({}, {"max_tokens": 3})]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    texts = write_texts(llm, items, params, num_texts=2, length=1, report=lambda done, total, note: None)
    assert len(texts.windows) == 2 * (2 + 8) + 2 * (2 + 3)
    with pytest.raises(UserError, match=r"^the workload has max_tokens=3: min_tokens must be"):
        write_texts(llm, items, replace(params, min_tokens=5), num_texts=1, length=1, report=lambda *_: None)


def test_every_tenth_prompt_is_held_out_and_at_least_one() -> None:
    items = [WorkloadItem(prompt=str(index)) for index in range(40)]
    learnt, held_out = split_prompts(items)
    assert [item.prompt for item in held_out] == ["5", "15", "25", "35"] and len(learnt) == 36
    assert [len(part) for part in split_prompts(items[:2])] == [1, 1]
    with pytest.raises(UserError, match="at least 2 prompts"):
        split_prompts(items[:1])


@pytest.mark.parametrize(
    ("num_layers", "layers"), [(32, (2, 16, 29)), (80, (2, 40, 77)), (8, (2, 4, 5)), (6, (2, 4, 5)), (4, (1, 2, 3))]
)
def test_taps_are_three_depths_of_any_target(num_layers: int, layers: tuple[int, ...]) -> None:
    assert tapped_layers(num_layers) == layers
