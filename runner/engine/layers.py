"""The layers of a pre-norm decoder: norms, rotations, attention over the paged cache, and one whole layer.

Targets, drafts and draft heads (EAGLE, MTP, DFlash) are built from them. Objects hold one tensor-parallel shard;
weights are allocated empty, and weight_targets() says which checkpoint tensor fills which.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kernels.cpu.panels import Change, Weight
from runner.engine.architecture import Architecture
from runner.engine.experts import Experts
from runner.engine.forward_batch import ForwardBatch
from runner.engine.kv_cache import PagedKVCache
from runner.engine.linear import ColumnParallelLinear, RowParallelLinear, WeightTarget
from runner.engine.mlp import MLP
from runner.engine.operations import (
    add_rms_norm,
    linear,
    paged_attention,
    rms_norm,
    rotate_and_store,
    sum_beside_rms_norm,
)
from runner.engine.quantization import Quantization
from runner.engine.rope import Rope, RopeRows
from runner.engine.shard import Shard


class RMSNorm:
    def __init__(self, size: int, eps: float, dtype: torch.dtype, *, adds_one: bool = False) -> None:
        """adds_one: the checkpoint's weight lacks a 1 (Gemma); with it, 16 bits do not hold it."""
        self.eps = torch.tensor(eps, dtype=torch.float32)
        self.weight = torch.empty(size, dtype=torch.float32 if adds_one else dtype)
        self._offset = 1.0 if adds_one else 0.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, x_norm: RMSNorm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the sum, the sum); of what x_norm makes of x, where there is one."""
        return add_rms_norm(x, residual, self.weight, self.eps, None if x_norm is None else x_norm.weight)

    def beside_sum(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The sum, and behind it its norm: [num_rows, 2 * size]."""
        return sum_beside_rms_norm(x, residual, self.weight, self.eps)

    @property
    def target(self) -> WeightTarget:
        return WeightTarget(view=self.weight, offset=self._offset)


