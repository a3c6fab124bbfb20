"""Decode (a row) and verification of seven drafts (eight rows) over paged caches at Llama-3-8B's heads.

And of three drafts over latents, keys that hold their values, at Moonlight's, and over wide heads, those of 512 of
Gemma 4 E2B; plain heads and latents also in 8 bits. Blocks of a sequence lie scattered over the cache. What comes from
memory is the keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import paged_attention as kernel
from kernels.benchmarks.case import Case, CheckFailed, Setting, Work, check_error, name_of
from kernels.paged_segments import PagedSegments
from kernels.reference import paged_attention as reference
from kernels.reference.fp8_rows import as_fp8
from kernels.reference.tree_rows import NO_BRANCH

BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    values_in_keys: bool = False
    is_fp8: bool = False  # keys and values
    batch: int
    context: int  # positions of a sequence, the last rows' own included
    num_rows: int  # last positions of a sequence that are queries
    split_keys: int
    most_rows: int  # queries of a sequence in the fullest launch that rows are compared in

    @property
    def width(self) -> int:
        return self.head_dim if self.values_in_keys else self.num_kv_heads * (self.head_dim + self.value_dim)

    @property
    def label(self) -> str:
        kind = "latents, " if self.values_in_keys else "wide, " if self.head_dim == 512 else ""
        kind += "fp8, " if self.is_fp8 else ""
        return f"{kind}batch {self.batch} x {self.num_rows} rows, context {self.context}"


def _shapes(setting: Setting) -> list[Shape]:
    plain: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "value_dim": 128}
    latent: dict[str, Any] = {"num_heads": 16, "num_kv_heads": 1, "head_dim": 576, "value_dim": 512}
    latent |= {"values_in_keys": True}
    wide: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 1, "head_dim": 512, "value_dim": 512}
    if setting.is_small:
        plain |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "value_dim": 32}
        latent |= {"num_heads": 4, "head_dim": 24, "value_dim": 16}
        sizes: dict[str, Any] = {"batch": 2, "context": kernel.BLOCK_N + 9, "num_rows": 2, "most_rows": 3}
        kinds = (plain, latent, wide, plain | {"is_fp8": True}, latent | {"is_fp8": True})
        return [Shape(**heads, **sizes, split_keys=kernel.BLOCK_N) for heads in kinds]
    return [
        Shape(
            **heads,
            batch=batch,
            context=context,
            num_rows=num_rows,
            split_keys=kernel.SPLIT_KEYS,
            most_rows=most_rows,
        )
        for heads, most_rows in (
            *((plain, 8), (latent, 4), (wide, 4)),
            *((plain | {"is_fp8": True}, 8), (latent | {"is_fp8": True}, 4)),
        )
        for batch in (1, 64)
        for context in (384, 1024, 8192)  # the first within a split
        for num_rows in (1, most_rows)
    ]


def cases(setting: Setting) -> list[Case]:
    return [
        Case(
            op="paged_attention",
            label=shape.label,
            dtype=name_of(setting.dtype),
            prepare=partial(_prepare, setting, shape),
        )
        for shape in _shapes(setting)
    ]


def _segments(shape: Shape, tables: Tensor, tiles: Sequence[tuple[int, int, int]], most: int) -> PagedSegments:
    """Tiles of (sequence, first position, rows), one after the other in the launch."""
    first_rows = [sum(size for *_, size in tiles[:index]) for index in range(len(tiles))]
    columns = [
        (seq, row, size, start, shape.context - 1) for (seq, start, size), row in zip(tiles, first_rows, strict=True)
    ]
    names = ("tile_segments", "tile_rows", "tile_sizes", "tile_positions", "last_keys")
    tensors = torch.tensor(columns, dtype=torch.int32, device=tables.device).T.contiguous().unbind()
    tiles_of: dict[str, Any] = dict(zip(names, tensors, strict=True))
    return PagedSegments(
        **tiles_of,
        block_tables=tables,
        branch_starts=torch.full((len(tables),), NO_BRANCH, dtype=torch.int32, device=tables.device),
        branch_slots=tables.new_empty(len(tables), 0),
        max_context=shape.context,
        max_tile_size=most,
    )


def _prepare(setting: Setting, shape: Shape) -> Work:
    most = shape.most_rows
    blocks = -(-shape.context // BLOCK_SIZE)
    generator = torch.Generator(setting.device).manual_seed(0)
    order = torch.randperm(shape.batch * blocks, generator=generator, device=setting.device) + 1
    tables = order.view(shape.batch, blocks).to(torch.int32)
    cache = setting.normal(shape.batch * blocks + 1, BLOCK_SIZE, shape.width, seed=1)
    cache = as_fp8(cache, 1.0) if shape.is_fp8 else cache
    queries = setting.normal(shape.batch, most, shape.num_heads, shape.head_dim, seed=2)
    sizes: dict[str, Any] = {"num_kv_heads": shape.num_kv_heads, "value_dim": shape.value_dim}
    sizes |= {"scale": shape.head_dim**-0.5, "values_in_keys": shape.values_in_keys}

    def launch(num_rows: int) -> tuple[Tensor, PagedSegments]:
        """Queries and tiles of the last positions of every sequence."""
        tiles = [(sequence, shape.context - num_rows, num_rows) for sequence in range(shape.batch)]
        return queries[:, most - num_rows :].flatten(0, 1), _segments(shape, tables, tiles, num_rows)

    def attend(rows: Tensor, segments: PagedSegments, kv: Tensor) -> Tensor:
        return kernel.paged_attention(rows, kv, segments, split_keys=shape.split_keys, **sizes)

    def by_definition(dtype: torch.dtype) -> Tensor:
        """A sequence at a time: all of them would not fit in float64."""
        positions = torch.arange(shape.context - shape.num_rows, shape.context, device=setting.device).unsqueeze(0)
        in_order = torch.arange(blocks, device=setting.device).unsqueeze(0)
        outputs = []
        for own, table in zip(queries[:, most - shape.num_rows :], tables, strict=True):
            tiles = reference.AttentionTiles(
                query_rows=None, query_positions=positions, block_table=in_order, context=shape.context
            )
            plan = reference.AttentionPlan(tiles=[tiles], output_rows=None)
            kv = cache.view(torch.uint8)[table.long()].view(cache.dtype).to(dtype)
            outputs.append(reference.paged_attention(own.to(dtype).contiguous(), kv, plan, **sizes))
        return torch.cat(outputs)

    def check() -> list[str]:
        found = attend(*launch(shape.num_rows), cache)
        passed = [check_error(found, by_definition(setting.dtype), by_definition(torch.float64))]
        if not setting.is_interpreted:  # there a product is a BLAS's, whose order of summation is its own
            passed.append(check_bits(found.view(shape.batch, shape.num_rows, -1)))
        return passed

    def check_bits(found: Tensor) -> str:
        fullest = attend(*launch(most), cache).view(shape.batch, most, -1)
        if not torch.equal(found, fullest[:, most - shape.num_rows :]):
            raise CheckFailed(f"rows have other bits in tiles of {shape.num_rows} than of {most} rows")
        for sequence in {0, shape.batch - 1}:
            for place in (most - 1, most - shape.num_rows):
                tile = (sequence, shape.context - most + place, 1)
                alone = attend(queries[sequence, place : place + 1], _segments(shape, tables, [tile], 1), cache)
                if not torch.equal(alone[0], fullest[sequence, place]):
                    raise CheckFailed(f"a row of sequence {sequence} has other bits alone")
        return "row bits"

    rows, segments = launch(shape.num_rows)
    kv_bytes = shape.batch * shape.context * shape.width * cache.dtype.itemsize
    return Work(
        check=check,
        calls=[partial(attend, rows, segments, kv) for (kv,) in setting.copies(kv_bytes, cache)],
        num_bytes=kv_bytes + len(rows) * shape.num_heads * (shape.head_dim + shape.value_dim) * setting.dtype.itemsize,
        comes_from=setting.comes_from(kv_bytes),
    )
