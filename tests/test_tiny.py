"""Claims about the tiny family: the committed files, the corpus behind them, the demo workload and the recipe."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from runner.tiny import (
    DEMO_PATH,
    DRAFT_DIR,
    HEAD_DIRS,
    MANIFEST,
    NUM_SPECULATIVE_TOKENS,
    TARGET_DIR,
    TINY_DIR,
    head_recipe,
    recipe,
)
from runner.tiny.acceptance import measure_acceptance
from runner.tiny.agreement import mean_acceptance_length
from runner.tiny.corpus import Corpus, TokenStream, is_held_out, read_corpus
from runner.tiny.distill import held_out_loss
from runner.tiny.head_recipe import HeadTexts, build_head, mask_token_id, train_heads
from runner.tiny.manifest import file_records, read_manifest
from runner.tiny.model import ModelShape, build_model, load_model, num_parameters
from runner.tiny.recipe import HEADS, Phase, Recipe, train_draft, train_target
from runner.tiny.tokenizer import END_OF_TEXT, END_OF_TEXT_ID
from runner.train.directory import replaced_directory
from runner.train.heads.states import TargetStates, target_states
from runner.train.optimizer import OptimizerSettings, lr_factor

CPU = torch.device("cpu")
CATEGORIES = {"code_completion", "code_edit", "structured_data", "docstrings", "repetitive_logs"}
MAX_FAMILY_BYTES = 24 * 2**20
MODELS = ("target", "draft", *HEAD_DIRS)


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
    assert file_records(TINY_DIR, MODELS) == read_manifest(TINY_DIR / MANIFEST)["files"]


def test_the_family_with_all_its_heads_is_small() -> None:
    files = [path for path in TINY_DIR.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sum(path.stat().st_size for path in files) <= MAX_FAMILY_BYTES


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
    models = read_manifest(TINY_DIR / MANIFEST)["models"]
    for name, directory in (("target", TARGET_DIR), ("draft", DRAFT_DIR)):
        assert num_parameters(load_model(directory, CPU)) == models[name]["parameters"]
    assert models["draft"]["parameters"] * 4 < models["target"]["parameters"]


@settings(max_examples=200)
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
    models = read_manifest(TINY_DIR / MANIFEST)["models"]
    assert models["target"]["held_out_loss"] < models["draft"]["held_out_loss"] - 0.2


# The heads, in the layouts in which such heads are published.

HIDDEN, KV, INTERMEDIATE, VOCAB, DRAFT_VOCAB, INNER, MARKOV_RANK = 256, 128, 512, 2048, 1536, 112, 32


def block_shapes(
    prefix: str, *, input_size: int = HIDDEN, qk_norm: bool = False, intermediate: int = INTERMEDIATE
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (HIDDEN, input_size),
        "self_attn.k_proj": (KV, input_size),
        "self_attn.v_proj": (KV, input_size),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (intermediate, HIDDEN),
        "mlp.up_proj": (intermediate, HIDDEN),
        "mlp.down_proj": (HIDDEN, intermediate),
        "post_attention_layernorm": (HIDDEN,),
    }
    if qk_norm:
        shapes |= {"self_attn.q_norm": (64,), "self_attn.k_norm": (64,), "input_layernorm": (HIDDEN,)}
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


HEAD_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "eagle": {"fc.weight": (HIDDEN, 2 * HIDDEN), **block_shapes("layers.0")},
    "eagle3": {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
        "d2t": (DRAFT_VOCAB,),
        "t2d": (VOCAB,),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        **block_shapes("midlayer", input_size=2 * HIDDEN),
    },
    "mtp": {
        "mtp_layers.0.input_proj.weight": (HIDDEN, 2 * HIDDEN),
        "mtp_layers.0.hidden_layernorm.weight": (HIDDEN,),
        "mtp_layers.0.token_layernorm.weight": (HIDDEN,),
        "mtp_layers.0.final_layernorm.weight": (HIDDEN,),
        **block_shapes("mtp_layers.0", qk_norm=True),
    },
    "medusa": {
        f"{head}.{name}": shape
        for head in range(3)
        for name, shape in {
            "0.linear.weight": (HIDDEN, HIDDEN),
            "0.linear.bias": (HIDDEN,),
            "1.weight": (VOCAB, HIDDEN),
        }.items()
    },
    "mlp_speculator": {
        "speculator.emb.0.weight": (VOCAB, INNER),
        "speculator.proj.0.weight": (INNER, HIDDEN),
        "speculator.proj.1.weight": (INNER, INNER),
        "speculator.head.0.weight": (VOCAB, INNER),
        "speculator.ln.0.weight": (INNER,),
        "speculator.ln.0.bias": (INNER,),
    },
    "dflash": {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
        **{
            name: shape
            for layer in range(5)
            for name, shape in block_shapes(f"layers.{layer}", qk_norm=True, intermediate=64).items()
        },
    },
    "dspark": {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
        **block_shapes("layers.0", qk_norm=True, intermediate=64),
        "markov_head.markov_w1.weight": (VOCAB, MARKOV_RANK),
        "markov_head.markov_w2.weight": (VOCAB, MARKOV_RANK),
        "confidence_head.proj.weight": (1, HIDDEN + MARKOV_RANK),
        "confidence_head.proj.bias": (1,),
    },
}
HEAD_KEYS: dict[str, dict[str, Any]] = {
    "eagle": {"model_type": "llama", "num_hidden_layers": 1, "bias": False},
    "eagle3": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    },
    "mtp": {"speculators_model_type": "mtp", "architectures": ["MTPDraftModel"], "num_nextn_predict_layers": 1},
    "medusa": {"medusa_num_heads": 3, "medusa_num_layers": 1},
    "mlp_speculator": {"model_type": "mlp_speculator", "n_predict": 4, "tie_weights": True, "scale_input": True},
    "pard": {"architectures": ["LlamaForCausalLM"], "spd_type": "pard"},
    "dflash": {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 8,
        "num_hidden_layers": 5,
        "intermediate_size": 64,
        "num_target_layers": 6,
    },
    "dspark": {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "block_size": 7,
        "sample_from_anchor": True,
        "aux_hidden_state_layer_ids": [2, 4, 5],
        "markov_rank": MARKOV_RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
    },
}


def head_tensors(method: str) -> dict[str, torch.Tensor]:
    if method == "medusa":
        tensors = torch.load(HEAD_DIRS[method] / "medusa_lm_head.pt", weights_only=True)
        assert isinstance(tensors, dict)
        return tensors
    return load_file(HEAD_DIRS[method] / "model.safetensors")


@pytest.mark.parametrize("method", HEAD_DIRS)
def test_a_head_has_the_tensors_of_its_published_layout_and_no_other(method: str) -> None:
    tensors = head_tensors(method)
    shapes = HEAD_SHAPES.get(method)
    if shapes is None:  # PARD is a language model like the draft it began as
        shapes = {name: tuple(tensor.shape) for name, tensor in load_file(DRAFT_DIR / "model.safetensors").items()}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    assert dtypes.pop("d2t", torch.int64) is torch.int64 and dtypes.pop("t2d", torch.bool) is torch.bool
    assert set(dtypes.values()) == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in tensors.values())


@pytest.mark.parametrize("method", HEAD_DIRS)
def test_a_head_states_what_it_is_and_brings_no_tokenizer(method: str) -> None:
    weights = "medusa_lm_head.pt" if method == "medusa" else "model.safetensors"
    assert {path.name for path in HEAD_DIRS[method].iterdir()} == {"config.json", weights}
    config = json.loads((HEAD_DIRS[method] / "config.json").read_text())
    assert config | HEAD_KEYS[method] == config


def test_mask_tokens_are_of_a_byte_that_no_text_holds(tokenizer: PreTrainedTokenizerFast) -> None:
    mask = mask_token_id(tokenizer)
    assert json.loads((HEAD_DIRS["pard"] / "config.json").read_text())["pard_token"] == mask
    dflash = json.loads((HEAD_DIRS["dflash"] / "config.json").read_text())["dflash_config"]
    assert dflash == {"mask_token_id": mask, "target_layer_ids": [1, 3, 4]}
    assert json.loads((HEAD_DIRS["dspark"] / "config.json").read_text())["mask_token_id"] == mask
    assert tokenizer.decode([mask]) == "\ufffd" and 0xFF not in "".join(map(chr, range(0xD800))).encode()


@settings(max_examples=200)
@given(st.text())
@example("\xff")
def test_no_text_becomes_a_mask_token(text: str) -> None:
    assert mask_token_id(shared_tokenizer()) not in shared_tokenizer().encode(text)


def test_draft_ids_of_eagle3_name_distinct_target_ids() -> None:
    tensors = head_tensors("eagle3")
    target_ids = torch.arange(DRAFT_VOCAB) + tensors["d2t"]
    assert torch.equal(tensors["t2d"].nonzero().flatten(), target_ids)


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
    directory = tmp_path / ("target" + "x" * 240)  # a name that has no room for more
    directory.mkdir()
    (directory / "old").touch()
    with pytest.raises(KeyboardInterrupt), replaced_directory(directory) as staging:
        (staging / "new").touch()
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.rglob("*")] == [directory.name, "old"]


MICRO_RECIPE = Recipe(
    vocab_size=320,
    max_documents=6,
    held_out_length=64,
    max_held_out_windows=2,
    target_shape=ModelShape(hidden_size=64, intermediate_size=96, num_layers=3, num_kv_heads=1),
    draft_shape=ModelShape(hidden_size=64, intermediate_size=64, num_layers=1, num_kv_heads=1),
    target_phases=(Phase(num_steps=2, length=64, num_rows=4, micro_rows=2),),
    num_generated=4,
    generated_length=64,
    generation_rows=2,
    draft_corpus_phase=Phase(num_steps=1, length=64, num_rows=2, micro_rows=2),
    draft_generated_phase=Phase(num_steps=2, length=64, num_rows=2, micro_rows=1),
    draft_long_phase=Phase(num_steps=1, length=96, num_rows=1, micro_rows=1),
    num_head_texts=4,
    num_head_windows=4,
    num_head_held_out=4,
    head_text_length=64,
    tap_layers=(1, 2),
    draft_vocab_size=200,
    heads={name: replace(head, num_steps=2, num_rows=4, micro_rows=2) for name, head in HEADS.items()},
)


def silent(done: int, total: int, note: str) -> None:
    pass


@pytest.fixture(scope="module", autouse=True)
def _corpus_is_read_once() -> Iterator[None]:
    """Every stage reads the standard library; it does not change between them."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (recipe, head_recipe):
            patch.setattr(module, "read_corpus", cache(read_corpus))
        yield


