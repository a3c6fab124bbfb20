"""How the tiny models are optimised: Muon for the matrices, AdamW for embeddings and norms, one learning-rate schedule.

Muon (Jordan et al. 2024) reaches a given loss in far fewer tokens than AdamW at this size, and tokens are what two
CPU cores are short of. The schedule is warm-up, constant, linear to zero, in steps and never in seconds: a slower
machine takes longer and ends at the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    matrix_lr: float  # Muon, update scaled to AdamW's root mean square
    embedding_lr: float  # AdamW: embeddings and norms
    weight_decay: float = 0.05
    warmup_steps: int = 30
    decay_share: float = 0.6  # share of the steps over which the rate falls to zero
    max_grad_norm: float = 1.0


def lr_factor(step: int, *, num_steps: int, settings: OptimizerSettings) -> float:
    """Factor on both rates at `step` (from 0): rises linearly, stays at 1, falls linearly to 0."""
    rise = (step + 1) / settings.warmup_steps
    fall = (num_steps - step) / (settings.decay_share * num_steps)
    return min(1.0, rise, fall)


class Trainer:
    """Owns the optimizers of one model; `step` takes the micro-batches of one optimizer step."""

    def __init__(self, model: nn.Module, *, settings: OptimizerSettings, num_steps: int) -> None:
        self.model = model
        self.settings = settings
        self.num_steps = num_steps
        self.step_idx = 0
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
        self.optimizers: list[tuple[Optimizer, float]] = [
            (
                Muon(
                    matrices,
                    lr=settings.matrix_lr,
                    weight_decay=settings.weight_decay,
                    adjust_lr_fn="match_rms_adamw",
                ),
                settings.matrix_lr,
            ),
            (AdamW(others, lr=settings.embedding_lr, betas=(0.9, 0.95), weight_decay=0.0), settings.embedding_lr),
        ]

    def step(self, micro_batches: tuple[Tensor, ...], loss_fn: Callable[[Tensor], Tensor]) -> float:
        """One update from the mean loss over `micro_batches`; returns that loss.

        Micro-batches stay small because logits of more than 32 MiB make the CPU allocator map and zero fresh pages
        on every use, which costs more than the arithmetic.
        """
        factor = lr_factor(self.step_idx, num_steps=self.num_steps, settings=self.settings)
        total = 0.0
        for micro_batch in micro_batches:
            loss = loss_fn(micro_batch) / len(micro_batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        for optimizer, lr in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step_idx += 1
        return total
