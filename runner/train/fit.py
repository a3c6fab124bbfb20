"""Fits a head to the states of a frozen target, which reads the texts again in every step: nothing is stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from runner.engine.errors import UserError
from runner.engine.transformers_loader import expanded
from runner.train.heads.for_target import tapped_layers
from runner.train.heads.head import Head
from runner.train.heads.states import FrozenTarget, TargetStates, target_states
from runner.train.loop import ReportProgress, run_steps
from runner.train.optimizer import OptimizerSettings, Trainer

MIN_LAYERS = 4  # of a target, so that three depths of it can be told apart
LOGITS_AT_A_TIME = 2**23  # 32 MiB of them; see Trainer.step


def load_frozen(directory: Path, *, device: torch.device, dtype: torch.dtype, trust_remote_code: bool) -> FrozenTarget:
    """The target in transformers' own code.

    Raises:
        UserError: its parts are not those that heads share with a target.
    """
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory,
        config=config,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=trust_remote_code,
        **expanded(config),
    )
    torch.nn.Module.to(model, device)
    torch.nn.Module.eval(model)
    model.requires_grad_(False)
    target = FrozenTarget(model)
    if target.config.num_hidden_layers < MIN_LAYERS:
        found = target.config.num_hidden_layers
        raise UserError(f"the target must have at least {MIN_LAYERS} layers, got {found}; choose a larger one")
    _require_plain_ends(target)
    return target


@torch.no_grad()
def _require_plain_ends(target: FrozenTarget) -> None:
    """Heads take a row of the embeddings for a token, and the target's head for a matrix."""
    tokens = torch.arange(8, device=target.model.device).unsqueeze(0)
    output = target.model(input_ids=tokens, output_hidden_states=True, use_cache=False)
    embedded = target.model.get_input_embeddings()(tokens)
    for wanted, found in (
        (output.logits, target.logits(output.hidden_states[-1].float())),
        (embedded, target.embed(tokens)),
    ):
        if (wanted.float() - found).abs().max() > 0.05 * wanted.float().abs().max():
            raise UserError(
                f"a target of type {target.config.model_type} does more with its embeddings or logits than look up and "
                "multiply (it scales or caps them), which no published layout of a head can say; choose another target"
            )


def read_states(target: FrozenTarget, windows: Tensor) -> TargetStates:
    """The target's states over [num_texts, length] tokens, in float32."""
    taps = tapped_layers(target.config.num_hidden_layers)
    states = target_states(target.model, windows, tap_layers=taps, batch_size=len(windows))
    return states.rows(torch.arange(len(windows), device=states.token_ids.device))


def fit_head(
    head: Head,
    windows: Tensor,  # [num_windows, length] int64
    *,
    num_steps: int,
    num_rows: int,  # windows a step
    optimizer: OptimizerSettings,
    seed: int,
    report: ReportProgress,
) -> dict[str, Any]:
    """Trains the head and puts its weights on the values that a checkpoint holds; returns steps, tokens and loss."""
    generator = torch.Generator().manual_seed(seed)
    micro_rows = max(1, min(num_rows, LOGITS_AT_A_TIME // (windows.shape[1] * head.target.config.vocab_size)))
    trainer = Trainer(head, settings=optimizer, num_steps=num_steps, vocabulary_names=head.vocabulary_names)
    record = run_steps(
        trainer,
        _batches(windows, num_steps, num_rows, micro_rows, generator),
        lambda tokens: head.loss(read_states(head.target, tokens), generator),
        device=head.target.model.device,
        report=report,
    )
    head.round_weights()
    return record


def _batches(
    windows: Tensor, num_steps: int, num_rows: int, micro_rows: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, ...]]:
    """Every window once before any comes again; one tuple of micro-batches a step."""
    order = torch.empty(0, dtype=torch.int64)
    for _ in range(num_steps):
        while len(order) < num_rows:
            order = torch.cat([order, torch.randperm(len(windows), generator=generator)])
        rows, order = order[:num_rows], order[num_rows:]
        yield torch.split(windows[rows], micro_rows)
