"""The products of a model that transformers' code runs, computed by our kernels: a row's bits are its own.

`take_products` replaces every linear layer and every stack of experts by one that holds the same weights as our
products read them, or quantized; what is around them, routers and gates among it, stays transformers'.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from kernels.cpu.panels import Change, Weight, unpack
from runner.engine.expert_operations import ExpertWeights, linear_of_experts, sort_by_expert, sum_of_experts
from runner.engine.operations import linear, take_rows
from runner.engine.transformers_functions import untouched

TILE = 1  # rows of a product: it gives each the same bits whatever their number


def take_products(model: nn.Module, change: Change, *, but: Collection[str] = ()) -> None:
    """Has the products in a loaded model computed by our own.

    Args:
        change: how their weights are held, or laid out; those that are our own already keep theirs.
        but: names of modules that are left as they are, whatever they hold.
    """
    _take(model, change, frozenset(but), {})


def _take(model: nn.Module, change: Change, but: frozenset[str], taken: dict[nn.Module, nn.Module]) -> None:
    """taken: what stands for modules that were met before; a model may hold one in several places."""
    for name, module in list(model._modules.items()):
        if module is None or name in but or isinstance(module, OwnLinear | OwnExperts):
            continue
        own = taken.get(module) or _own(module, change)
        if own is None:
            _take(module, change, but, taken)
        else:
            taken[module] = own
            setattr(model, name, own)


def _own(module: Any, change: Change) -> nn.Module | None:
    from transformers.pytorch_utils import Conv1D

    if type(module).forward is nn.Linear.forward or isinstance(module, Conv1D):
        weight = module.weight.detach()
        module.weight = None  # what is left of it keeps no memory
        return OwnLinear(change(weight.t().contiguous() if isinstance(module, Conv1D) else weight), module.bias)
    if all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "_apply_gate")):
        return OwnExperts(module, change)
    return None


class OwnLinear(nn.Module):
    """In place of nn.Linear, or of GPT-2's Conv1D, whose weight lies the other way round."""

    def __init__(self, weight: Weight, bias: Tensor | None) -> None:
        super().__init__()
        self._weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], of packed ones a copy."""
        return unpack(self._weight)

    @property
    def weights(self) -> tuple[Weight, ...]:
        return (self._weight,)

    def forward(self, x: Tensor) -> Tensor:  # [..., in_features] -> [..., out_features]
        with untouched():
            out = linear(x.reshape(-1, x.shape[-1]), self._weight, self.bias, TILE)
            return out.view(*x.shape[:-1], -1)


class OwnExperts(nn.Module):
    """In place of a module of transformers' experts interface, whose gate, activation and biases it keeps."""

    def __init__(self, experts: Any, change: Change) -> None:
        """Takes the weights of `experts`, and leaves none there."""
        super().__init__()
        self._experts = experts
        self._first_name = "gate_up_proj" if experts.has_gate else "up_proj"
        self._first, self._down = (self._take(name, change) for name in (self._first_name, "down_proj"))
        self._num_experts = len(self._first)

    @property
    def weights(self) -> tuple[Weight, ...]:
        return (*self._first, *self._down)

    def forward(
        self,
        hidden: Tensor,  # [num_rows, hidden]
        chosen: Tensor,  # [num_rows, choices] int64
        weights: Tensor,  # [num_rows, choices]
    ) -> Tensor:  # [num_rows, hidden]
        experts: Any = self._experts
        with untouched():
            routing = sort_by_expert(chosen, weights.float(), self._num_experts)
            rows = take_rows(hidden, routing.rows)
            inner = linear_of_experts(rows, self._first, routing, TILE, self._biases(self._first_name))
        inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        with untouched():
            results = linear_of_experts(inner.contiguous(), self._down, routing, TILE, self._biases("down_proj"))
        if getattr(experts, "has_post_expert_norm", False):  # of which older releases know nothing
            results = experts.post_expert_norm(results)
        with untouched():
            return sum_of_experts(results, routing)

    def _take(self, name: str, change: Change) -> ExpertWeights:
        stack = getattr(self._experts, name).detach()
        delattr(self._experts, name)
        return ExpertWeights(
            change(weight.t().contiguous() if self._experts.is_transposed else weight) for weight in stack
        )

    def _biases(self, name: str) -> Tensor | None:
        """Of each expert."""
        return getattr(self._experts, f"{name}_bias") if self._experts.has_bias else None
