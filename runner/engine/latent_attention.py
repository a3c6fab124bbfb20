"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the cache holds one latent of a token for all heads.

Heads' keys and values are products of the latent, k_h = K_h c and v_h = V_h c, and are never computed: a query meets
c itself as K_h^T q, and what it finds there goes through V_h. So a token takes rank + turned elements of the cache, and
all heads share them. Beside the latent lies the one key that is turned.
"""

from __future__ import annotations

import torch

from runner.engine.architecture import Architecture
from runner.engine.attention import Attention
from runner.engine.forward_batch import ForwardBatch
from runner.engine.head_linear import HeadLinear
from runner.engine.kv_cache import PagedKVCache
from runner.engine.latent_operations import room_for_heads, rotate_and_store_latents
from runner.engine.latent_shapes import DOWN, GATE, KEY_UP, QUERY, QUERY_DOWN, QUERY_UP, VALUE_UP
from runner.engine.linear import ColumnParallelLinear, RowParallelLinear, WeightTarget
from runner.engine.norms import RMSNorm
from runner.engine.operations import Rows, gate, scale_queries
from runner.engine.quantization import Quantization
from runner.engine.rope import RopeRows
from runner.engine.shard import Shard

NORM_EPS = 1e-6  # of the latents' norms, whatever the config says of the others'


class LatentAttention(Attention):
    values_in_keys = True

    def __init__(
        self,
        arch: Architecture,
        layer: int,
        shard: Shard,
        dtype: torch.dtype,
        *,
        quantization: Quantization | None = None,  # by names within the layer
    ) -> None:
        assert arch.latent is not None
        self.layer, self.kv_layer, self.shapes = layer, layer, arch.latent
        shapes = self.shapes
        self.head_dim, self.value_dim = shapes.row_width, shapes.kv_lora_rank
        self.num_heads, self.num_kv_heads = shard.split(shapes.num_heads, "num_attention_heads"), 1
        self.scale = arch.attention_scale
        self.rope_key, self.head_layout = arch.ropes[layer], arch.heads[layer].layout
        # Every rank has latents whole, and queries of its own heads.
        query_rank = shapes.q_lora_rank
        down = {DOWN: shapes.row_width} if query_rank is None else {QUERY_DOWN: query_rank, DOWN: shapes.row_width}
        self.down_proj = ColumnParallelLinear(
            arch.hidden_size, down, bias=arch.qkv_bias, shard=Shard(), dtype=dtype, quantization=quantization
        )
        self.query_proj = ColumnParallelLinear(
            arch.hidden_size if query_rank is None else query_rank,
            {QUERY if query_rank is None else QUERY_UP: shapes.num_heads * shapes.query_dim},
            bias=False,
            shard=shard,
            dtype=dtype,
            quantization=quantization,
        )
        self.query_norm = None if query_rank is None else RMSNorm(query_rank, NORM_EPS, dtype)
        self.latent_norm = RMSNorm(shapes.kv_lora_rank, NORM_EPS, dtype)
        self.key_up = HeadLinear(KEY_UP, shapes.num_heads, shapes.kv_lora_rank, shapes.qk_nope_head_dim, shard, dtype)
        self.value_up = HeadLinear(VALUE_UP, shapes.num_heads, shapes.v_head_dim, shapes.kv_lora_rank, shard, dtype)
        # Gates what each head finds, by one number, where a family does.
        self.gate_proj = (
            ColumnParallelLinear(
                arch.hidden_size,
                {GATE: shapes.num_heads},
                bias=False,
                shard=shard,
                dtype=dtype,
                quantization=quantization,
            )
            if arch.has_output_gate
            else None
        )
        self.o_proj = RowParallelLinear(
            shapes.num_heads * shapes.v_head_dim,
            arch.hidden_size,
            "self_attn.o_proj",
            bias=arch.output_bias,
            shard=shard,
            dtype=dtype,
            quantization=quantization,
        )

    def __call__(self, hidden: torch.Tensor, rope: RopeRows | None, batch: ForwardBatch, cache: PagedKVCache) -> Rows:
        assert rope is not None, "of rope_key"
        shapes, tile = self.shapes, batch.linear_tile
        latents, inner = self.down_proj(hidden, tile), hidden
        if self.query_norm is not None:
            inner, latents = latents.split_with_sizes((len(self.query_norm.weight), shapes.row_width), dim=1)
            self.query_norm.overwrite(inner)
        queries = self.query_proj(inner, tile).view(-1, self.num_heads, shapes.query_dim)
        meeting = room_for_heads(queries, self.num_heads, self.head_dim)  # latents, and the keys beside them
        self.key_up(queries[:, :, : shapes.qk_nope_head_dim], meeting[:, :, : shapes.kv_lora_rank], tile)
        rotate_and_store_latents(
            queries,
            latents,
            (self.latent_norm.weight, self.latent_norm.eps),
            rope,
            batch.slot_mapping,
            cache,
            self.layer,
            meeting[:, :, shapes.kv_lora_rank :],
        )
        meeting = scale_queries(meeting, rope)
        found = self.attend(meeting, cache, batch.attention)
        values = room_for_heads(found, self.num_heads, shapes.v_head_dim)
        self.value_up(found.view(-1, self.num_heads, shapes.kv_lora_rank), values, tile)
        out = values.flatten(1)
        if self.gate_proj is not None:
            out = gate(out, self.gate_proj(hidden, tile), "sigmoid")
        return self.o_proj.in_parts(out, tile)

    @property
    def projections(self) -> list[ColumnParallelLinear]:
        gates = [] if self.gate_proj is None else [self.gate_proj]
        return [self.down_proj, self.query_proj, *gates]

    @property
    def products(self) -> list[ColumnParallelLinear | RowParallelLinear]:
        return [*self.projections, self.o_proj]

    @property
    def products_in_parts(self) -> list[ColumnParallelLinear | RowParallelLinear]:
        return [self.o_proj]

    @property
    def head_products(self) -> list[HeadLinear]:
        return [self.key_up, self.value_up]

    @property
    def product_names(self) -> list[str]:
        return [*(name for product in self.projections for name in product.part_rows), self.o_proj.name]

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        targets: dict[str, WeightTarget] = {}
        for product in (*self.products, *self.head_products):
            targets |= product.weight_targets(prefix)
        targets[f"{prefix}self_attn.kv_a_layernorm.weight"] = self.latent_norm.target
        if self.query_norm is not None:
            targets[f"{prefix}self_attn.q_a_layernorm.weight"] = self.query_norm.target
        return targets
