"""The loop that every model and head of the project is trained by."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from runner.engine.errors import UserError
from runner.train.optimizer import Trainer

ReportProgress = Callable[[int, int, str], None]  # done, total, what to say


def run_steps(
    trainer: Trainer,
    batches: Iterator[tuple[Tensor, ...]],
    loss_fn: Callable[[Tensor], Tensor],
    *,
    device: torch.device,
    report: ReportProgress,
) -> dict[str, Any]:
    """Runs the trainer over all batches; returns steps, tokens and the mean loss of the last tenth.

    Raises:
        UserError: the loss is no number any more.
    """
    losses, tokens = list[float](), 0
    for micro_batches in batches:
        loss = trainer.step(tuple(batch.to(device) for batch in micro_batches), loss_fn)
        if not math.isfinite(loss):
            remedy = "lower --learning-rate" if losses else "check the target: nothing was learnt yet"
            raise UserError(f"the loss is {loss} at step {trainer.step_idx}; {remedy}")
        losses.append(loss)
        tokens += sum(batch.numel() for batch in micro_batches)
        report(trainer.step_idx, trainer.num_steps, f"loss {sum(losses[-50:]) / len(losses[-50:]):.3f}")
    tail = losses[-max(1, len(losses) // 10) :]
    return {"steps": trainer.step_idx, "tokens": tokens, "final_training_loss": round(sum(tail) / len(tail), 4)}
