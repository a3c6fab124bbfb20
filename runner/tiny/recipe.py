"""The recipe of the tiny family: tokenizer and target from the corpus, then the draft from the target.

`Recipe` holds every number that decides the result. `train_target` and `train_draft` each install one directory and
bring the manifest up to date; they work from a fixed seed and fixed step counts, never from the clock, so the same
machine, thread count and versions give the same weights.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from runner.tiny import HEAD_DIRS, MANIFEST, distill, manifest
from runner.tiny.corpus import Corpus, TokenStream, num_bytes, read_corpus
from runner.tiny.model import ModelShape, build_model, load_model, num_parameters, save_model
from runner.tiny.tokenizer import load_tokenizer, train_tokenizer
from runner.train.directory import replaced_directory
from runner.train.loop import ReportProgress, run_steps
from runner.train.optimizer import OptimizerSettings, Trainer


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Steps that share a shape; a step sees num_rows x length tokens, micro_rows at a time."""

    num_steps: int
    length: int
    num_rows: int
    micro_rows: int


@dataclass(frozen=True, kw_only=True)
class HeadRecipe:
    """One head's training: a step sees num_rows texts of the heads' own length, micro_rows at a time."""

    num_steps: int
    num_rows: int = 8
    micro_rows: int = 8
    greedy_only: bool = False  # the texts that the target wrote greedily, or all texts
    num_greedy_repeats: int = 0  # times that each greedy text is dealt beside every text once
    optimizer: OptimizerSettings
    options: Mapping[str, int | float]  # what the head's class is built with


