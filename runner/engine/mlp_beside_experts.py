"""An MLP and a mixture of experts beside each other, both of which read the residual stream through norms of their own.

So Gemma 4's 26B-A4B has them: norm(MLP(norm(x))) + norm(experts(norm(x))), and the router reads x through a norm, too.
What that makes is normed once more, by the layer. Ranks' parts are added up before they are normed.
"""

from __future__ import annotations

import torch

from kernels.cpu.panels import Change, Weight
from kernels.reference.act_and_mul import Activation
from runner.engine.architecture import Architecture
from runner.engine.experts import Experts
from runner.engine.linear import WeightTarget
from runner.engine.mlp import MLP
from runner.engine.norms import RMSNorm


class MLPBesideExperts:
    def __init__(self, mlp: MLP, experts: Experts, arch: Architecture, dtype: torch.dtype) -> None:
        self.mlp, self.experts, self.shared = mlp, experts, experts.shared
        self.before_mlp, self.after_mlp, self.before_experts, self.after_experts = (
            RMSNorm.of(arch, dtype) for _ in range(4)
        )
        size = arch.hidden_size
        self.before_router = RMSNorm(size, arch.rms_norm_eps, dtype, rounds_last=True, factor=size**-0.5)

    def __call__(self, residual: torch.Tensor, tile: int | None) -> torch.Tensor:
        """[num_rows, hidden], num_rows a multiple of tile -> the same."""
        of_experts = self.after_experts(self.experts(self.before_experts(residual), tile, self.before_router(residual)))
        return self.after_mlp.add_to(of_experts, self.mlp(self.before_mlp(residual), tile))

    @property
    def activations(self) -> tuple[Activation, ...]:
        return (*self.mlp.activations, *self.experts.activations)

    @property
    def products_per_row(self) -> int:
        return self.mlp.products_per_row + self.experts.products_per_row

    @property
    def product_weights(self) -> list[Weight]:
        """As MLP's and Experts' own."""
        return [*self.mlp.product_weights, *self.experts.product_weights]

    @property
    def product_names(self) -> list[str]:
        return [*self.mlp.product_names, *self.experts.product_names]

    def convert(self, change: Change) -> None:
        """As Decoder.convert."""
        self.mlp.convert(change)
        self.experts.convert(change)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        norms = {
            "pre_feedforward_layernorm.weight": self.before_mlp,
            "post_feedforward_layernorm_1.weight": self.after_mlp,
            "pre_feedforward_layernorm_2.weight": self.before_experts,
            "post_feedforward_layernorm_2.weight": self.after_experts,
            "router.scale": self.before_router,  # times the root of the hidden size
        }
        own = {f"{prefix}{name}": norm.target for name, norm in norms.items()}
        return own | self.mlp.weight_targets(prefix) | self.experts.weight_targets(prefix)