@pytest.fixture(scope="module")
def micro_family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("family")
    train_target(MICRO_RECIPE, root, device=CPU, report=silent)
    train_draft(MICRO_RECIPE, root, device=CPU, report=silent)
    return root


def test_every_head_is_trained_again_bit_for_bit_in_whatever_order(micro_family: Path, tmp_path: Path) -> None:
    roots = [tmp_path / "first", tmp_path / "second"]
    for root in roots:
        shutil.copytree(micro_family, root)
    before = read_manifest(micro_family / MANIFEST)
    for root, methods in zip(roots, (list(HEAD_DIRS), list(reversed(HEAD_DIRS))), strict=True):
        train_heads(MICRO_RECIPE, root, methods, device=CPU, report=lambda stage: silent)
    first, second = (read_manifest(root / MANIFEST) for root in roots)
    assert first["files"] == second["files"] == file_records(roots[0], MODELS)
    assert first["models"] == second["models"] and set(first["models"]) == set(MODELS)
    assert set(first["stages"]) == set(before["stages"]) | {"texts", *HEAD_DIRS}
    for key in ("stages", "models", "files"):
        assert first[key] | before[key] == first[key]
    assert {method: first["models"][method]["num_speculative_tokens"] for method in HEAD_DIRS} == {
        method: NUM_SPECULATIVE_TOKENS[method] for method in HEAD_DIRS
    }


