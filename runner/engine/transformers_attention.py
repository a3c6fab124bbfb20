"""Attention as transformers' modelling code calls it, over our paged KV cache.

The code looks attention up by name and hands it queries, keys and values after rope; keyword arguments of the model
reach it untouched, and one of them carries the launch. `Launch` computes; `Probe` takes its place once after loading
and notes what every layer would store, or refuses what we would get wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from runner.engine.errors import UserError
from runner.engine.forward_batch import ForwardBatch
from runner.engine.kv_cache import PagedKVCache
from runner.engine.operations import paged_attention
from runner.engine.transformers_functions import untouched

ATTENTION_NAME = "speculative_paged"
# Tensors that models pass along and that attention after rope has no use for.
_UNUSED_TENSORS = frozenset({"position_ids", "cache_position", "position_embeddings"})


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """One layer's call, without the batch dimension of one."""

    module: nn.Module
    query: torch.Tensor  # [num_heads, num_rows, head_dim]
    key: torch.Tensor  # [num_kv_heads, num_rows, head_dim]
    value: torch.Tensor  # [num_kv_heads, num_rows, value_dim]
    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None  # [num_heads]
    ignored: dict[str, Any]  # every other argument of the call


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Writes a layer's keys and values to the cache and attends over it."""

    batch: ForwardBatch
    cache: PagedKVCache

    def attend(self, call: LayerAttention) -> torch.Tensor:  # [num_rows, num_heads * value_dim]
        layer = call.module.layer_idx
        assert isinstance(layer, int)
        stored = torch.cat((call.key.transpose(0, 1).flatten(1), call.value.transpose(0, 1).flatten(1)), dim=1)
        self.cache.write(layer, self.batch.slot_mapping, stored)
        return paged_attention(
            call.query.transpose(0, 1).contiguous(),
            self.cache.layers[layer],
            self.batch.attention,
            num_kv_heads=call.key.shape[0],
            value_dim=call.value.shape[-1],
            scale=call.scale,
            sliding_window=call.sliding_window,
            softcap=call.softcap,
            sinks=call.sinks,
            kv_scales=self.cache.scales[layer],
        )


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Notes each layer's attention module and cache width; its output is meaningless."""

    num_rows: int
    sliding_layers: frozenset[int]  # layers that must hand over a sliding window
    modules: dict[int, nn.Module] = field(default_factory=dict)  # by layer
    kv_widths: dict[int, int] = field(default_factory=dict)

    def attend(self, call: LayerAttention) -> torch.Tensor:
        layer = getattr(call.module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self.modules:
            raise UserError(f"{type(call.module).__name__} attends more than once a layer or does not know its layer")
        if call.key.shape[:2] != call.value.shape[:2] or call.key.shape[1] != self.num_rows:
            raise UserError(f"{type(call.module).__name__} attends to something else than the tokens of the launch")
        if call.ignored.get("is_causal") is False or getattr(call.module, "is_causal", True) is False:
            raise UserError(f"{type(call.module).__name__} looks ahead: its attention is not causal")
        if layer in self.sliding_layers and call.sliding_window is None:
            raise UserError(f"{type(call.module).__name__} has a sliding window and does not hand it over")
        unknown = [name for name, value in call.ignored.items() if isinstance(value, torch.Tensor)]
        if unknown := sorted(set(unknown) - _UNUSED_TENSORS):
            raise UserError(f"{type(call.module).__name__} attends by more than queries, keys and values: {unknown}")
        self.modules[layer] = call.module
        self.kv_widths[layer] = call.key.shape[0] * (call.key.shape[-1] + call.value.shape[-1])
        return call.query.new_zeros(self.num_rows, call.query.shape[0] * call.value.shape[-1])


def attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_rows, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_rows, head_dim]
    value: torch.Tensor,  # [1, num_kv_heads, num_rows, value_dim]
    attention_mask: torch.Tensor | None,
    *,
    launch: Launch | Probe | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # [1, num_rows, num_heads, value_dim]
    """The function registered with transformers under ATTENTION_NAME."""
    if launch is None:
        raise UserError(f"{type(module).__name__} does not get the keyword arguments of its model")
    call = LayerAttention(
        module=module,
        query=query[0],
        key=key[0],
        value=value[0],
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        ignored={"attention_mask": attention_mask, **kwargs},
    )
    with untouched():
        return launch.attend(call).view(1, query.shape[2], query.shape[1], -1), None
