"""A decoder's operations, computed where their arguments are: by Triton kernels on a GPU, by torch elsewhere.

On a CPU they are compiled where they can be (kernels/cpu).

`tile` says how products are computed: None = as is fastest for the shape at hand, which need not be row-invariant.
Quantized weights have one way.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from kernels.cpu.panels import Panels, Weight, unpack
from kernels.quantized_weight import QuantizedWeight
from kernels.reference.act_and_mul import Activation, act_and_mul
from kernels.reference.gate import GateFunction
from kernels.reference.gate import gate as gate_in_torch
from kernels.reference.linear import linear as linear_in_tiles
from kernels.reference.paged_attention import AttentionPlan
from kernels.reference.paged_attention import paged_attention as attention_over_tiles
from kernels.reference.partial_sums import PartialSums
from kernels.reference.rms_norm import rms_norm as rms_norm_in_torch
from kernels.reference.rope import apply_rope
from kernels.reference.softcap import softcap as softcap_in_torch
from kernels.reference.sum_of_ranks import sum_of_ranks as sum_of_ranks_in_torch
from runner.engine.backend import is_compiled, runs_kernels
from runner.engine.kv_cache import PagedKVCache
from runner.engine.rope import RopeRows

Rows = torch.Tensor | PartialSums  # [num_rows, width], of a product
NormWeights = tuple[torch.Tensor, torch.Tensor]  # weight [head_dim], eps [] float32


def take_rows(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[table_rows, width] and [num_rows] int64 -> [num_rows, width]."""
    if runs_kernels(table) or table.requires_grad:
        return table.index_select(0, rows)
    from kernels.cpu.rows import take_rows as on_cpu

    return on_cpu(table, rows)


def beside(*parts: torch.Tensor) -> torch.Tensor:
    """[num_rows, a], [num_rows, b], ... -> [num_rows, a + b + ...]."""
    if not is_compiled(parts[0]):
        return torch.cat(parts, dim=1)
    from kernels.cpu.rows import beside as on_cpu

    return on_cpu(*parts)


def sum_of_ranks(parts: torch.Tensor) -> torch.Tensor:
    """[num_ranks, num_rows, width] -> [num_rows, width], in the order of the ranks."""
    if is_compiled(parts):
        from kernels.cpu.sum_of_ranks import sum_of_ranks as on_cpu

        return on_cpu(parts)
    if not runs_kernels(parts):
        return sum_of_ranks_in_torch(parts)
    from kernels.sum_of_ranks import sum_of_ranks as kernel

    return kernel(parts)


def add(first: Rows, second: torch.Tensor) -> torch.Tensor:
    """Both [num_rows, width]."""
    if isinstance(first, PartialSums):
        from kernels.partial_sums import add_up

        return add_up(first, second)
    if not is_compiled(first):
        return first + second
    from kernels.cpu.rows import add as on_cpu

    return on_cpu(first, second)


def scale_rows(rows: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """[num_rows, width] times [] float32 on the CPU, rounded once, to the dtype of the rows."""
    if not is_compiled(rows):
        return rows * factor.item()
    from kernels.cpu.rows import scale as on_cpu

    return on_cpu(rows, factor)


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, tile: int | None) -> torch.Tensor:
    """[num_rows, in_features] x [out_features, in_features] -> [num_rows, out_features]."""
    if isinstance(weight, Panels):
        from kernels.cpu.linear import linear as on_cpu

        return on_cpu(x, weight, bias)
    if not _has_kernel(x, weight, tile):
        return linear_in_tiles(x, unpack(weight), bias, tile)
    from kernels.linear import linear as kernel

    return kernel(x, weight, bias)


def linear_in_parts(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, tile: int | None) -> Rows:
    """linear, for a norm or a rotation behind it, which add up partial sums if it leaves some."""
    if isinstance(weight, Panels) or not _has_kernel(x, weight, tile):
        return linear(x, weight, bias, tile)
    from kernels.linear import linear_in_parts as kernel

    return kernel(x, weight, bias)


def whole(rows: Rows) -> torch.Tensor:
    """For what is behind a product and adds up nothing."""
    if not isinstance(rows, PartialSums):
        return rows
    from kernels.partial_sums import add_up

    return add_up(rows)


