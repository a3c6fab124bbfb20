"""Head norms, rotations and the cache's new rows in one pass over the rows of a fused projection, in place.

The same as kernels/rope.py on a GPU; rotations as kernels/reference/rope.py has them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from kernels.cpu.compiled import vectorized

ZERO, ONE = np.float32(0.0), np.float32(1.0)
NO_NORM = np.empty(0, np.float32)


@vectorized
def norm_head(head: Any, weight: Any, eps: np.float32) -> None:
    squares = ZERO
    for column in range(len(head)):
        squares += head[column] * head[column]
    scale = ONE / np.sqrt(squares / np.float32(len(head)) + eps)
    for column in range(len(head)):
        head[column] *= scale * weight[column]


@vectorized
def rotate_rows(
    rows: Any,  # [num_rows, (num_heads + 2 * num_kv_heads) * head_dim] float32
    table: Any,  # [max_model_len, head_dim] float32: cosines, then sines
    positions: Any,  # [num_rows] int64
    slots: Any,  # [num_rows] int64
    kv: Any,  # [num_slots, 2 * num_kv_heads * head_dim] float32
    num_heads: int,
    num_kv_heads: int,
    q_weight: Any,  # [head_dim] float32; []: no norm
    k_weight: Any,
    eps: np.float32,
) -> None:
    head_dim = table.shape[1]
    half = head_dim // 2
    for index in range(len(rows)):
        turns = table[positions[index]]
        for head in range(num_heads + num_kv_heads):
            own = rows[index, head * head_dim : (head + 1) * head_dim]
            weight = q_weight if head < num_heads else k_weight
            if len(weight):
                norm_head(own, weight, eps)
            for column in range(half):
                low, high, cos, sin = own[column], own[half + column], turns[column], turns[half + column]
                own[column] = low * cos - high * sin
                own[half + column] = high * cos + low * sin
        stored, fresh = kv[slots[index]], rows[index, num_heads * head_dim :]
        for column in range(len(fresh)):
            stored[column] = fresh[column]


def rope_and_write(
    qkv: Tensor,  # [num_rows, (num_heads + 2 * num_kv_heads) * head_dim], contiguous; queries and keys are turned
    table: Tensor,  # [max_model_len, head_dim] float32: cosines, then sines
    positions: Tensor,  # [num_rows] int64
    slot_mapping: Tensor,  # [num_rows] int64
    kv_cache: Tensor,  # [num_blocks, block_size, 2 * num_kv_heads * head_dim]
    *,
    num_heads: int,  # 0: rows are keys and values only
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,  # [head_dim]
    k_norm: Tensor | None = None,
    eps: Tensor | None = None,  # []
) -> None:
    assert table.shape[1] == head_dim and qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim
    rotate_rows(
        qkv.numpy(),
        table.numpy(),
        positions.numpy(),
        slot_mapping.numpy(),
        kv_cache.flatten(0, 1).numpy(),
        num_heads,
        num_kv_heads,
        NO_NORM if q_norm is None else q_norm.numpy(),
        NO_NORM if k_norm is None else k_norm.numpy(),
        np.float32(0.0 if eps is None else eps.numpy()),
    )