TARGET_SHAPE = ModelShape(hidden_size=256, intermediate_size=512, num_layers=6, num_kv_heads=2)
TARGET_OPTIMIZER = OptimizerSettings(matrix_lr=1.2e-2, embedding_lr=2e-2, decay_share=0.4)
DRAFT_SHAPE = ModelShape(hidden_size=128, intermediate_size=352, num_layers=2, num_kv_heads=1)
DRAFT_OPTIMIZER = OptimizerSettings(matrix_lr=1.2e-2, embedding_lr=2e-2)
HEAD_OPTIMIZER = OptimizerSettings(
    matrix_lr=1.2e-2, embedding_lr=5e-3, warmup_steps=10, decay_share=0.7, float32_muon=True
)
UNROLLED = {"num_steps": 3, "num_anchors": 48, "step_decay": 0.8}
HEADS: dict[str, HeadRecipe] = {
    "eagle": HeadRecipe(num_steps=200, optimizer=replace(HEAD_OPTIMIZER, matrix_lr=8e-3), options=UNROLLED),
    "eagle3": HeadRecipe(
        num_steps=700, optimizer=HEAD_OPTIMIZER, options={**UNROLLED, "num_steps": 4, "num_anchors": 64}
    ),
    "mtp": HeadRecipe(num_steps=200, optimizer=HEAD_OPTIMIZER, options={**UNROLLED, "num_speculative_tokens": 4}),
    "medusa": HeadRecipe(
        num_steps=120, optimizer=HEAD_OPTIMIZER, options={"num_heads": 3, "num_layers": 1, "head_decay": 0.8}
    ),
    "mlp_speculator": HeadRecipe(
        num_steps=230,
        greedy_only=True,
        optimizer=replace(HEAD_OPTIMIZER, embedding_lr=1e-2),
        options={"inner_dim": 112, "n_predict": 4, "step_decay": 0.8},
    ),
    "pard": HeadRecipe(
        num_steps=240,
        greedy_only=True,
        optimizer=replace(HEAD_OPTIMIZER, matrix_lr=6e-3, embedding_lr=4e-3),
        options={"num_tokens": 5, "num_anchors": 48, "place_decay": 0.8},
    ),
    "dflash": HeadRecipe(
        num_steps=3200,
        num_greedy_repeats=3,
        optimizer=HEAD_OPTIMIZER,
        # Deep and narrow: a place learns from the places before it layer by layer.
        options={
            "num_layers": 5,
            "intermediate_size": 64,
            "block_size": 8,
            "num_anchors": 24,
            "place_scale": 3.0,
        },
    ),
    "dspark": HeadRecipe(
        num_steps=9000,
        num_greedy_repeats=3,
        optimizer=replace(HEAD_OPTIMIZER, embedding_lr=4e-2),
        # One layer will do: what a place must know of the guess before it, the sequential head says.
        options={
            "num_layers": 1,
            "intermediate_size": 64,
            "block_size": 7,
            "num_anchors": 24,
            "place_scale": 3.0,
            "markov_rank": 32,
        },
    ),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Every number that decides the result, beside the interpreter's own sources and the versions of the libraries."""

    seed: int = 0
    vocab_size: int = 2048
    max_documents: int | None = None
    held_out_length: int = 512
    max_held_out_windows: int | None = None

    target_shape: ModelShape = TARGET_SHAPE
    target_optimizer: OptimizerSettings = TARGET_OPTIMIZER
    # Mostly short windows, where attention is cheap; then long ones, for prompts with a completion behind them.
    target_phases: tuple[Phase, ...] = (
        Phase(num_steps=920, length=256, num_rows=16, micro_rows=8),
        Phase(num_steps=280, length=768, num_rows=6, micro_rows=3),
    )

    draft_shape: ModelShape = DRAFT_SHAPE
    draft_optimizer: OptimizerSettings = DRAFT_OPTIMIZER
    num_generated: int = 1024  # sequences of the target's own text
    generated_length: int = 384
    generation_rows: int = 128
    draft_corpus_phase: Phase = Phase(num_steps=260, length=256, num_rows=16, micro_rows=8)
    draft_generated_phase: Phase = Phase(num_steps=430, length=384, num_rows=12, micro_rows=6)
    draft_long_phase: Phase = Phase(num_steps=110, length=768, num_rows=6, micro_rows=3)  # dealt among the generated

    # Heads see the target's own text and windows of the corpus, all of one length.
    num_head_texts: int = 1024
    num_head_windows: int = 1792
    num_head_held_out: int = 64
    head_text_length: int = 256
    tap_layers: tuple[int, ...] = (2, 4, 5)  # h_i = residual stream after i layers; 2, N // 2 and N - 3 coincide here
    tap_scale: float = 128.0
    draft_vocab_size: int = 1536
    heads: Mapping[str, HeadRecipe] = field(default_factory=lambda: HEADS)

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


def target_batches(recipe: Recipe, stream: TokenStream, generator: torch.Generator) -> Iterator[tuple[Tensor, ...]]:
    """One tuple of micro-batches per optimizer step."""
    for phase in recipe.target_phases:
        batches = stream.batches(length=phase.length, batch_size=phase.num_rows, generator=generator)
        for _ in range(phase.num_steps):
            yield torch.split(next(batches), phase.micro_rows)


def draft_batches(
    recipe: Recipe, stream: TokenStream, generated: Tensor, generator: torch.Generator
) -> Iterator[tuple[Tensor, ...]]:
    """Corpus first; then the target's text with long corpus windows dealt evenly among it."""
    first, own, long = recipe.draft_corpus_phase, recipe.draft_generated_phase, recipe.draft_long_phase
    corpus_batches = stream.batches(length=first.length, batch_size=first.num_rows, generator=generator)
    for _ in range(first.num_steps):
        yield torch.split(next(corpus_batches), first.micro_rows)
    long_batches = stream.batches(length=long.length, batch_size=long.num_rows, generator=generator)
    order = torch.empty(0, dtype=torch.int64)
    total = own.num_steps + long.num_steps
    for step in range(total):
        if (step + 1) * long.num_steps // total > step * long.num_steps // total:
            yield torch.split(next(long_batches), long.micro_rows)
            continue
        if len(order) < own.num_rows:
            order = torch.randperm(len(generated), generator=generator)
        rows, order = order[: own.num_rows], order[own.num_rows :]
        yield torch.split(generated[rows], own.micro_rows)


def train_target(recipe: Recipe, root: Path, *, device: torch.device, report: ReportProgress) -> None:
    """Installs root/target; what was distilled from an earlier target is removed."""
    stages: dict[str, dict[str, Any]] = {"tokenizer": {}, "target": {}}
    corpus = read_corpus(max_documents=recipe.max_documents)
    with manifest.stage_clock(stages["tokenizer"]):
        texts = (document.text for document in corpus.train)
        tokenizer = train_tokenizer(texts, vocab_size=recipe.vocab_size, max_length=1024)
    with manifest.stage_clock(stages["target"]):
        model = build_model(recipe.target_shape, vocab_size=recipe.vocab_size, seed=recipe.seed)
        nn.Module.to(model, device)
        generator = torch.Generator().manual_seed(recipe.seed)
        batches = target_batches(recipe, TokenStream(corpus.train, tokenizer), generator)
        num_steps = sum(phase.num_steps for phase in recipe.target_phases)
        trainer = Trainer(model, settings=recipe.target_optimizer, num_steps=num_steps)
        loss_fn = partial(distill.next_token_loss, model)
        stages["target"] |= run_steps(trainer, batches, loss_fn, device=device, report=report)
    with replaced_directory(root / "target") as directory:
        save_model(model, tokenizer, directory)
    for name in ("draft", *HEAD_DIRS):
        shutil.rmtree(root / name, ignore_errors=True)
    update_manifest(recipe, root, corpus, stages, names=("target",), device=device)


def train_draft(recipe: Recipe, root: Path, *, device: torch.device, report: ReportProgress) -> None:
    """Installs root/draft, distilled from the target in root/target; removes the head that starts from a draft."""
    stages: dict[str, dict[str, Any]] = {"generate": {}, "draft": {}}
    corpus = read_corpus(max_documents=recipe.max_documents)
    tokenizer, target = load_tokenizer(root / "target"), load_model(root / "target", device)
    target.requires_grad_(False)
    stream = TokenStream(corpus.train, tokenizer)
    generator = torch.Generator().manual_seed(recipe.seed + 1)
    with manifest.stage_clock(stages["generate"]):
        generated = generate(recipe, target, stream, generator, report=report)
        stages["generate"]["tokens"] = generated.numel()
    with manifest.stage_clock(stages["draft"]):
        model = build_model(recipe.draft_shape, vocab_size=recipe.vocab_size, seed=recipe.seed + 1)
        nn.Module.to(model, device)
        batches = draft_batches(recipe, stream, generated, generator)
        phases = (recipe.draft_corpus_phase, recipe.draft_generated_phase, recipe.draft_long_phase)
        num_steps = sum(phase.num_steps for phase in phases)
        trainer = Trainer(model, settings=recipe.draft_optimizer, num_steps=num_steps)
        loss_fn = partial(distill.distillation_loss, model, target)
        stages["draft"] |= run_steps(trainer, batches, loss_fn, device=device, report=report)
    with replaced_directory(root / "draft") as directory:
        save_model(model, tokenizer, directory)
    shutil.rmtree(root / "pard", ignore_errors=True)
    update_manifest(recipe, root, corpus, stages, names=("target", "draft"), device=device)


def generate(
    recipe: Recipe, target: LlamaForCausalLM, stream: TokenStream, generator: torch.Generator, *, report: ReportProgress
) -> Tensor:
    """[num_generated, generated_length]: the target's continuations of windows of the training text."""
    prompts = next(
        stream.batches(length=recipe.generated_length // 2, batch_size=recipe.num_generated, generator=generator)
    )
    done = 0

    def on_tokens(num_tokens: int) -> None:
        nonlocal done
        done += num_tokens
        report(done, recipe.num_generated * recipe.generated_length, "target writes text")

    return distill.generate_text(
        target,
        prompts,
        length=recipe.generated_length,
        batch_size=recipe.generation_rows,
        generator=generator,
        on_tokens=on_tokens,
    )


def evaluate(
    recipe: Recipe, directory: Path, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, device: torch.device
) -> dict[str, Any]:
    """Held-out loss of the checkpoint as stored: bfloat16 weights computed with in float32."""
    stream = TokenStream(corpus.held_out, tokenizer)
    windows = stream.consecutive(length=recipe.held_out_length)[: recipe.max_held_out_windows]
    model = load_model(directory, device)
    loss = distill.held_out_loss(model, windows)
    bits_per_byte = loss / math.log(2) * len(stream) / stream.num_bytes
    return {
        "parameters": num_parameters(model),
        "held_out_loss": round(loss, 4),  # nats per token
        "held_out_bits_per_byte": round(bits_per_byte, 4),
        "held_out_tokens": windows.numel(),
    }


def update_manifest(
    recipe: Recipe,
    root: Path,
    corpus: Corpus,
    stages: dict[str, dict[str, Any]],
    *,
    names: tuple[str, ...],
    device: torch.device,
) -> None:
    """Rewrites the recipe's keys: a new target starts the manifest afresh, a new draft keeps target and heads."""
    path = root / MANIFEST
    earlier = manifest.read_manifest(path) if "draft" in names and path.exists() else {}
    stale = ("pard",)  # began as the earlier draft
    kept = {key: manifest.without(earlier.get(key, {}), *stale) for key in ("stages", "models", "files")}
    tokenizer = load_tokenizer(root / "target")
    record = {
        "recipe": recipe.as_record(),
        "stages": {**kept["stages"], **stages},
        "models": kept["models"] | {name: evaluate(recipe, root / name, corpus, tokenizer, device) for name in names},
        "corpus": {
            "sha256": corpus.sha256,
            "train_files": len(corpus.train),
            "train_bytes": num_bytes(corpus.train),
            "held_out_files": len(corpus.held_out),
            "held_out_bytes": num_bytes(corpus.held_out),
        },
        "environment": manifest.environment(str(device), torch.get_num_threads()),
        "files": kept["files"] | manifest.file_records(root, names),
    }
    manifest.write_manifest(path, record)