class Attention:
    def __init__(
        self,
        arch: Architecture,
        layer: int,
        shard: Shard,
        dtype: torch.dtype,
        *,
        in_features: int | None = None,  # None: the hidden size; EAGLE-3 attends from twice as many
        quantization: Quantization | None = None,  # by names within the layer
    ) -> None:
        self.layer, self.head_dim = layer, arch.head_dim
        self.is_causal = True  # False: rows see all of their segment, in launches built for that (DFlash's blocks)
        self.num_heads = shard.split(arch.num_heads, "num_attention_heads")
        self.num_kv_heads = shard.split(arch.num_kv_heads, "num_key_value_heads")
        self.sliding_window = arch.sliding_windows[layer]
        self.scale, self.softcap = arch.attention_scale, arch.attention_softcap
        # Logits, which are float32.
        self.sinks = torch.empty(self.num_heads, dtype=torch.float32) if arch.has_sinks else None
        self.rope_key, self._head_layout = arch.ropes[layer], arch.head_layout
        in_features = arch.hidden_size if in_features is None else in_features
        self.qkv_proj = ColumnParallelLinear(
            in_features, arch.qkv_rows, bias=arch.qkv_bias, shard=shard, dtype=dtype, quantization=quantization
        )
        self.o_proj = RowParallelLinear(
            arch.num_heads * arch.head_dim,
            arch.hidden_size,
            "self_attn.o_proj",
            bias=arch.output_bias,
            shard=shard,
            dtype=dtype,
            quantization=quantization,
        )
        self.q_norm, self.k_norm = (
            RMSNorm(arch.head_dim, arch.rms_norm_eps, dtype, adds_one=arch.norms_add_one) if arch.qk_norm else None
            for _ in range(2)
        )
        self._norms = [None if norm is None else (norm.weight, norm.eps) for norm in (self.q_norm, self.k_norm)]

    def __call__(self, hidden: torch.Tensor, rope: RopeRows, batch: ForwardBatch, cache: PagedKVCache) -> torch.Tensor:
        query = rotate_and_store(
            self.qkv_proj(hidden, batch.linear_tile),
            rope,
            batch.slot_mapping,
            cache,
            self.layer,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            q_norm=self._norms[0],
            k_norm=self._norms[1],
        )
        out = paged_attention(
            query,
            cache.layers[self.layer],
            batch.attention,
            num_kv_heads=self.num_kv_heads,
            value_dim=self.head_dim,
            scale=self.scale,
            sliding_window=self.sliding_window,
            is_causal=self.is_causal,
            softcap=self.softcap,
            sinks=self.sinks,
        )
        return self.o_proj(out, batch.linear_tile)

    def write_context(self, states: torch.Tensor, rope: RopeRows, batch: ForwardBatch, cache: PagedKVCache) -> None:
        """Store keys and values of rows that ask for nothing themselves, [num_rows, in_features]."""
        queries, fused = self.num_heads * self.head_dim, self.qkv_proj
        if isinstance(fused.weight, torch.Tensor):
            bias = None if fused.bias is None else fused.bias[queries:]
            keys_and_values = linear(states, fused.weight[queries:], bias, batch.linear_tile)
        else:  # which cannot be cut
            keys_and_values = fused(states, batch.linear_tile)[:, queries:].contiguous()
        rotate_and_store(
            keys_and_values,
            rope,
            batch.slot_mapping,
            cache,
            self.layer,
            num_heads=0,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            k_norm=self._norms[1],
        )

    def rope(self, hf_config: Any, max_model_len: int) -> Rope:
        """The rotations of this and of every layer of a model that has the same rope_key."""
        return Rope(
            hf_config,
            self.rope_key,
            self._head_layout,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            max_model_len=max_model_len,
        )

    @property
    def kv_width(self) -> int:
        """Elements a token takes in the cache."""
        return 2 * self.num_kv_heads * self.head_dim

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        targets = self.qkv_proj.weight_targets(prefix) | self.o_proj.weight_targets(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            targets[f"{prefix}self_attn.q_norm.weight"] = self.q_norm.target
            targets[f"{prefix}self_attn.k_norm.weight"] = self.k_norm.target
        if self.sinks is not None:
            targets[f"{prefix}self_attn.sinks"] = WeightTarget(view=self.sinks, shard_dim=0)
        return targets


class DecoderLayer:
    """norm, attention, norm, MLP, each with its residual; heads drop the first norm or bring their own.

    Some families norm what attention and MLP add to the residual stream, too (Gemma 2, GLM-4).
    """

    def __init__(
        self,
        arch: Architecture,
        layer: int,
        shard: Shard,
        dtype: torch.dtype,
        *,
        in_features: int | None = None,  # of the attention; None: the hidden size
        has_input_norm: bool = True,  # EAGLE's first layer has none
        quantization: Quantization | None = None,  # of its products, by names within the layer
    ) -> None:
        self._names = arch.norms
        norm = partial(RMSNorm, arch.hidden_size, arch.rms_norm_eps, dtype, adds_one=arch.norms_add_one)
        self.input_norm = norm() if has_input_norm else None
        self.after_attention, self.after_mlp = (
            None if name is None else norm() for name in (self._names.after_attention, self._names.after_mlp)
        )
        self.attention = Attention(arch, layer, shard, dtype, in_features=in_features, quantization=quantization)
        self.before_mlp = norm()
        self.mlp: MLP | Experts = (
            Experts(arch.experts, arch.hidden_size, shard, dtype, activation=arch.activation, quantization=quantization)
            if arch.experts is not None and arch.experts.in_layers[layer]
            else MLP(
                arch.hidden_size,
                arch.intermediate_size,
                shard,
                dtype,
                bias=arch.mlp_bias,
                activation=arch.activation,
                quantization=quantization,
            )
        )

    def __call__(
        self,
        hidden: torch.Tensor | None,  # output of the layer below, not yet added; None for the first layer
        residual: torch.Tensor,
        rope: RopeRows,
        batch: ForwardBatch,
        cache: PagedKVCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.before_attention(hidden, residual)
        return self.after_input_norm(normed, residual, rope, batch, cache)

    def before_attention(
        self, hidden: torch.Tensor | None, residual: torch.Tensor, hidden_norm: RMSNorm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(input of the attention, the residual stream in front of the layer), both [num_rows, hidden].

        hidden_norm: after_mlp of the layer below.
        """
        if hidden is None:
            return residual if self.input_norm is None else self.input_norm(residual), residual
        assert self.input_norm is not None, "only a first layer goes without its norm"
        return self.input_norm.add(hidden, residual, hidden_norm)

    def after_input_norm(
        self,
        normed: torch.Tensor,  # [num_rows, in_features]
        residual: torch.Tensor,  # [num_rows, hidden]
        rope: RopeRows,
        batch: ForwardBatch,
        cache: PagedKVCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output not yet normed by after_mlp and added, residual), both [num_rows, hidden]."""
        attended = self.attention(normed, rope, batch, cache)
        normed, residual = self.before_mlp.add(attended, residual, self.after_attention)
        return self.mlp(normed, batch.linear_tile), residual

    @property
    def product_weights(self) -> list[Weight]:
        """[out_features, in_features] each; of experts those of one."""
        weights = [self.attention.qkv_proj.weight, self.attention.o_proj.weight, *self.mlp.product_weights]
        return weights if self.mlp.shared is None else [*weights, *self.mlp.shared.product_weights]

    @property
    def products_per_row(self) -> int:
        """Multiplications of a row by weights."""
        attention = (self.attention.qkv_proj.weight, self.attention.o_proj.weight)
        return self.mlp.products_per_row + sum(weight.shape.numel() for weight in attention)

    @property
    def product_names(self) -> list[str]:
        """Of the checkpoint's matrices that may be quantized: all but a router."""
        names = (*self.attention.qkv_proj.part_rows, self.attention.o_proj.name)
        return [*(f"{name}.weight" for name in names), *self.mlp.product_names]

    def convert(self, change: Change) -> None:
        """As Decoder.convert."""
        for part in (self.attention.qkv_proj, self.attention.o_proj, self.mlp):
            part.convert(change)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        names = self._names
        norms = {
            names.before_attention: self.input_norm,
            names.after_attention: self.after_attention,
            names.before_mlp: self.before_mlp,
            names.after_mlp: self.after_mlp,
        }
        own = {f"{prefix}{name}.weight": norm.target for name, norm in norms.items() if norm is not None}
        return own | self.attention.weight_targets(prefix) | self.mlp.weight_targets(prefix)