@pytest.mark.parametrize("method", HEAD_DIRS)
def test_a_guess_depends_on_nothing_behind_the_pending_token(method: str, micro_family: Path) -> None:
    """Nor, for the same reason, does training see the tokens that it asks for: loss and guesses share the steps."""
    target = load_model(micro_family / "target", CPU).requires_grad_(False)
    tokens = torch.randint(320, (2, 24), generator=torch.Generator().manual_seed(1))
    states = target_states(target, tokens, tap_layers=MICRO_RECIPE.tap_layers, batch_size=2)
    texts = HeadTexts(train=states, held_out=states)
    head = build_head(MICRO_RECIPE, micro_family, method, target=target, texts=texts, device=CPU)
    generator = torch.Generator().manual_seed(2)
    for parameter in head.parameters():  # as built, most guesses are alike
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    head.target.lm_head = torch.randn(320, 64, generator=generator)
    pending = 12
    taps, normed = states.taps.clone(), states.normed.clone()
    taps[:, pending:], normed[:, pending:] = 7.0, 7.0
    changed = tokens.clone()
    changed[:, pending + 1 :] = 5
    other = TargetStates(token_ids=changed, taps=taps, normed=normed)
    rows = torch.arange(2)
    guesses, same = (head.draft(s.rows(rows), 3) for s in (states, other))
    assert torch.equal(guesses[:, 1 : pending + 1], same[:, 1 : pending + 1])
    assert not torch.equal(guesses[:, pending + 1 :], same[:, pending + 1 :])
    assert len(guesses[:, 1:].unique()) > 3


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_a_further_step_is_what_the_whole_text_with_the_guess_in_it_gives(method: str, micro_family: Path) -> None:
    """A step behind an anchor equals the first pass over the text with one row more, fed by hand."""
    target = load_model(micro_family / "target", CPU).requires_grad_(False)
    tokens = torch.randint(320, (1, 16), generator=torch.Generator().manual_seed(3))
    states = target_states(target, tokens, tap_layers=MICRO_RECIPE.tap_layers, batch_size=1)
    texts = HeadTexts(train=states, held_out=states)
    head: Any = build_head(MICRO_RECIPE, micro_family, method, target=target, texts=texts, device=CPU)
    steps = head.steps(states.rows(torch.arange(1)), torch.tensor([9]), lambda step: tokens[:, [9 + step]])
    first, second, third = (next(steps) for _ in range(3))
    fed = head.features(states.rows(torch.arange(1)))[:, :10]  # rows 0..9, whose last is the anchor
    for output in (first[:, 9:10], second):
        fed = torch.cat([fed, output], dim=1)
    rows = torch.arange(fed.shape[1])
    inputs, residual = head.block_inputs(head.target.embed(tokens[:, 1 : 1 + len(rows)]), fed)
    keys = head.block.self_attn.keys_values(inputs, rows)
    expected = head.block_output(head.block(inputs, residual, rows, keys, None))
    assert torch.allclose(expected[:, 10:11], second, atol=1e-5) and torch.allclose(expected[:, 11:], third, atol=1e-5)


