"""Claims about the tiny family: the committed files, the corpus behind them, the demo workload and the recipe."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from functools import lru_cache
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from runner.tiny import DEMO_PATH, DRAFT_DIR, MANIFEST_PATH, TARGET_DIR, TINY_DIR
from runner.tiny.acceptance import measure_acceptance
from runner.tiny.corpus import Corpus, TokenStream, is_held_out, read_corpus
from runner.tiny.distill import held_out_loss
from runner.tiny.manifest import file_records, read_manifest, replaced_directory
from runner.tiny.model import ModelShape, build_model, load_model, num_parameters
from runner.tiny.optimizer import OptimizerSettings, lr_factor
from runner.tiny.recipe import Phase, Recipe, train_draft, train_target
from runner.tiny.tokenizer import END_OF_TEXT, END_OF_TEXT_ID

CPU = torch.device("cpu")
CATEGORIES = {"code_completion", "code_edit", "structured_data", "docstrings", "repetitive_logs"}
MAX_CHECKPOINT_BYTES = 16 * 1024**2


@lru_cache
def shared_tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(TARGET_DIR)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return shared_tokenizer()


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return read_corpus()


# The committed files.


def test_every_checkpoint_file_has_the_hash_in_the_manifest() -> None:
    assert file_records(TINY_DIR, ("target", "draft")) == read_manifest(MANIFEST_PATH)["files"]


def test_checkpoints_together_are_small() -> None:
    assert sum(record["bytes"] for record in read_manifest(MANIFEST_PATH)["files"].values()) <= MAX_CHECKPOINT_BYTES


@pytest.mark.parametrize("directory", [TARGET_DIR, DRAFT_DIR], ids=["target", "draft"])
def test_weights_are_stored_in_bfloat16_in_plain_layout(directory: Path) -> None:
    names = {path.name for path in directory.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"


def test_target_and_draft_share_one_vocabulary(tokenizer: PreTrainedTokenizerFast) -> None:
    assert (TARGET_DIR / "tokenizer.json").read_bytes() == (DRAFT_DIR / "tokenizer.json").read_bytes()
    for directory in (TARGET_DIR, DRAFT_DIR):
        config = json.loads((directory / "config.json").read_text())
        assert config["vocab_size"] == len(tokenizer)
        assert config["eos_token_id"] == tokenizer.eos_token_id == END_OF_TEXT_ID
    assert tokenizer.convert_ids_to_tokens(END_OF_TEXT_ID) == END_OF_TEXT


def test_manifest_counts_the_stored_parameters() -> None:
    models = read_manifest(MANIFEST_PATH)["models"]
    for name, directory in (("target", TARGET_DIR), ("draft", DRAFT_DIR)):
        assert num_parameters(load_model(directory, CPU)) == models[name]["parameters"]
    assert models["draft"]["parameters"] * 4 < models["target"]["parameters"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text())
@example("def f(x):\n\treturn  x  # é ☃ \U0001f642\r\n\n   ")
@example(f"a {END_OF_TEXT} b")
def test_tokenizer_gives_any_unicode_text_back(text: str) -> None:
    tokenizer = shared_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_target_is_clearly_better_than_the_draft(corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> None:
    windows = TokenStream(corpus.held_out, tokenizer).consecutive(length=256)[:8]
    target, draft = (held_out_loss(load_model(directory, CPU), windows) for directory in (TARGET_DIR, DRAFT_DIR))
    assert target < draft - 0.2
    models = read_manifest(MANIFEST_PATH)["models"]
    assert models["target"]["held_out_loss"] < models["draft"]["held_out_loss"] - 0.2


# The corpus.


def test_corpus_split_is_deterministic_and_disjoint(corpus: Corpus) -> None:
    assert read_corpus() == corpus
    assert read_corpus().sha256 == corpus.sha256
    train, held_out = ({document.path for document in split} for split in (corpus.train, corpus.held_out))
    assert train and held_out and not train & held_out
    assert not {document.text for document in corpus.train} & {document.text for document in corpus.held_out}
    assert all(is_held_out(path) for path in held_out) and not any(is_held_out(path) for path in train)


def test_corpus_skips_installed_packages_tests_and_copies(tmp_path: Path) -> None:
    code = "x = 1\n" * 100
    for index in range(60):
        (tmp_path / f"module_{index}.py").write_text(code + f"y = {index}\n")
    for path in ("site-packages/a.py", "test/b.py", "pkg/tests/c.py", "_sysconfigdata_x.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(code + f"# {path}\n")
    (tmp_path / "z_copy.py").write_text(code + "y = 0\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n" * 100)
    corpus = read_corpus(tmp_path)
    assert {d.path for d in (*corpus.train, *corpus.held_out)} == {f"module_{index}.py" for index in range(60)}


def test_an_empty_corpus_is_refused_with_the_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=str(tmp_path)):
        read_corpus(tmp_path)


def test_an_epoch_of_windows_repeats_no_token(corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> None:
    stream = TokenStream(corpus.held_out[:4], tokenizer)
    stream.token_ids = torch.arange(len(stream))
    windows = stream.windows(length=32, generator=torch.Generator().manual_seed(3))
    epoch = torch.cat(list(islice(windows, len(stream) // 32 - 1)))
    assert len(epoch.unique()) == len(epoch)
    again = stream.windows(length=32, generator=torch.Generator().manual_seed(3))
    assert torch.equal(next(again), epoch[:32])


# The demo workload.


def test_demo_workload_is_well_formed(tokenizer: PreTrainedTokenizerFast) -> None:
    items = [json.loads(line) for line in DEMO_PATH.read_text(encoding="utf-8").splitlines()]
    assert all(set(item) == {"id", "category", "prompt"} for item in items)
    assert len({item["id"] for item in items}) == len({item["prompt"] for item in items}) == len(items)
    counts = Counter(item["category"] for item in items)
    assert set(counts) == CATEGORIES and min(counts.values()) >= 5
    assert all(40 <= len(tokenizer.encode(item["prompt"])) <= 400 for item in items)


# The recipe.


def test_learning_rate_rises_stays_and_ends_at_zero() -> None:
    schedule = OptimizerSettings(matrix_lr=1.0, embedding_lr=1.0, warmup_steps=4, decay_share=0.5)
    factors = [lr_factor(step, num_steps=20, settings=schedule) for step in range(21)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0] and set(factors[3:11]) == {1.0} and factors[20] == 0.0
    assert factors[10:] == sorted(factors[10:], reverse=True)


def test_initial_weights_depend_on_the_seed_alone() -> None:
    shape = ModelShape(hidden_size=64, intermediate_size=96, num_layers=1, num_kv_heads=1)
    before = torch.random.get_rng_state()
    first, second, other = (build_model(shape, vocab_size=64, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(first[name], second[name]) and not torch.equal(first[name], other[name])


def test_an_interrupted_save_leaves_the_old_directory(tmp_path: Path) -> None:
    directory = tmp_path / "target"
    directory.mkdir()
    (directory / "old").touch()
    with pytest.raises(KeyboardInterrupt), replaced_directory(directory) as staging:
        (staging / "new").touch()
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.rglob("*")] == ["target", "old"]


MICRO_RECIPE = Recipe(
    vocab_size=320,
    max_documents=6,
    held_out_length=64,
    max_held_out_windows=2,
    target_shape=ModelShape(hidden_size=64, intermediate_size=96, num_layers=2, num_kv_heads=1),
    draft_shape=ModelShape(hidden_size=64, intermediate_size=64, num_layers=1, num_kv_heads=1),
    target_phases=(Phase(num_steps=2, length=64, num_rows=4, micro_rows=2),),
    num_generated=4,
    generated_length=64,
    generation_rows=2,
    draft_corpus_phase=Phase(num_steps=1, length=64, num_rows=2, micro_rows=2),
    draft_generated_phase=Phase(num_steps=2, length=64, num_rows=2, micro_rows=1),
    draft_long_phase=Phase(num_steps=1, length=96, num_rows=1, micro_rows=1),
)


def test_the_recipe_runs_end_to_end_and_repeats_bit_for_bit(tmp_path: Path) -> None:
    notes = []
    for root in (tmp_path / "first", tmp_path / "second"):
        train_target(MICRO_RECIPE, root, device=CPU, report=lambda done, total, note: notes.append((done, total, note)))
        train_draft(MICRO_RECIPE, root, device=CPU, report=lambda done, total, note: notes.append((done, total, note)))
    first, second = (read_manifest(tmp_path / name / "manifest.json") for name in ("first", "second"))
    assert first["files"] == second["files"] == file_records(tmp_path / "first", ("target", "draft"))
    assert first["stages"]["target"]["steps"] == 2 and first["stages"]["draft"]["steps"] == 4
    assert set(first["stages"]) == {"tokenizer", "target", "generate", "draft"}
    assert all(record["cpu_seconds"] >= 0 for record in first["stages"].values())
    assert first["models"] == second["models"]
    LlamaForCausalLM.from_pretrained(tmp_path / "first" / "draft")
    assert notes and all(0 < done <= total for done, total, _ in notes)


def test_a_new_target_discards_the_draft_of_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    train_target(MICRO_RECIPE, tmp_path, device=CPU, report=lambda *_: None)
    assert not (tmp_path / "draft").exists()


def test_help_answers_without_torch() -> None:
    code = "import sys; from runner.tiny.train import main; print('torch' in sys.modules); main(['-h'])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0 and run.stdout.startswith("False\n") and "--stages" in run.stdout


def test_a_draft_without_a_target_is_refused_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from runner.tiny.train import parse_arguments

    with pytest.raises(SystemExit) as refusal:
        parse_arguments(["--stages", "draft", "--output", str(tmp_path)])
    assert refusal.value.code == 2 and "run --stages target first" in capsys.readouterr().err


def test_the_manifest_states_the_acceptance_that_the_engine_measures() -> None:
    stated = read_manifest(MANIFEST_PATH)["acceptance"]
    measured = measure_acceptance(TINY_DIR)
    for method, numbers in measured.items():
        for key in ("mean_acceptance_length", "acceptance_rate"):
            assert numbers[key] == pytest.approx(stated[method][key], rel=0.03), (method, key)
    assert measured["draft_model"]["mean_acceptance_length"] >= 2.2
