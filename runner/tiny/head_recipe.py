"""The recipe of the draft heads: each learns from the states of the frozen target over the same texts.

`read_texts` lets the target write and read once; `train_head` installs one head's directory beside the target and
brings the manifest up to date. A head's weights depend on the recipe, the target, the texts and its own numbers, never
on which other heads are trained with it. (PARD also starts from the draft.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from runner.tiny import MANIFEST, NUM_SPECULATIVE_TOKENS, distill, manifest
from runner.tiny.agreement import mean_acceptance_length
from runner.tiny.corpus import TokenStream, read_corpus
from runner.tiny.model import load_model, num_parameters
from runner.tiny.recipe import HeadRecipe, Recipe
from runner.tiny.tokenizer import load_tokenizer
from runner.train.directory import replaced_directory
from runner.train.heads.by_method import new_head
from runner.train.heads.head import Head
from runner.train.heads.states import FrozenTarget, TargetStates, target_states
from runner.train.loop import ReportProgress, run_steps
from runner.train.optimizer import Trainer

STATE_ROWS = 16  # texts that the target reads at a time


@dataclass(frozen=True, kw_only=True)
class HeadTexts:
    train: TargetStates
    held_out: TargetStates  # greedy at least in its second half

    @property
    def half(self) -> int:
        return self.held_out.length // 2


def read_texts(
    recipe: Recipe,
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    record: dict[str, Any],
    report: ReportProgress,
) -> HeadTexts:
    """The target's own text and corpus windows with its states, and greedy continuations of held-out text."""
    corpus = read_corpus(max_documents=recipe.max_documents)
    generator = torch.Generator().manual_seed(recipe.seed + 2)
    length, done = recipe.head_text_length, 0

    def on_tokens(num_tokens: int) -> None:
        nonlocal done
        done += num_tokens
        report(done, (recipe.num_head_texts + recipe.num_head_held_out) * length, "target writes text")

    def continued(stream: TokenStream, num_texts: int, batch_size: int) -> Tensor:
        prompts = next(stream.batches(length=length // 2, batch_size=num_texts, generator=generator))
        return distill.generate_text(
            target,
            prompts,
            length=length,
            batch_size=batch_size,
            generator=generator,
            on_tokens=on_tokens,
            dtype=torch.float32,
        )

    with manifest.stage_clock(record):
        train, held_out = (TokenStream(split, tokenizer) for split in (corpus.train, corpus.held_out))
        own = continued(train, recipe.num_head_texts, recipe.generation_rows)
        windows = next(train.batches(length=length, batch_size=recipe.num_head_windows, generator=generator))
        greedy = continued(held_out, recipe.num_head_held_out, recipe.num_head_held_out)[::2]
        states = [
            target_states(target, tokens.clone(), tap_layers=recipe.tap_layers, batch_size=STATE_ROWS)
            for tokens in (torch.cat([own, windows]), greedy)
        ]
        record["tokens"] = own.numel() + windows.numel()
    record |= computed_on(target.device)
    return HeadTexts(train=states[0], held_out=states[1])


def train_heads(
    recipe: Recipe, root: Path, names: Sequence[str], *, device: torch.device, report: Callable[[str], ReportProgress]
) -> None:
    """Reads the texts once, then installs the heads one after another; `report(stage)` begins a stage."""
    tokenizer, target = load_tokenizer(root / "target"), load_model(root / "target", device)
    target.requires_grad_(False)
    stage: dict[str, Any] = {}
    texts = read_texts(recipe, target, tokenizer, record=stage, report=report("texts"))
    for name in names:
        train_head(recipe, root, name, target=target, texts=texts, record=stage, device=device, report=report(name))


def train_head(
    recipe: Recipe,
    root: Path,
    name: str,
    *,
    target: LlamaForCausalLM,
    texts: HeadTexts,
    record: dict[str, Any],  # of the stage that made the texts
    device: torch.device,
    report: ReportProgress,
) -> None:
    """Installs root/`name`, distilled from the target that lies in root/target."""
    settings, stage = recipe.heads[name], dict[str, Any]()
    with manifest.stage_clock(stage):
        head = build_head(recipe, root, name, target=target, texts=texts, device=device)
        generator = torch.Generator().manual_seed(recipe.seed + 2)
        trainer = Trainer(
            head,
            settings=settings.optimizer,
            num_steps=settings.num_steps,
            vocabulary_names=head.vocabulary_names,
        )
        stage |= run_steps(
            trainer,
            row_batches(settings, text_rows(recipe, settings), generator),
            lambda rows: head.loss(texts.train.rows(rows), generator),
            device=device,
            report=report,
        )
        stage["tokens"] = settings.num_steps * settings.num_rows * texts.train.length
    head.round_weights()
    with replaced_directory(root / name) as directory:
        head.save(directory)
    measured = {"parameters": num_parameters(head), **agreement(head, texts, NUM_SPECULATIVE_TOKENS[name])}
    stage |= computed_on(device)
    add_to_manifest(recipe, root, name, stages={"texts": record, name: stage}, measured=measured)


def build_head(
    recipe: Recipe, root: Path, name: str, *, target: LlamaForCausalLM, texts: HeadTexts, device: torch.device
) -> Head:
    frozen, options = FrozenTarget(target), dict[str, Any](recipe.heads[name].options)
    counts = torch.bincount(texts.train.token_ids.flatten().cpu(), minlength=target.config.vocab_size)
    if name in ("pard", "dflash", "dspark"):
        options["mask_token_id"] = mask_token_id(load_tokenizer(root / "target"))
    if name in ("eagle3", "dflash", "dspark"):
        options["tap_layers"] = recipe.tap_layers
    if name == "eagle3":
        frequent = counts.argsort(descending=True, stable=True)[: recipe.draft_vocab_size].sort().values
        options |= {"tap_scale": recipe.tap_scale, "frequent_tokens": frequent}
    if name == "pard":
        options["draft_model"] = load_model(root / "draft", device)
    return new_head(name, frozen, options, seed=recipe.seed + 2)


def mask_token_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """The token of byte 0xFF: every byte has one, and no UTF-8 text holds this byte."""
    token_id = tokenizer.convert_tokens_to_ids("ÿ")  # how byte-level BPE writes 0xFF
    assert isinstance(token_id, int)
    return token_id


def text_rows(recipe: Recipe, settings: HeadRecipe) -> Tensor:
    """Row numbers of the texts that a head learns from: the target's own come first, every other of them greedy."""
    greedy = torch.arange(0, recipe.num_head_texts, 2)
    if settings.greedy_only:
        return greedy
    every = torch.arange(recipe.num_head_texts + recipe.num_head_windows)
    return torch.cat([every, *[greedy] * settings.num_greedy_repeats])


def row_batches(settings: HeadRecipe, rows: Tensor, generator: torch.Generator) -> Iterator[tuple[Tensor, ...]]:
    """Shuffles of `rows`, each without the last few that do not fill a step; one tuple of micro-batches per step."""
    order = torch.empty(0, dtype=torch.int64)
    for _ in range(settings.num_steps):
        if len(order) < settings.num_rows:
            order = rows[torch.randperm(len(rows), generator=generator)]
        batch, order = order[: settings.num_rows], order[settings.num_rows :]
        yield torch.split(batch, settings.micro_rows)


def agreement(head: Head, texts: HeadTexts, num_speculative_tokens: int) -> dict[str, Any]:
    """Acceptance of the stored weights on greedy continuations of held-out text."""
    states = texts.held_out
    rows = torch.split(torch.arange(len(states.token_ids)), 8)
    drafts = torch.cat([head.draft(states.rows(part), num_speculative_tokens) for part in rows])
    begins, ends = [texts.half] * len(drafts), [states.length] * len(drafts)
    length = mean_acceptance_length(drafts, states.token_ids, begins, ends)
    return {"held_out_acceptance_length": round(length, 4), "num_speculative_tokens": num_speculative_tokens}


def computed_on(device: torch.device) -> dict[str, Any]:
    """A head may be trained elsewhere than its target was, so its stage says where."""
    environment = manifest.environment(str(device), torch.get_num_threads())
    return {key: environment[key] for key in ("device", "num_threads", "torch")}


def add_to_manifest(recipe: Recipe, root: Path, name: str, *, stages: dict[str, Any], measured: dict[str, Any]) -> None:
    """Enters one head; what the manifest says about the target, the draft and other heads stays."""
    path = root / MANIFEST
    record = manifest.read_manifest(path)
    record["recipe"] = recipe.as_record()
    record["stages"] = {**record["stages"], **stages}
    record["models"] = {**record["models"], name: measured}
    record["files"] = manifest.without(record["files"], name) | manifest.file_records(root, (name,))
    record["acceptance"] = manifest.without(record.get("acceptance", {}), name)
    manifest.write_manifest(path, record)
