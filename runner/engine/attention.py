"""Attention over the paged cache: what every kind of it is to the rest of the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from kernels.cpu.panels import Change, Weight
from runner.engine.forward_batch import ForwardBatch
from runner.engine.kv_cache import PagedKVCache
from runner.engine.linear import ColumnParallelLinear, RowParallelLinear, WeightTarget
from runner.engine.operations import Rows, paged_attention
from runner.engine.rope import HeadLayout, Rope, RopeRows


class Attention(ABC):
    layer: int
    num_heads: int  # of this rank, as the next
    num_kv_heads: int
    head_dim: int  # of queries, and of keys as they are cached
    value_dim: int
    values_in_keys = False  # a key's first elements are its value too: the cache has a row of keys alone
    scale: float  # of the logits
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    sliding_window: int | None = None
    is_causal = True  # False: rows see all of their segment, in launches built for that (DFlash's blocks)
    rope_key: str | None
    head_layout: HeadLayout
    o_proj: RowParallelLinear

    @abstractmethod
    def __call__(self, hidden: torch.Tensor, rope: RopeRows | None, batch: ForwardBatch, cache: PagedKVCache) -> Rows:
        """[num_rows, in_features] -> [num_rows, hidden]; keys and values of the rows are cached."""

    def attend(self, query: torch.Tensor, cached: torch.Tensor, plan: Any) -> torch.Tensor:
        """What the heads find [num_rows, num_heads * value_dim].

        Args:
            query: [num_rows, num_heads, head_dim], turned.
            cached: a layer of the cache.
            plan: ForwardBatch.attention.
        """
        return paged_attention(
            query,
            cached,
            plan,
            num_kv_heads=self.num_kv_heads,
            value_dim=self.value_dim,
            values_in_keys=self.values_in_keys,
            scale=self.scale,
            sliding_window=self.sliding_window,
            is_causal=self.is_causal,
            softcap=self.softcap,
            sinks=self.sinks,
        )

    def rope(self, hf_config: Any, max_model_len: int) -> Rope:
        """The rotations of this and of every layer of a model that has the same rope_key."""
        return Rope(
            hf_config,
            self.rope_key,
            self.head_layout,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            max_model_len=max_model_len,
        )

    @property
    def kv_width(self) -> int:
        """Elements a token takes in the cache."""
        return self.num_kv_heads * (self.head_dim + (0 if self.values_in_keys else self.value_dim))

    @property
    @abstractmethod
    def products(self) -> list[ColumnParallelLinear | RowParallelLinear]: ...

    @property
    @abstractmethod
    def products_in_parts(self) -> list[ColumnParallelLinear | RowParallelLinear]:
        """Those that may be left in partial sums."""

    @property
    @abstractmethod
    def product_names(self) -> list[str]:
        """Of those that may be quantized."""

    @property
    def product_weights(self) -> list[Weight]:
        """[out_features, in_features] each: of all shapes that there are."""
        return [product.weight for product in self.products]

    @property
    def products_per_row(self) -> int:
        """Multiplications of a row by weights."""
        return sum(product.weight.shape.numel() for product in self.products)

    def convert(self, change: Change) -> None:
        """As Decoder.convert."""
        for product in self.products:
            product.convert(change)

    @abstractmethod
    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]: ...
