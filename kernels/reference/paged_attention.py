"""Attention of a few query rows per request over its paged KV cache: decode, verification and prefill alike.

Query rows are laid out in tiles of a fixed number of rows, keys at their absolute positions from 0 on. What a BLAS does
with a sum depends on its length (measured: 400 keys, padded to 416, gave other bits), so the caller derives a tile's
context from the positions of its rows alone. With rows and keys of every product fixed, torch's CPU attention gives a
row the same bits whatever else is in the launch (tests/test_row_invariance.py). Masked keys contribute exact zeros,
so a stale or foreign cache entry may be read as long as it is finite; the cache starts zeroed for that reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from kernels.reference.fp8_rows import FP8, NO_SCALES, KVScales


@dataclass(kw_only=True, eq=False)
class AttentionTiles:
    """Tiles that share one launch: S tiles of M query rows, each over one request's blocks."""

    query_rows: torch.Tensor | None  # [S * M] int64: launch row of each tile row (0 where padded); None: the same rows
    query_positions: torch.Tensor  # [S, M] int64: absolute position of each tile row (0 where padded)
    block_table: torch.Tensor  # [S, num_blocks] int64, 0 (the null block) where padded
    context: int  # keys looked at; those behind a row's own position are masked
    contiguous_from: int | None = None  # first block, when this is one tile over neighbouring blocks: no gather then
    # Keys of a draft tree's branches are stored apart and gathered into the columns of their positions, so that every
    # row sees what it would see in a chain: [num_apart] int64, columns counted over all tiles' block_table.
    apart_columns: torch.Tensor | None = None
    apart_slots: torch.Tensor | None = None  # [num_apart] int64: cache slot of each
    # [S, M] int64: the last key that each row sees in layers that are not causal; None: there are none
    last_keys: torch.Tensor | None = None
    _masks: dict[tuple[int | None, int | None, bool, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def mask(
        self, sliding_window: int | None, attention_chunk: int | None, dtype: torch.dtype, is_causal: bool = True
    ) -> torch.Tensor:
        """Additive mask [S, 1, M, context], built once a launch and shared by all layers of one kind."""
        key = (sliding_window, attention_chunk, is_causal, dtype)
        if key not in self._masks:
            key_positions = torch.arange(self.context, device=self.block_table.device)
            query_positions = self.query_positions[:, None, :, None]
            if is_causal:
                hidden = key_positions > query_positions
            else:
                assert self.last_keys is not None, "a launch for layers that are not causal is built as one"
                hidden = key_positions > self.last_keys[:, None, :, None]
            if sliding_window is not None:
                hidden |= key_positions <= query_positions - sliding_window
                if not is_causal:
                    hidden |= key_positions >= query_positions + sliding_window
            if attention_chunk is not None:
                hidden |= key_positions < query_positions // attention_chunk * attention_chunk
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._masks[key] = zeros.masked_fill_(hidden, float("-inf"))
        return self._masks[key]


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionPlan:
    """How a launch's rows are cut into tiles and put together again."""

    tiles: list[AttentionTiles]  # one call of the attention each
    # [num_rows] int64: tile row, over all tiles, of each launch row; None: the same, from the first on
    output_rows: torch.Tensor | None


def paged_attention(
    query: torch.Tensor,  # [num_rows, num_heads, head_dim]
    kv_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads * (head_dim + value_dim)], keys before values
    plan: AttentionPlan,
    *,
    num_kv_heads: int,
    value_dim: int,
    scale: float,
    values_in_keys: bool = False,  # one KV head [.., head_dim], whose first value_dim elements are values too (MLA)
    sliding_window: int | None = None,
    attention_chunk: int | None = None,  # a text is cut into so many tokens, and a row sees its own piece (Llama 4)
    is_causal: bool = True,  # False: a row sees up to the last key of its segment (DFlash's blocks)
    softcap: float | None = None,  # logits become softcap * tanh(logits / softcap) (Gemma 2)
    sinks: torch.Tensor | None = None,  # [num_heads]: a logit that takes mass and yields nothing (gpt-oss)
    kv_scales: KVScales = NO_SCALES,  # of a cache in FP8
) -> torch.Tensor:  # [num_rows, num_heads * value_dim]
    num_heads, head_dim = query.shape[1:]
    num_blocks, block_size, width = kv_cache.shape
    assert not values_in_keys or (num_kv_heads == 1 and width == head_dim)
    assert not values_in_keys or kv_scales[0] == kv_scales[1]
    is_fp8, scale = kv_cache.dtype == FP8, scale * kv_scales[0]
    stored = kv_cache.view(torch.uint8) if is_fp8 else kv_cache  # torch gathers no FP8
    outputs = []
    for tile in plan.tiles:
        num_tiles, tile_rows = tile.query_positions.shape
        q = query if tile.query_rows is None else query.index_select(0, tile.query_rows)
        q = q.view(num_tiles, tile_rows, num_heads, head_dim).transpose(1, 2)
        kv, first = stored, (tile.contiguous_from or 0) * block_size
        if is_fp8 or tile.contiguous_from is None or first + tile.context > num_blocks * block_size:
            kv, first = stored.flatten(1).index_select(0, tile.block_table.flatten()), 0
            if tile.apart_columns is not None:
                assert tile.apart_slots is not None
                stored_apart = stored.flatten(0, 1).index_select(0, tile.apart_slots)
                kv.view(-1, width).index_copy_(0, tile.apart_columns, stored_apart)
            kv = kv.view(FP8).to(query.dtype) if is_fp8 else kv
        tile_stride = tile.block_table.shape[1] * block_size * width
        k = _heads(kv, first, 0, (num_tiles, num_kv_heads, tile.context, head_dim), tile_stride, width)
        v_column = 0 if values_in_keys else num_kv_heads * head_dim
        v = _heads(kv, first, v_column, (num_tiles, num_kv_heads, tile.context, value_dim), tile_stride, width)
        mask = tile.mask(sliding_window, attention_chunk, query.dtype, is_causal)
        if softcap is None and sinks is None and value_dim == head_dim:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=scale, enable_gqa=num_heads != num_kv_heads
            )
        else:
            out = _explicit_attention(q, k, v, mask, scale, softcap, sinks)
        outputs.append(out.transpose(1, 2).reshape(num_tiles * tile_rows, num_heads * value_dim))
    stacked = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    stacked = stacked if kv_scales[1] == 1.0 else (stacked.float() * kv_scales[1]).to(stacked.dtype)
    return stacked[: len(query)] if plan.output_rows is None else stacked.index_select(0, plan.output_rows)