def head_logits(
    hidden: torch.Tensor,
    weight: Weight,
    tile: int | None,
    softcap: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """[num_rows, hidden] x [vocab, hidden] -> [num_rows, vocab] float32; num_rows a multiple of tile.

    softcap [] float32, on the CPU: logits become softcap * tanh(logits / softcap). bias: [vocab]. scale: as softcap, of
    the logits last.
    """
    logits = _head_logits(hidden, weight, tile, softcap, bias)
    return logits if scale is None else scale_rows(logits, scale)


def _head_logits(
    hidden: torch.Tensor, weight: Weight, tile: int | None, softcap: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    if isinstance(weight, Panels):
        from kernels.cpu.linear import linear as on_cpu

        logits = on_cpu(hidden, weight, bias, out_dtype=torch.float32)
    elif _has_kernel(hidden, weight, tile):
        from kernels.linear import linear as kernel

        cap = None if softcap is None else softcap.item()
        return kernel(hidden, weight, bias, out_dtype=torch.float32, softcap=cap)
    else:
        logits = linear_in_tiles(hidden, unpack(weight), bias, tile).float()
    if softcap is None:
        return logits
    if not is_compiled(logits):
        return softcap_in_torch(logits, softcap.item())
    from kernels.cpu.rows import cap_in_place

    cap_in_place(logits, softcap)
    return logits


def gated_linear(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, tile: int | None, activation: Activation = "silu"
) -> torch.Tensor:
    """activation(x G^T) * (x U^T) for weight = [G; U]: [num_rows, in_features] -> [num_rows, intermediate]."""
    if isinstance(weight, Panels) or not _has_kernel(x, weight, tile):
        gate_up = linear(x, weight, bias, tile)
        if not is_compiled(x):
            return act_and_mul(gate_up, activation)
        from kernels.cpu.act_and_mul import act_and_mul as on_cpu

        return on_cpu(gate_up, activation)
    from kernels.linear import gated_linear as kernel

    return kernel(x, weight, bias, activation)


def _has_kernel(x: torch.Tensor, weight: torch.Tensor | QuantizedWeight, tile: int | None) -> bool:
    """Whether a Triton kernel computes such a product; of quantized weights no BLAS does."""
    return runs_kernels(x) and (tile is not None or isinstance(weight, QuantizedWeight))


def rotate_and_store(
    qkv: Rows,  # [num_rows, (num_heads + 2 * num_kv_heads) * head_dim]; may be overwritten
    rope: RopeRows,
    slot_mapping: torch.Tensor,  # [num_rows] int64
    cache: PagedKVCache,
    layer: int,
    *,
    num_heads: int,  # 0: rows are keys and values only
    num_kv_heads: int,
    head_dim: int,
    q_norm: NormWeights | None = None,
    k_norm: NormWeights | None = None,
    v_norm: NormWeights | None = None,  # only beside k_norm, and with the same eps
    turns_first: bool = False,  # norms are of what is turned, of queries and keys alone
) -> torch.Tensor:  # [num_rows, num_heads, head_dim]
    """Norm heads where a model does, rotate queries and keys, store keys and values; the queries."""
    assert (v_norm is None or k_norm is not None) and not (turns_first and v_norm is not None)
    columns = num_heads * head_dim
    if isinstance(qkv, PartialSums) or runs_kernels(qkv) or is_compiled(qkv):
        norm_weights: dict[str, Any] = {}
        if k_norm is not None:
            norm_weights = {"q_norm": None if q_norm is None else q_norm[0], "k_norm": k_norm[0], "eps": k_norm[1]}
            norm_weights |= {"v_norm": None if v_norm is None else v_norm[0], "turns_first": turns_first}
        queries: torch.Tensor = _rope_kernels(qkv).rope_and_write(
            qkv,
            rope.table.compact,
            rope.positions,
            slot_mapping,
            cache.layers[layer],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            kv_scales=cache.scales[layer],
            **norm_weights,
        )
        return scale_queries(queries.view(len(queries), num_heads, head_dim), rope)
    if k_norm is not None and not turns_first:
        qkv = _normed_heads(qkv, (num_heads, num_kv_heads), head_dim, (q_norm, k_norm, v_norm))
    turns = rope.behind(qkv.shape[1]) if num_heads == 0 else rope.whole_rows
    turned = apply_rope(qkv, *turns)
    if turns_first:
        turned = _normed_heads(turned, (num_heads, num_kv_heads), head_dim, (q_norm, k_norm, v_norm))
    query, kv = turned.split_with_sizes((columns, 2 * num_kv_heads * head_dim), dim=1)
    cache.write(layer, slot_mapping, kv)
    return scale_queries(query.view(len(query), num_heads, head_dim), rope)


def _normed_heads(
    qkv: torch.Tensor, num_heads: tuple[int, int], head_dim: int, norms: tuple[NormWeights | None, ...]
) -> torch.Tensor:
    """num_heads: of queries, and of keys; norms: of these and of values."""
    heads = qkv.view(len(qkv), -1, head_dim).split_with_sizes((*num_heads, num_heads[1]), dim=1)
    normed = [own if norm is None else rms_norm_in_torch(own, *norm) for own, norm in zip(heads, norms, strict=True)]
    return torch.cat(normed, dim=1).flatten(1)


def rotate(
    queries: Rows,  # [num_rows, num_heads * head_dim]; may be overwritten
    rope: RopeRows,  # of layers with or without keys
    *,
    num_heads: int,
    head_dim: int,
    q_norm: NormWeights | None = None,
) -> torch.Tensor:  # [num_rows, num_heads, head_dim]
    """rotate_and_store of a layer that reads another's keys and values, and stores none."""
    if isinstance(queries, PartialSums) or runs_kernels(queries) or is_compiled(queries):
        norm_weights = {} if q_norm is None else {"q_norm": q_norm[0], "eps": q_norm[1]}
        turned: torch.Tensor = _rope_kernels(queries).rotate(
            queries, rope.table.compact, rope.positions, num_heads=num_heads, head_dim=head_dim, **norm_weights
        )
    else:
        if q_norm is not None:
            queries = rms_norm_in_torch(queries.view(-1, num_heads, head_dim), *q_norm).flatten(1)
        turned = apply_rope(queries, *rope.up_to(queries.shape[1]))
    return scale_queries(turned.view(len(turned), num_heads, head_dim), rope)


def scale_queries(queries: torch.Tensor, rope: RopeRows) -> torch.Tensor:
    """Turned queries [num_rows, num_heads, head_dim] times their positions' factors, where there are some."""
    if rope.query_factors is None or queries.shape[1] == 0:
        return queries
    return queries * take_rows(rope.query_factors, rope.positions).unsqueeze(2)


def _rope_kernels(rows: Rows) -> ModuleType:
    if isinstance(rows, PartialSums) or runs_kernels(rows):
        from kernels import rope as on_gpu

        return on_gpu
    from kernels.cpu import rope as on_cpu

    return on_cpu


def gate(x: torch.Tensor, by: torch.Tensor, function: GateFunction) -> torch.Tensor:
    """x times a function of `by`: [num_rows, width], and [num_rows, gates], each for columns side by side.

    Rows may be strided.
    """
    if is_compiled(x):
        from kernels.cpu.gate import gate as on_cpu

        return on_cpu(x, by, function)
    if not runs_kernels(x):
        return gate_in_torch(x, by, function)
    from kernels.gate import gate as kernel

    return kernel(x, by, function)


def paged_attention(
    query: torch.Tensor,  # [num_rows, num_heads, head_dim]
    kv_cache: torch.Tensor,  # [num_blocks, block_size, Attention.kv_width]
    plan: Any,  # ForwardBatch.attention
    **layer: Any,  # keyword arguments of kernels/reference/paged_attention.py
) -> torch.Tensor:  # [num_rows, num_heads * value_dim]
    if isinstance(plan, AttentionPlan):
        return attention_over_tiles(query, kv_cache, plan, **layer)
    if is_compiled(query):
        from kernels.cpu.paged_attention import paged_attention as on_cpu

        return on_cpu(query, kv_cache, plan.segments, **layer)
    from kernels.paged_attention import paged_attention as kernel

    return kernel(query, kv_cache, plan.segments, split_keys=plan.split_keys, **layer)
