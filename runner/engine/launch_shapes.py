"""Which shapes a model's launches have, by its attention and where it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from kernels.cpu.panels import Panels, Weight, multiplies_and_adds
from kernels.cpu.panels import can_pack as can_pack_weight
from kernels.reference.fp8_rows import FP8
from kernels.shared_memory import shared_memory
from runner.engine.attention import Attention, one_of_each_shape
from runner.engine.backend import is_compiled, runs_kernels
from runner.engine.bucket import OF_GENERATED_TOKENS, OF_PROMPTS, Buckets
from runner.engine.errors import UserError
from runner.engine.forward_batch import LaunchShape
from runner.engine.paged_shape import PagedShape
from runner.engine.segment import Family
from runner.engine.tile_shape import ANY_SHAPE_TILES, ROW_INVARIANT_TILES, SMALL_ROW_INVARIANT_TILES, TileShape

Shapes = dict[Family, LaunchShape]
# Multiplications that a GPU takes about as long for as the host for a launch: an estimate, 60 us of an H200's.
LAUNCH_PRODUCTS = 1 << 34


def decoder_shapes(
    attentions: Sequence[Attention], *, batch_invariant: bool, max_model_len: int, is_bucketed: bool = False
) -> Shapes:
    """Of launches of a model or head built from our layers, which have attentions of these shapes."""
    weight = attentions[0].o_proj.weight
    if runs_kernels(weight.device):
        from kernels.paged_attention import SPLIT_KEYS, rows_per_tile

        shapes: Shapes = {}
        splits: tuple[tuple[Family, int | None], ...] = (("decode", SPLIT_KEYS), ("prefill", None))
        for family, split_keys in splits:
            shapes[family] = PagedShape(
                rows_per_tile=min(rows_per_tile(own.num_heads, own.num_kv_heads) for own in attentions),
                split_keys=split_keys,
                max_context=max_model_len,
                buckets=_buckets(family, weight) if is_bucketed else None,
                linear=1 if batch_invariant else None,
            )
        return shapes
    sizes = CPU_TILES if batch_invariant else (ANY_SHAPE_TILES,)
    return _shapes_in_tiles(weight, sizes[0], max_model_len, is_bucketed)


def shapes_on_cpu(weight: Weight, *, max_model_len: int, is_bucketed: bool) -> Iterator[Shapes]:
    """All that may keep a row's bits, the fastest first. weight: of a product behind attention."""
    return (_shapes_in_tiles(weight, tiles, max_model_len, is_bucketed) for tiles in CPU_TILES)


def require_shared_memory(
    attentions: Iterable[Attention], dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> None:
    """Raises UserError where a program of the attention's, in this dtype, needs more than this GPU has."""
    from kernels.paged_attention import blocks_of, launch_options

    for own in one_of_each_shape(attentions):
        blocks = blocks_of(own.head_dim, own.value_dim, values_in_keys=own.values_in_keys)
        try:
            launch_options(
                blocks,
                dtype.itemsize,
                values_in_keys=own.values_in_keys,
                is_fp8=kv_dtype == FP8,
                capacity=shared_memory(device),
            )
        except ValueError as error:
            halved = "bfloat16, or " if dtype == torch.float32 else ""
            raise UserError(
                f"hardware.dtype must be one whose attention fits this GPU, got {str(dtype).removeprefix('torch.')}: "
                f"{error}; choose {halved}another GPU"
            ) from error


def _buckets(family: Family, weight: Weight) -> Buckets:
    """Of launches on a GPU. The larger products are, as this weight's, the sooner they take longer than launches."""
    if family == "decode":
        return OF_GENERATED_TOKENS
    most_rows = LAUNCH_PRODUCTS // (weight.shape[0] * weight.shape[1])
    return replace(OF_PROMPTS, most_rows=min(most_rows, OF_PROMPTS.most_rows))


CPU_TILES = (ROW_INVARIANT_TILES, SMALL_ROW_INVARIANT_TILES)  # to be tried in this order, the fastest first
CPU_ROWS = 64  # of a tile of a compiled kernel's: rows that take in their keys together


def _shapes_in_tiles(
    weight: Weight, tiles: Mapping[Family, TileShape], max_model_len: int, is_bucketed: bool
) -> Shapes:
    return cpu_shapes(
        tiles,
        is_packed=isinstance(weight, Panels),
        has_kernel=is_compiled(weight),
        max_model_len=max_model_len,
        is_bucketed=is_bucketed,
    )


def cpu_shapes(
    tiles: Mapping[Family, TileShape],
    *,
    is_packed: bool,
    has_kernel: bool,
    max_model_len: int,
    is_bucketed: bool = False,
) -> Shapes:
    """The tiles, but products of any rows where weights are packed, and a kernel's attention where there is one."""
    shapes: Shapes = {
        family: replace(shape, linear=1) if is_packed and shape.linear is not None else shape
        for family, shape in tiles.items()
    }
    if has_kernel and multiplies_and_adds():
        for family in shapes:
            shapes[family] = PagedShape(
                rows_per_tile=CPU_ROWS,
                split_keys=None,
                max_context=max_model_len,
                linear=shapes[family].linear,
                buckets=OF_GENERATED_TOKENS if is_bucketed and family == "decode" else None,
            )
    return shapes


def can_pack(weights: Sequence[Weight]) -> bool:
    """Whether products with such weights are computed from panels here."""
    return not runs_kernels(weights[0].device) and all(can_pack_weight(weight) for weight in weights)


def product_tile(device: torch.device, *, batch_invariant: bool) -> int | None:
    """Rows of a product outside any launch, as operations take it."""
    if not batch_invariant:
        return None
    return 1 if runs_kernels(device) else ROW_INVARIANT_TILES["decode"].linear