def _heads(
    kv: torch.Tensor, first_row: int, column: int, shape: tuple[int, int, int, int], tile_stride: int, width: int
) -> torch.Tensor:
    """Keys or values as [S, heads, context, dim], a view of rows of `width`; one call instead of four."""
    offset = kv.storage_offset() + first_row * width + column
    return kv.as_strided(shape, (tile_stride, shape[-1], width, 1), offset)


def _explicit_attention(
    q: torch.Tensor,  # [S, H, M, D]
    k: torch.Tensor,  # [S, Hkv, context, D]
    v: torch.Tensor,  # [S, Hkv, context, Dv]
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # [S, H, M, Dv]
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    logits = (q @ k.transpose(-1, -2)).float() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits + mask
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        probs = torch.cat([logits, column], dim=-1).softmax(-1)[..., :-1]
    else:
        probs = logits.softmax(-1)
    return probs.to(v.dtype) @ v


def places_keep_their_bits(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    tile_rows: int,
    context: int,
    dtype: torch.dtype,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> bool:
    """Whether, on this machine, a row's result depends neither on its place in a tile nor on the number of tiles.

    Asked with equal queries, which must have equal results, over one, five and ten times the context.
    """
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if softcap is not None or sinks is not None or value_dim != head_dim:
            return _explicit_attention(q, k, v, mask, head_dim**-0.5, softcap, sinks)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=num_heads != num_kv_heads)

    for keys in (context, 5 * context, 10 * context):
        q = randn(1, num_heads, 1, head_dim).expand(3, -1, tile_rows, -1).contiguous()
        k, v = (randn(1, num_kv_heads, keys, dim).expand(3, -1, -1, -1) for dim in (head_dim, value_dim))
        mask = torch.zeros(3, 1, tile_rows, keys, dtype=dtype)
        alone, together = (attend(q[:tiles], k[:tiles], v[:tiles], mask[:tiles]) for tiles in (1, 3))
        expected = alone[:, :, :1]
        if not (torch.equal(alone, expected.expand_as(alone)) and torch.equal(together, expected.expand_as(together))):
            return False
    return True
