"""How models and heads are optimised: Muon for matrices, AdamW for embeddings and norms, one schedule of the rate.

Muon (Jordan et al. 2024) reaches a given loss in far fewer tokens than AdamW at this size, and tokens are what two
CPU cores are short of. The schedule is warm-up, constant, linear to zero, in steps and never in seconds: a slower
machine takes longer and ends at the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    matrix_lr: float  # Muon, update scaled to AdamW's root mean square
    embedding_lr: float  # AdamW: embeddings and norms
    weight_decay: float = 0.05
    warmup_steps: int = 30
    decay_share: float = 0.6  # share of the steps over which the rate falls to zero
    max_grad_norm: float = 1.0
    float32_muon: bool = False  # much faster on a CPU that computes in bfloat16 by emulating it


def lr_factor(step: int, *, num_steps: int, settings: OptimizerSettings) -> float:
    """Factor on both rates at `step` (from 0): rises linearly, stays at 1, falls linearly to 0."""
    rise = (step + 1) / settings.warmup_steps
    fall = (num_steps - step) / (settings.decay_share * num_steps)
    return min(1.0, rise, fall)


class Trainer:
    """Owns the optimizers of one model; `step` takes the micro-batches of one optimizer step."""

    def __init__(
        self,
        model: nn.Module,
        *,
        settings: OptimizerSettings,
        num_steps: int,
        vocabulary_names: tuple[str, ...] = (),  # parameters with a row per token, beside those called "embed"
    ) -> None:
        self.model = model
        self.settings = settings
        self.num_steps = num_steps
        self.step_idx = 0
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            is_matrix = parameter.ndim == 2 and "embed" not in name and name not in vocabulary_names
            (matrices if is_matrix else others).append(parameter)
        muon = Float32Muon if settings.float32_muon else Muon
        self.optimizers: list[tuple[Optimizer, float]] = [
            (
                muon(
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


class Float32Muon(Muon):
    """torch's Muon, its Newton-Schulz iteration in float32 instead of bfloat16."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("momentum_buffer", torch.zeros_like(parameter.grad))
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalized(parameter.grad.lerp(momentum, group["momentum"]), group["ns_coefficients"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-0.2 * group["lr"] * math.sqrt(max(parameter.shape)))  # AdamW's size


def orthogonalized(matrix: Tensor, coefficients: tuple[float, float, float]) -> Tensor:
    """About the nearest matrix with singular values of one, by Newton-Schulz."""
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix) / matrix.norm().clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = a * x + torch.addmm(gram, gram, gram, beta=b, alpha=c) @ x
    result: Tensor = x.T if is_tall else x
    return result