def test_agreement_counts_steps_as_an_engine_does() -> None:
    text = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])
    right = torch.stack([text.roll(-1), text.roll(-2)], dim=2)
    assert mean_acceptance_length(right, text, [1], [10]) == 3.0
    assert mean_acceptance_length(torch.zeros_like(right), text, [1], [10]) == 1.0
    half = right.clone()
    half[:, :, 0] = 0  # a wrong first guess makes the second worthless
    assert mean_acceptance_length(half, text, [1], [10]) == 1.0
    half = right.clone()
    half[:, :, 1] = 0
    assert mean_acceptance_length(half, text, [1], [10]) == 2.0
    assert math.isnan(mean_acceptance_length(right, text, [9], [10]))


def test_the_recipe_runs_end_to_end_and_repeats_bit_for_bit(micro_family: Path, tmp_path: Path) -> None:
    notes = []
    for train in (train_target, train_draft):
        train(MICRO_RECIPE, tmp_path, device=CPU, report=lambda done, total, note: notes.append((done, total, note)))
    first, second = (read_manifest(root / MANIFEST) for root in (micro_family, tmp_path))
    assert first["files"] == second["files"] == file_records(tmp_path, ("target", "draft"))
    assert first["stages"]["target"]["steps"] == 2 and first["stages"]["draft"]["steps"] == 4
    assert set(first["stages"]) == {"tokenizer", "target", "generate", "draft"}
    assert all(record["cpu_seconds"] >= 0 for record in first["stages"].values())
    assert first["models"] == second["models"]
    LlamaForCausalLM.from_pretrained(tmp_path / "draft")
    assert notes and all(0 < done <= total for done, total, _ in notes)


