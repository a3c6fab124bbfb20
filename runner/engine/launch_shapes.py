"""Which shapes a model's launches have, by its attention and where it runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.reference.linear import rows_keep_their_bits
from kernels.reference.paged_attention import places_keep_their_bits
from runner.engine.backend import runs_kernels
from runner.engine.forward_batch import ForwardBatch, LaunchShape
from runner.engine.layers import Attention
from runner.engine.operations import linear, paged_attention
from runner.engine.paged_shape import PagedShape
from runner.engine.segment import Family, Segment
from runner.engine.tile_shape import ANY_SHAPE_TILES, ROW_INVARIANT_TILES, SMALL_ROW_INVARIANT_TILES, TileShape

Shapes = dict[Family, LaunchShape]
SPLIT_KEYS = 512  # of a decoding request: one program for each split of its context


def decoder_shapes(
    attention: Attention, *, batch_invariant: bool, max_model_len: int, is_bucketed: bool = False
) -> Shapes:
    """Of launches of a model or head built from our layers, whose attention (one of its layers') this is."""
    if runs_kernels(attention.o_proj.weight.device):
        from kernels.paged_attention import rows_per_tile

        shapes: Shapes = {}
        splits: tuple[tuple[Family, int | None], ...] = (("decode", SPLIT_KEYS), ("prefill", None))
        for family, split_keys in splits:
            shapes[family] = PagedShape(
                rows_per_tile=rows_per_tile(attention.num_heads, attention.num_kv_heads),
                split_keys=split_keys,
                max_context=max_model_len,
                is_bucketed=is_bucketed and family == "decode",
                linear=1 if batch_invariant else None,
            )
        return shapes
    return dict(ROW_INVARIANT_TILES if batch_invariant else ANY_SHAPE_TILES)


def product_tile(device: torch.device, *, batch_invariant: bool) -> int | None:
    """Rows of a product outside any launch, as operations take it."""
    if not batch_invariant:
        return None
    return 1 if runs_kernels(device) else ROW_INVARIANT_TILES["decode"].linear


def row_invariant_shapes(shapes: Shapes, attention: Attention, weights: Sequence[torch.Tensor]) -> Shapes | None:
    """`shapes`, or others in which this machine keeps a row's bits; None when none do.

    Asked of the machine at the start, with an attention and weights of the model: what a BLAS or a compiler does with a
    row cannot be read off its documentation.
    """
    candidates: list[Shapes] = [shapes]
    if not runs_kernels(attention.o_proj.weight.device):
        candidates.append(dict(SMALL_ROW_INVARIANT_TILES))
    return next((found for found in candidates if _keep_bits(found, attention, weights)), None)


def _keep_bits(shapes: Shapes, attention: Attention, weights: Sequence[torch.Tensor]) -> bool:
    for shape in shapes.values():
        if isinstance(shape, PagedShape):
            if not _kernels_keep_bits(shape, attention, weights):
                return False
        elif isinstance(shape, TileShape) and not _tiles_keep_bits(shape, attention, weights):
            return False
    return True


def _tiles_keep_bits(shape: TileShape, attention: Attention, weights: Sequence[torch.Tensor]) -> bool:
    if shape.linear is not None and not all(rows_keep_their_bits(weight, shape.linear) for weight in weights):
        return False
    if shape.context is None or shape.is_aligned:
        return True
    return places_keep_their_bits(
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        tile_rows=shape.attention,
        context=shape.context,
        dtype=attention.o_proj.weight.dtype,
    )


def _kernels_keep_bits(shape: PagedShape, attention: Attention, weights: Sequence[torch.Tensor]) -> bool:
    """A row alone against the same row among more of them, in products and over a context of two splits."""
    return all(_products_agree(weight, shape.linear) for weight in weights) and _attentions_agree(shape, attention)


def _products_agree(weight: torch.Tensor, tile: int | None, counts: Sequence[int] = (2, 17, 130)) -> bool:
    generator = torch.Generator(weight.device).manual_seed(0)
    rows = torch.randn(max(counts), weight.shape[1], generator=generator, device=weight.device).to(weight.dtype)
    alone = linear(rows[-1:].contiguous(), weight, None, tile)
    return all(torch.equal(linear(rows[-count:], weight, None, tile)[-1:], alone) for count in counts)


def _attentions_agree(shape: PagedShape, attention: Attention, block_size: int = 16) -> bool:
    device, dtype = attention.o_proj.weight.device, attention.o_proj.weight.dtype
    num_heads, num_kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    last = min(shape.max_context, 600) - 1
    count = min(last + 1, 16)
    table = range(1, last // block_size + 2)
    segments = [
        Segment(start=last, num_tokens=1, block_table=table),
        Segment(start=last + 1 - count, num_tokens=count, block_table=table),
    ]
    batch = ForwardBatch.build("decode", segments, [0] * (count + 1), shape=shape, block_size=block_size, device=device)
    generator = torch.Generator(device).manual_seed(0)
    cache = torch.randn(len(table) + 1, block_size, attention.kv_width, generator=generator, device=device).to(dtype)
    query = torch.randn(len(batch.token_ids), num_heads, dim, generator=generator, device=device).to(dtype)
    query[count] = query[0]  # the last row of the second segment
    out = paged_attention(
        query,
        cache,
        batch.attention,
        num_kv_heads=num_kv_heads,
        value_dim=dim,
        scale=dim**-0.5,
        sliding_window=attention.sliding_window,
    )
    return torch.equal(out[0], out[count])
