"""A decoder's root mean square norms, computed where their arguments are, as runner.engine.operations says."""

from __future__ import annotations

from typing import Any

import torch

from kernels.reference.partial_sums import PartialSums
from kernels.reference.rms_norm import add_normed as add_normed_in_torch
from kernels.reference.rms_norm import add_rms_norm as add_rms_norm_in_torch
from kernels.reference.rms_norm import rms_norm as rms_norm_in_torch
from kernels.reference.rms_norm import rms_norm_pair as rms_norm_pair_in_torch
from kernels.reference.rms_norm import sum_beside_rms_norm as sum_beside_rms_norm_in_torch
from runner.engine.backend import is_compiled, runs_kernels
from runner.engine.operations import Rows


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """[num_rows, hidden], over the last dimension."""
    if is_compiled(x):
        from kernels.cpu.rms_norm import rms_norm as on_cpu

        return on_cpu(x, weight, eps)
    if not runs_kernels(x):
        return rms_norm_in_torch(x, weight, eps)
    from kernels.rms_norm import rms_norm as kernel

    return kernel(x, weight, eps)


def add_rms_norm(
    x: Rows,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: torch.Tensor,
    x_weight: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    x_eps: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual), all [num_rows, hidden]; with x_weight [hidden] x is normed first.

    scale: [] float32 on x's device, by which the rounded sum is multiplied. x_eps: [] float32, of the norm of x; None:
    eps.
    """
    if isinstance(x, PartialSums) or runs_kernels(x):
        from kernels.rms_norm import add_rms_norm as kernel

        return kernel(x, residual, weight, eps, x_weight, scale, x_eps)
    if is_compiled(x):
        from kernels.cpu.rms_norm import add_rms_norm as on_cpu

        return on_cpu(x, residual, weight, eps, x_weight, scale, x_eps)
    return add_rms_norm_in_torch(x, residual, weight, eps, x_weight, scale, x_eps)


def add_normed(
    x: Rows,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """norm(x) + residual, all [num_rows, hidden]; scale as above."""
    if isinstance(x, PartialSums) or runs_kernels(x):
        from kernels.rms_norm import add_normed as kernel

        return kernel(x, residual, weight, eps, scale)
    if is_compiled(x):
        from kernels.cpu.rms_norm import add_normed as on_cpu

        return on_cpu(x, residual, weight, eps, scale)
    return add_normed_in_torch(x, residual, weight, eps, scale)


def norm_in_place(x: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor) -> None:
    """rms_norm that overwrites x, whose rows may lie further apart."""
    if is_compiled(x):
        from kernels.cpu.rms_norm import norm_in_place as on_cpu

        on_cpu(x, weight, eps)
    elif runs_kernels(x):
        from kernels.rms_norm import norm_in_place as kernel

        kernel(x, weight, eps)
    else:
        x.copy_(rms_norm_in_torch(x, weight, eps))


def sum_beside_rms_norm(
    x: Rows,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: torch.Tensor,
    x_weight: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    x_eps: torch.Tensor | None = None,
) -> torch.Tensor:
    """[x + residual, norm(x + residual)] side by side, [num_rows, 2 * hidden]; the rest as add_rms_norm's."""
    if isinstance(x, PartialSums) or runs_kernels(x):
        from kernels.rms_norm import sum_beside_rms_norm as kernel

        return kernel(x, residual, weight, eps, x_weight, scale, x_eps)
    if is_compiled(x):
        from kernels.cpu.rms_norm import sum_beside_rms_norm as on_cpu

        return on_cpu(x, residual, weight, eps, x_weight, scale, x_eps)
    return sum_beside_rms_norm_in_torch(x, residual, weight, eps, x_weight, scale, x_eps)


def rms_norm_pair(
    embeddings: torch.Tensor,  # [vocab, hidden]; [num_rows, hidden] without token_ids
    token_ids: torch.Tensor | None,  # [num_rows] int64
    states: torch.Tensor,  # [num_rows, hidden]
    **norms: Any,  # keyword arguments of kernels/reference/rms_norm.py
) -> torch.Tensor:  # [num_rows, 2 * hidden]
    """The norm of each token's embedding beside that of its state."""
    if is_compiled(states):
        from kernels.cpu.rms_norm import rms_norm_pair as on_cpu

        return on_cpu(embeddings, token_ids, states, **norms)
    if not runs_kernels(states):
        return rms_norm_pair_in_torch(embeddings, token_ids, states, **norms)
    from kernels.rms_norm import rms_norm_pair as kernel

    return kernel(embeddings, token_ids, states, **norms)
