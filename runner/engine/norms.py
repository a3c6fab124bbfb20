"""Root mean square norms of a decoder: their weights, and where these come from."""

from __future__ import annotations

import torch

from runner.engine.architecture import Architecture
from runner.engine.linear import WeightTarget
from runner.engine.norm_operations import add_normed, add_rms_norm, norm_in_place, rms_norm, sum_beside_rms_norm
from runner.engine.operations import Rows


class RMSNorm:
    def __init__(
        self,
        size: int,
        eps: float,
        dtype: torch.dtype,
        *,
        adds_one: bool = False,
        rounds_last: bool = False,
        factor: float = 1.0,
    ) -> None:
        """
        Args:
            adds_one: the checkpoint's weight lacks a 1 (Gemma); with it, 16 bits do not hold it.
            rounds_last: the weight multiplies what is not yet rounded (OLMo 2).
            factor: of the checkpoint's weight; 16 bits do not hold what it makes of one.
        """
        self._eps, self.eps = eps, torch.tensor(eps, dtype=torch.float32)
        is_float32 = adds_one or rounds_last or factor != 1.0
        self.weight = torch.empty(size, dtype=torch.float32 if is_float32 else dtype)
        self._factor, self._offset = factor, 1.0 if adds_one else 0.0

    @classmethod
    def of(
        cls, arch: Architecture, dtype: torch.dtype, size: int | None = None, *, eps: float | None = None
    ) -> RMSNorm:
        """As the family norms; size: of what is normed, None: the residual stream. eps: None, that of the family."""
        eps = arch.rms_norm_eps if eps is None else eps
        return cls(
            arch.hidden_size if size is None else size,
            arch.multipliers.eps(eps) if size is None else eps,
            dtype,
            adds_one=arch.norms_add_one,
            rounds_last=arch.norms_round_last,
        )

    @classmethod
    def by_no_weights(cls, size: int, eps: float) -> RMSNorm:
        """Which has no place in a checkpoint."""
        norm = cls(size, eps, torch.float32)
        norm.weight.fill_(1.0)
        return norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(
        self,
        x: Rows,
        residual: torch.Tensor,
        x_norm: RMSNorm | None = None,
        scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the sum, the sum); of what x_norm makes of x, where there is one. scale: [] float32, of the sum."""
        return add_rms_norm(x, residual, self.weight, self.eps, *self._beside(x_norm, scale))

    def add_to(self, residual: torch.Tensor, x: Rows, scale: torch.Tensor | None = None) -> torch.Tensor:
        """The sum of the residual stream and the norm of x, times scale, [] float32, where there is one."""
        return add_normed(x, residual, self.weight, self.eps, scale)

    def overwrite(self, x: torch.Tensor) -> None:
        """x becomes its norm; its rows may lie further apart."""
        norm_in_place(x, self.weight, self.eps)

    def beside_sum(
        self, x: Rows, residual: torch.Tensor, x_norm: RMSNorm | None, scale: torch.Tensor | None
    ) -> torch.Tensor:
        """What `add` returns as one tensor, the sum, and behind it its norm: [num_rows, 2 * size]."""
        return sum_beside_rms_norm(x, residual, self.weight, self.eps, *self._beside(x_norm, scale))

    def _beside(
        self, x_norm: RMSNorm | None, scale: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """What the operations take of the norm of what is added."""
        if x_norm is None:
            return None, scale, None
        return x_norm.weight, scale, None if x_norm._eps == self._eps else x_norm.eps

    @property
    def target(self) -> WeightTarget:
        return WeightTarget(view=self.weight, factor=self._factor, offset=self._offset)
