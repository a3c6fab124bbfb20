"""Attention over the paged cache: what every kind of it is to the rest of the engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from runner.engine.kv_cache import PagedKVCache
from runner.engine.linear import RowParallelLinear
from runner.engine.mixer import Mixer
from runner.engine.operations import paged_attention
from runner.engine.rope import HeadLayout, Rope, RopeKey


class Attention(Mixer):
    layer: int
    has_own_keys = True
    kv_layer: int  # whose keys and values it sees: its own, or those of a layer that ran before
    num_heads: int  # of this rank, as the next
    num_kv_heads: int
    head_dim: int  # of queries, and of keys as they are cached
    value_dim: int
    values_in_keys = False  # a key's first elements are its value too: the cache has a row of keys alone
    scale: float  # of the logits
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    sliding_window: int | None = None
    attention_chunk: int | None = None
    is_causal = True  # False: rows see all of their segment, in launches built for that (DFlash's blocks)
    rope_key: RopeKey | None
    head_layout: HeadLayout
    o_proj: RowParallelLinear

    def attend(self, query: torch.Tensor, cache: PagedKVCache, plan: Any) -> torch.Tensor:
        """What the heads find [num_rows, num_heads * value_dim].

        Args:
            query: [num_rows, num_heads, head_dim], turned.
            plan: ForwardBatch.attention.
        """
        return paged_attention(
            query,
            cache.layers[self.kv_layer],
            plan,
            kv_scales=cache.scales[self.kv_layer],
            num_kv_heads=self.num_kv_heads,
            value_dim=self.value_dim,
            values_in_keys=self.values_in_keys,
            scale=self.scale,
            sliding_window=self.sliding_window,
            attention_chunk=self.attention_chunk,
            is_causal=self.is_causal,
            softcap=self.softcap,
            sinks=self.sinks,
        )

    @property
    def turns(self) -> tuple[RopeKey | None, int]:
        """What makes rotations differ: of which of the config's they are, and of how many heads."""
        return self.rope_key, self.num_heads

    def rope(self, hf_config: Any, max_model_len: int) -> Rope:
        """The rotations of this and of every layer of a model that has the same turns."""
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
        return self.seen_width if self.has_own_keys else 0

    @property
    def seen_width(self) -> int:
        """Of a token in the cache that it sees."""
        return self.num_kv_heads * (self.head_dim + (0 if self.values_in_keys else self.value_dim))

    @property
    def shape(self) -> tuple[Any, ...]:
        """What makes kernels' launches differ."""
        return (type(self), self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim, self.has_own_keys)


def one_of_each_shape(attentions: Iterable[Attention]) -> list[Attention]:
    found: dict[tuple[Any, ...], Attention] = {}
    for attention in attentions:
        found.setdefault(attention.shape, attention)
    return list(found.values())
