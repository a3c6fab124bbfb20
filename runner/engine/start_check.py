"""What the start asks the machine: whether a row of a launch keeps its bits in any company."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from kernels.cpu.panels import Panels, Weight, unpack
from kernels.linear_plan import rows_of_each_kind
from kernels.quantized_weight import QuantizedWeight
from kernels.reference.linear import rows_keep_their_bits
from kernels.reference.paged_attention import places_keep_their_bits
from kernels.shared_memory import shared_memory
from runner.engine.asked_products import AskedProduct, asked_products
from runner.engine.attention import Attention, one_of_each_shape
from runner.engine.backend import runs_kernels
from runner.engine.experts import Experts
from runner.engine.forward_batch import ForwardBatch, LaunchShape
from runner.engine.kv_cache import PagedKVCache
from runner.engine.launch_shapes import Shapes, shapes_on_cpu
from runner.engine.layers import DecoderLayer
from runner.engine.norms import RMSNorm
from runner.engine.operations import head_logits, linear
from runner.engine.paged_shape import PagedShape
from runner.engine.segment import Segment
from runner.engine.shard import Shard
from runner.engine.step_operations import place_dtype, tree_rows
from runner.engine.tile_shape import TileShape
from runner.engine.upload import to_device

MOST_ROWS_OF_EXPERTS = 4096  # that a mixture of experts is asked with


class Blocks(NamedTuple):
    """Of the cache that attention is asked over."""

    size: int
    dtype: torch.dtype  # of keys and values


def row_invariant_shapes(
    shapes: Shapes,
    layers: Sequence[DecoderLayer],  # one of each kind
    beside: Sequence[Weight],  # Decoder.beside_layers, the head first
    *,
    softcap: torch.Tensor | None = None,  # of the logits
    last_norm: RMSNorm | None = None,  # behind all layers
    max_model_len: int,
    block_size: int,
    kv_dtype: torch.dtype,
    shard: Shard,
) -> Shapes | None:
    """`shapes`, or others in which this machine keeps a row's bits, in all ranks; None when none do.

    Asked of the machine at the start, with layers of the model and its head: what a BLAS or a compiler does with a row
    cannot be read off its documentation. Ranks ask in step, since some of the products are all of theirs.
    """
    blocks = Blocks(block_size, kv_dtype)
    if runs_kernels(beside[0].device):
        from kernels.kernel import compile_ahead  # Triton, as everywhere here where kernels run

        ask = partial(_kernels_keep_bits, shapes, layers, beside, softcap, blocks, last_norm)
        compile_ahead(ask)
        return shapes if shard.all(ask()) else None
    decode = shapes["decode"]
    is_bucketed = isinstance(decode, PagedShape) and decode.buckets is not None
    weight = _attentions(layers)[0].o_proj.weight
    candidates = shapes_on_cpu(weight, max_model_len=max_model_len, is_bucketed=is_bucketed)
    return next((tried for tried in candidates if shard.all(_keeps_bits_on_cpu(tried, layers, beside, blocks))), None)


def _attentions(layers: Sequence[DecoderLayer]) -> list[Attention]:
    return one_of_each_shape(layer.mixer for layer in layers if isinstance(layer.mixer, Attention))


def _tiles(shapes: Shapes) -> list[int | None]:
    """Of products. Where families have the same, so are their products, and asked once."""
    return list(dict.fromkeys(shape.linear for shape in shapes.values()))


def _keeps_bits_on_cpu(
    shapes: Shapes, layers: Sequence[DecoderLayer], beside: Sequence[Weight], blocks: Blocks
) -> bool:
    return all(tile is None or _products_keep_bits(tile, layers, beside) for tile in _tiles(shapes)) and all(
        _attention_keeps_bits(shape, layers, beside[0].dtype, blocks) for shape in shapes.values()
    )


def _products_keep_bits(tile: int, layers: Sequence[DecoderLayer], beside: Sequence[Weight]) -> bool:
    mixtures = [layer.experts for layer in layers if layer.experts is not None]
    weights = [*beside, *(weight for layer in layers for weight in layer.product_weights)]
    routers = [mixture.router for mixture in mixtures]
    weights += [router if isinstance(router, Panels) else unpack(router).float() for router in routers]
    weights += [mixture.shared_gate for mixture in mixtures if mixture.shared_gate is not None]
    return all(
        _panels_keep_bits(weight) if isinstance(weight, Panels) else rows_keep_their_bits(unpack(weight), tile)
        for weight in weights
    ) and all(_experts_keep_bits(mixture, tile) for mixture in mixtures)


def _attention_keeps_bits(
    shape: LaunchShape, layers: Sequence[DecoderLayer], dtype: torch.dtype, blocks: Blocks
) -> bool:
    if isinstance(shape, PagedShape):
        return all(_attentions_agree(shape, attention, blocks) for attention in _attentions(layers))
    assert isinstance(shape, TileShape)
    context = shape.context
    if context is None or shape.is_aligned:
        return True
    return all(
        places_keep_their_bits(
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            value_dim=attention.value_dim,
            tile_rows=shape.attention,
            context=context,
            dtype=dtype,
            softcap=attention.softcap,
            sinks=attention.sinks,
        )
        for attention in _attentions(layers)
    )


def _panels_keep_bits(weight: Panels) -> bool:
    """Rows among others against fewer of them: a compiler wrote what computes them."""
    rows = torch.randn(13, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    together = head_logits(rows, weight, 1)
    return all(torch.equal(head_logits(rows[own], weight, 1), together[own]) for own in (slice(1), slice(4, 9)))


def _experts_keep_bits(experts: Experts, tile: int) -> bool:
    """Rows among others against fewer of them: which others go to their experts moves them about."""
    width, dtype = experts.router.shape[1], experts.product_weights[0].dtype
    rows = torch.randn(32 * tile, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    together = experts.own_part(rows, tile)
    some = (slice(tile), slice(4 * tile, 9 * tile), slice(25 * tile, 32 * tile))
    return all(torch.equal(experts.own_part(rows[own], tile), together[own]) for own in some)


def _kernels_keep_bits(
    shapes: Shapes,
    layers: Sequence[DecoderLayer],
    beside: Sequence[Weight],
    softcap: torch.Tensor | None,
    blocks: Blocks,
    last_norm: RMSNorm | None = None,
) -> bool:
    """A row alone against the same row in company, in every product with the norm behind it, and over two splits.

    What is asked first does not decide what is asked next, so that all may be compiled ahead.
    """
    attentions, paged = _attentions(layers), [shape for shape in shapes.values() if isinstance(shape, PagedShape)]
    assert len(paged) == len(shapes), "kernels attend to pages"
    asked = [own for tile in _tiles(shapes) for own in _asked_products(layers, beside, tile, softcap, last_norm)]
    agree = _products_agree(asked, attentions[0].o_proj.weight.dtype)
    return all([*agree, *(_attentions_agree(shape, own, blocks) for shape in paged for own in attentions)])


def _asked_products(
    layers: Sequence[DecoderLayer],
    beside: Sequence[Weight],
    tile: int | None,
    softcap: torch.Tensor | None,
    last_norm: RMSNorm | None,
) -> list[AskedProduct]:
    lm_head, *others = beside
    return [
        *asked_products(layers, tile, last_norm),
        *(AskedProduct(multiply=partial(linear, weight=own, bias=None, tile=tile), weights=[own]) for own in others),
        AskedProduct(multiply=lambda x: head_logits(x, lm_head, tile, softcap), weights=[lm_head]),
    ]


def compile_products(layers: Sequence[DecoderLayer], dtype: torch.dtype, tile: int | None) -> None:
    """Those of a draft head's layers, where kernels run; their rows' bits are no part of the promise."""
    from kernels.kernel import compile_ahead

    compile_ahead(lambda: _products_agree(asked_products(layers, tile), dtype))


def _products_agree(asked: Sequence[AskedProduct], dtype: torch.dtype) -> list[bool]:
    return [
        _rows_agree(own.compute, own.weights, own.rows_for_one, dtype, own.of_experts, own.is_gated, own.in_features)
        for own in asked
    ]


def _rows_agree(
    product: Callable[[torch.Tensor], torch.Tensor],
    weights: Sequence[Weight],
    of_rows: int = 1,
    dtype: torch.dtype | None = None,
    of_experts: bool = False,
    is_gated: bool = True,
    in_features: int | None = None,
) -> bool:
    """In every kind of program that may compute the product, of experts' as far as there are rows for it.

    Args:
        weights: as AskedProduct.weights, as the last three.
        of_rows: a weight meets one of so many rows.
        dtype: of the rows; None: of the weights.
    """
    counts = set[int]()
    for index, weight in enumerate(weights):
        gated = is_gated and index < len(weights) - 1
        counts |= rows_of_each_kind(
            weight.shape[0] // (1 + gated),
            weight.shape[1],
            element_size=weight.dtype.itemsize,
            gated=gated,
            number_bits=weight.number_bits if isinstance(weight, QuantizedWeight) else None,
            group_size=weight.shared_columns if isinstance(weight, QuantizedWeight) else None,
            of_experts=of_experts,
            capacity=shared_memory(weight.device),
        )
    counts = {min(count * of_rows, max(count, MOST_ROWS_OF_EXPERTS)) for count in counts}
    first = weights[0]
    generator = torch.Generator(first.device).manual_seed(0)
    width = in_features or first.shape[1]
    rows = torch.randn(max(counts), width, generator=generator, device=first.device).to(dtype or first.dtype)
    alone = product(rows[-1:].contiguous())
    agree = [torch.equal(product(rows[-count:])[-1:], alone) for count in sorted(counts)]
    return all(agree)


def _attentions_agree(shape: PagedShape, attention: Attention, blocks: Blocks) -> bool:
    """A tile's first row and its last against each alone, and a row beside a longer context against the row alone.

    The first row's neighbours see keys that it does not see; a longer context may be split, and then its whole launch.
    And the tile's rows against the same rows as nodes of a draft tree, which read what lies before it together.
    """
    device, dtype = attention.o_proj.weight.device, attention.o_proj.weight.dtype
    block_size, layer = blocks.size, attention.kv_layer
    last = min(shape.max_context, 600) - 1
    first, short = max(0, last - 15), last // 2
    table = range(1, last // block_size + 2)
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device).to(dtype)

    widths = [0] * layer + [attention.seen_width]
    cache = PagedKVCache(widths, len(table) + 1, block_size, blocks.dtype, device)
    slots = torch.arange((len(table) + 1) * block_size, device=device)
    cache.write(layer, slots, random(len(slots), attention.seen_width))
    queries = random(last + 1, attention.num_heads, attention.head_dim)

    def attend_to(*spans: range) -> torch.Tensor:
        segments = [Segment(start=span.start, num_tokens=len(span), block_table=table) for span in spans]
        ids = [0] * sum(map(len, spans))
        batch = ForwardBatch.build("decode", segments, ids, shape=shape, block_size=block_size, device=device)
        return attention.attend(queries[batch.positions], cache, batch.attention)[: len(ids)]

    def attend_as_tree(span: range) -> torch.Tensor:
        """A tree that does not branch: its pending token is the first of the span."""
        lengths, depth = to_device([span.start + 1], torch.int64, device), len(span) - 1
        slots = to_device([[block_size + place for place in span]], torch.int64, device)
        parents = to_device([range(-1, depth - 1)], torch.int64, device).view(1, depth)
        rows = tree_rows(lengths, slots, parents, first=0, offset=-1, depth=depth, **shape.tree_tiles)
        tables = to_device([table], place_dtype(device), device)
        own = queries[span.start : span.stop]
        return attention.attend(own, cache, shape.tree_attention(rows, tables, max_context=span.stop))

    alone = [range(place, place + 1) for place in (first, last, short)]
    tile = range(first, last + 1)
    together = attend_to(tile, *alone)
    in_tile, beside = together[: len(tile)], together[len(tile) :]
    at_its_place = torch.equal(in_tile[[0, -1]], beside[:2])
    without_others = torch.equal(attend_to(alone[2]), beside[2:])
    as_tree = torch.equal(attend_as_tree(tile), in_tile)
    return at_its_place and without_others and as_tree
