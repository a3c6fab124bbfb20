"""What mixes the tokens of a layer, attention or what stands in its place: its products, whatever it does with them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from kernels.cpu.panels import Change, Weight
from runner.engine.forward_batch import ForwardBatch
from runner.engine.head_linear import HeadLinear
from runner.engine.kv_cache import LayerStates, PagedKVCache
from runner.engine.linear import ColumnParallelLinear, RowParallelLinear, WeightTarget
from runner.engine.operations import Rows
from runner.engine.rope import RopeRows


class Mixer(ABC):
    @abstractmethod
    def __call__(self, hidden: torch.Tensor, rope: RopeRows | None, batch: ForwardBatch, cache: PagedKVCache) -> Rows:
        """[num_rows, in_features] -> [num_rows, hidden]; what later tokens need of the rows is stored."""

    @property
    @abstractmethod
    def kv_width(self) -> int:
        """Elements a token takes in the cache."""

    @property
    @abstractmethod
    def products(self) -> list[ColumnParallelLinear | RowParallelLinear]:
        """The last is that whose output is added to the residual stream."""

    @property
    @abstractmethod
    def products_in_parts(self) -> list[ColumnParallelLinear | RowParallelLinear]:
        """Those that may be left in partial sums."""

    @property
    def head_products(self) -> list[HeadLinear]:
        """Those of heads, each with a weight of its own."""
        return []

    @property
    @abstractmethod
    def product_names(self) -> list[str]:
        """Of those that may be quantized."""

    @property
    def product_weights(self) -> list[Weight]:
        """[out_features, in_features] each: of all shapes that there are."""
        return [product.weight for product in (*self.products, *self.head_products)]

    @property
    def products_per_row(self) -> int:
        """Multiplications of a row by weights."""
        of_heads = sum(product.products_per_row for product in self.head_products)
        return of_heads + sum(product.weight.shape.numel() for product in self.products)

    def convert(self, change: Change) -> None:
        """As Decoder.convert."""
        for product in (*self.products, *self.head_products):
            product.convert(change)

    @abstractmethod
    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]: ...


class RecurrentMixer(Mixer):
    """What knows of a request's past by a state of fixed size."""

    kv_width = 0  # it keeps states in place of keys and values
    in_proj: ColumnParallelLinear
    out_proj: RowParallelLinear

    @property
    def products_in_parts(self) -> list[ColumnParallelLinear | RowParallelLinear]:
        return [self.out_proj]

    @property
    def product_names(self) -> list[str]:
        return [*self.in_proj.part_rows, self.out_proj.name]

    @abstractmethod
    def empty_states(self, num_slots: int, num_uncertain: int, dtype: torch.dtype, device: torch.device) -> LayerStates:
        """num_uncertain: the most tokens of a launch that may be taken back."""


class NoMixer(Mixer):
    """Of a layer of an MLP alone."""

    kv_width = 0

    @property
    def products(self) -> list[ColumnParallelLinear | RowParallelLinear]:
        return []

    @property
    def products_in_parts(self) -> list[ColumnParallelLinear | RowParallelLinear]:
        return []

    @property
    def product_names(self) -> list[str]:
        return []

    def __call__(self, hidden: torch.Tensor, rope: RopeRows | None, batch: ForwardBatch, cache: PagedKVCache) -> Rows:
        raise AssertionError("nothing mixes tokens here")

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        return {}
