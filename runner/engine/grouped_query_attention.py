"""Grouped-query attention: its products, norms of heads and rotations (Ainslie et al., arXiv 2305.13245)."""

from __future__ import annotations

import torch

from runner.engine.architecture import Architecture
from runner.engine.attention import Attention
from runner.engine.families import FAMILIES
from runner.engine.forward_batch import ForwardBatch
from runner.engine.kv_cache import PagedKVCache
from runner.engine.linear import ColumnParallelLinear, RowParallelLinear, WeightTarget
from runner.engine.norms import RMSNorm
from runner.engine.operations import Rows, beside, gate, linear, rotate, rotate_and_store
from runner.engine.quantization import Quantization
from runner.engine.rope import RopeRows
from runner.engine.shard import Shard


class GroupedQueryAttention(Attention):
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
        heads, self.shard = arch.heads[layer], shard
        self.layer, self.has_own_keys = layer, heads.kv_layer is None
        self.kv_layer = layer if heads.kv_layer is None else heads.kv_layer
        self.head_dim, self.value_dim = heads.head_dim, heads.head_dim
        self.num_heads = shard.split(heads.num_heads, "num_attention_heads")
        self.num_kv_heads = shard.split(heads.num_kv_heads, "num_key_value_heads")
        self.sliding_window, self.attention_chunk = arch.sliding_windows[layer], arch.attention_chunks[layer]
        self.scale, self.softcap = arch.attention_scale, arch.attention_softcap
        # Logits, which are float32.
        self.sinks = torch.empty(self.num_heads, dtype=torch.float32) if arch.has_sinks else None
        self.rope_key, self.head_layout = arch.ropes[layer], heads.layout
        in_features = arch.hidden_size if in_features is None else in_features
        # Queries alone where keys and values are another layer's.
        names = list(heads.qkv_rows)[: 3 if self.has_own_keys else 1]
        rows = {name: heads.qkv_rows[name] for name in names}
        self.qkv_proj = ColumnParallelLinear(
            in_features, rows, bias=arch.qkv_bias, shard=shard, dtype=dtype, quantization=quantization
        )
        self.o_proj = RowParallelLinear(
            heads.num_heads * heads.head_dim,
            arch.hidden_size,
            "self_attn.o_proj",
            bias=arch.output_bias,
            shard=shard,
            dtype=dtype,
            quantization=quantization,
        )
        family = FAMILIES[arch.family]
        self._is_norm_whole = arch.qk_norm and arch.is_qk_norm_whole
        self._norm_names = family.head_norms
        has_weights = arch.qk_norm and self._norm_names is not None
        # Of queries, and of keys where the layer has some.
        self.q_norm, self.k_norm = (
            RMSNorm.of(arch, dtype, heads.head_dim * (num_heads if self._is_norm_whole else 1)) if is_normed else None
            for num_heads, is_normed in (
                (heads.num_heads, has_weights),
                (heads.num_kv_heads, has_weights and self.has_own_keys),
            )
        )
        # Gates what each head finds, where a family does.
        self._gate_function = family.gate_function
        self.gate_proj = (
            ColumnParallelLinear(
                in_features,
                {f"self_attn.{family.gate}": heads.num_heads * (1 if arch.gates_heads else heads.head_dim)},
                bias=arch.qkv_bias and not family.is_gate_apart,
                shard=shard,
                dtype=dtype,
                quantization=quantization,
            )
            if arch.has_output_gate
            else None
        )
        # Of each head, which are rotated behind it in one launch.
        self._norms = [
            None if norm is None or self._is_norm_whole else (norm.weight, norm.eps)
            for norm in (self.q_norm, self.k_norm)
        ]
        plain = RMSNorm.by_no_weights(heads.head_dim, arch.rms_norm_eps)
        by_ones = (plain.weight, plain.eps)
        self._value_norm = by_ones if arch.norms_values and self.has_own_keys else None
        if arch.qk_norm and not has_weights and (self.rope_key is not None or not arch.norms_turned):
            self._norms = [by_ones, by_ones]
        self._turns_first = arch.norms_turned and self._norms[1] is not None

    def __call__(self, hidden: torch.Tensor, rope: RopeRows | None, batch: ForwardBatch, cache: PagedKVCache) -> Rows:
        assert rope is not None, "of rope_key"
        qkv: Rows
        if self._is_norm_whole:
            qkv = self._normed_whole(self.qkv_proj(hidden, batch.linear_tile))
        else:
            qkv = self.qkv_proj.in_parts(hidden, batch.linear_tile)
        if self.has_own_keys:
            query = rotate_and_store(
                qkv,
                rope,
                batch.slot_mapping,
                cache,
                self.layer,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                q_norm=self._norms[0],
                k_norm=self._norms[1],
                v_norm=self._value_norm,
                turns_first=self._turns_first,
            )
        else:
            query = rotate(qkv, rope, num_heads=self.num_heads, head_dim=self.head_dim, q_norm=self._norms[0])
        out = self.attend(query, cache, batch.attention)
        if self.gate_proj is not None:
            out = gate(out, self.gate_proj(hidden, batch.linear_tile), self._gate_function)
        return self.o_proj.in_parts(out, batch.linear_tile)

    def _normed_whole(self, qkv: torch.Tensor) -> torch.Tensor:
        """qkv with all queries normed together, and all keys; it may be overwritten.

        Ranks norm the heads of all of them: so a row's sum of squares is added up in one order, however many they are.
        """
        queries, keys = (heads * self.head_dim for heads in (self.num_heads, self.num_kv_heads))
        assert self.q_norm is not None and self.k_norm is not None
        parts = ((self.q_norm, slice(0, queries)), (self.k_norm, slice(queries, queries + keys)))
        if self.shard.size == 1:
            for norm, columns in parts:
                norm.overwrite(qkv[:, columns])
            return qkv
        of_all, own = self.shard.of_all(qkv), []
        for norm, columns in parts:
            heads = beside(*(rows[:, columns] for rows in of_all))
            norm.overwrite(heads)
            own.append(heads.chunk(self.shard.size, dim=1)[self.shard.rank])
        return beside(*own, qkv[:, queries + keys :])

    def write_context(self, states: torch.Tensor, rope: RopeRows, batch: ForwardBatch, cache: PagedKVCache) -> None:
        """Store keys and values of rows that ask for nothing themselves, [num_rows, in_features]."""
        assert not self._is_norm_whole, "of plain layers"
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
            v_norm=self._value_norm,
        )

    @property
    def products(self) -> list[ColumnParallelLinear | RowParallelLinear]:
        return [self.qkv_proj, *([] if self.gate_proj is None else [self.gate_proj]), self.o_proj]

    @property
    def products_in_parts(self) -> list[ColumnParallelLinear | RowParallelLinear]:
        return [self.o_proj] if self._is_norm_whole else [self.qkv_proj, self.o_proj]

    @property
    def product_names(self) -> list[str]:
        gate = () if self.gate_proj is None else self.gate_proj.part_rows
        return [*self.qkv_proj.part_rows, *gate, self.o_proj.name]

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        targets: dict[str, WeightTarget] = {}
        for product in self.products:
            targets |= product.weight_targets(prefix)
        norms = dict(zip(self._norm_names or (), (self.q_norm, self.k_norm), strict=False))
        targets |= {f"{prefix}self_attn.{name}.weight": norm.target for name, norm in norms.items() if norm is not None}
        if self.sinks is not None:
            targets[f"{prefix}self_attn.sinks"] = WeightTarget(view=self.sinks, shard_dim=0)
        return targets