def test_a_new_target_discards_what_was_distilled_from_the_old_one(tmp_path: Path) -> None:
    for name in MODELS:
        (tmp_path / name).mkdir()
    train_target(MICRO_RECIPE, tmp_path, device=CPU, report=silent)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["target"]


def test_a_new_draft_discards_the_head_that_began_as_the_old_one(micro_family: Path, tmp_path: Path) -> None:
    root = tmp_path / "family"
    shutil.copytree(micro_family, root)
    train_heads(MICRO_RECIPE, root, ["pard", "medusa"], device=CPU, report=lambda stage: silent)
    train_draft(MICRO_RECIPE, root, device=CPU, report=silent)
    assert not (root / "pard").exists()
    record = read_manifest(root / MANIFEST)
    assert record["files"] == file_records(root, ("target", "draft", "medusa"))
    assert set(record["models"]) == {"target", "draft", "medusa"} and "pard" not in record["stages"]


def test_help_answers_without_torch() -> None:
    code = "import sys; from runner.tiny.train import main; print('torch' in sys.modules); main(['-h'])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0 and run.stdout.startswith("False\n") and "--stages" in run.stdout


@pytest.mark.parametrize(("stage", "needed"), [("draft", "target"), ("eagle3", "target"), ("pard", "draft")])
def test_a_stage_without_what_it_needs_is_refused_with_the_remedy(
    stage: str, needed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from runner.tiny.train import parse_arguments

    if needed == "draft":
        (tmp_path / "target").mkdir()
        (tmp_path / "target" / "config.json").touch()
    with pytest.raises(SystemExit) as refusal:
        parse_arguments(["--stages", stage, "--output", str(tmp_path)])
    assert refusal.value.code == 2 and f"run --stages {needed} first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "told"), [("tpu", "invalid choice: 'tpu' (choose from"), ("cuda", "none was found; take --device cpu")]
)
def test_a_device_that_is_not_there_is_refused_with_the_remedy(
    device: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both were a traceback of torch's."""
    from runner.tiny.train import parse_arguments

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as refusal:
        parse_arguments(["--device", device])
    assert refusal.value.code == 2 and told in capsys.readouterr().err


def test_an_output_below_a_file_is_refused_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training began, and would have ended in a traceback."""
    from runner.tiny.train import parse_arguments

    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as refusal:
        parse_arguments(["--output", str(tmp_path / "file" / "family")])
    assert refusal.value.code == 2 and f"{tmp_path / 'file'} is no directory" in capsys.readouterr().err


def test_the_manifest_states_the_acceptance_of_every_drafter() -> None:
    stated = read_manifest(TINY_DIR / MANIFEST)["acceptance"]
    assert set(stated) == {"conditions", "draft_model", "ngram", *HEAD_DIRS}
    assert {method: stated[method]["num_speculative_tokens"] for method in HEAD_DIRS} == {
        method: NUM_SPECULATIVE_TOKENS[method] for method in HEAD_DIRS
    }
    accepted = {method: stated[method]["mean_acceptance_length"] for method in HEAD_DIRS}
    assert min(accepted.values()) > 1.4
    assert (
        min(accepted["eagle3"], accepted["dflash"], accepted["dspark"])
        > stated["draft_model"]["mean_acceptance_length"]
    )


def test_the_engine_measures_the_acceptance_that_the_manifest_states() -> None:
    """Of one of them, for time; a head that learned from the target's states is worth more than a small model."""
    stated = read_manifest(TINY_DIR / MANIFEST)["acceptance"]
    numbers = measure_acceptance(TINY_DIR, "eagle3")
    for key in ("mean_acceptance_length", "acceptance_rate"):
        assert numbers[key] == pytest.approx(stated["eagle3"][key], rel=0.03), key
    assert numbers["mean_acceptance_length"] > stated["draft_model"]["mean_acceptance_length"] >= 2.2
