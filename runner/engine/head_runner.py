"""Runs a draft head over rows of requests: tokens and hidden states in, hidden states out, its KV written on the way.

A draft head (EAGLE, MTP) predicts from a token and the hidden state of the position before it. Owns the head's KV
cache, whose blocks are those of the target's block tables; knows nothing of sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F

from runner.engine.forward_batch import ForwardBatch
from runner.engine.kv_cache import PagedKVCache
from runner.engine.segment import Family, Segment
from runner.engine.tile_shape import ANY_SHAPE_TILES, ROW_INVARIANT_TILES, TileShape


class DraftHead(Protocol):
    """Layers over the hidden states of a target."""

    @property
    def kv_widths(self) -> list[int]:
        """Elements a token takes in each layer's cache."""

    def __call__(self, batch: ForwardBatch, hidden: torch.Tensor, cache: PagedKVCache) -> torch.Tensor:
        """hidden: [num_rows, hidden] of the position before each row -> [num_rows, hidden], what is fed back."""


class HeadRunner:
    def __init__(
        self, head: DraftHead, *, block_size: int, device: torch.device, dtype: torch.dtype, batch_invariant: bool
    ) -> None:
        self.head, self.block_size, self.device, self.dtype = head, block_size, device, dtype
        self.tiles = head_tiles(device, batch_invariant=batch_invariant)
        self.cache: PagedKVCache | None = None

    @property
    def cache_bytes_per_block(self) -> int:
        return sum(self.head.kv_widths) * self.block_size * self.dtype.itemsize

    def allocate_cache(self, num_blocks: int) -> None:
        self.cache = PagedKVCache(self.head.kv_widths, num_blocks, self.block_size, self.dtype, self.device)

    @torch.inference_mode()
    def run(
        self,
        family: Family,
        segments: Sequence[Segment],
        token_ids: torch.Tensor,  # [num_rows] int64
        hidden: torch.Tensor,  # [num_rows, hidden]
        *,
        is_causal: bool = True,
    ) -> torch.Tensor:  # [num_rows, hidden]
        """Compute the rows of the segments, one after another; their blocks are reserved."""
        assert self.cache is not None, "allocate_cache comes first"
        num_rows = len(token_ids)
        batch = self.launch(family, segments, num_rows, is_causal=is_causal)
        padding = len(batch.token_ids) - num_rows
        batch = replace(batch, token_ids=F.pad(token_ids, (0, padding)))
        return self.head(batch, F.pad(hidden, (0, 0, 0, padding)), self.cache)[:num_rows]

    def launch(
        self, family: Family, segments: Sequence[Segment], num_rows: int, *, is_causal: bool = True
    ) -> ForwardBatch:
        """A launch of the segments' num_rows rows, and padding; its token ids are placeholders."""
        return ForwardBatch.build(
            family,
            segments,
            [0] * num_rows,
            shape=self.tiles[family],
            block_size=self.block_size,
            device=self.device,
            is_causal=is_causal,
        )

    def in_tiles(self, rows: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """Rows [num_rows, width] padded to whole tiles of the decode family, and the tile, as `logits` takes them."""
        tile = self.tiles["decode"].linear
        return pad_to_tiles(rows, tile), tile


def head_tiles(device: torch.device, *, batch_invariant: bool) -> dict[Family, TileShape]:
    """How a head's rows are cut."""
    return ROW_INVARIANT_TILES if batch_invariant and device.type == "cpu" else ANY_SHAPE_TILES


def pad_to_tiles(rows: torch.Tensor, tile: int | None) -> torch.Tensor:
    """Rows [num_rows, width], and rows of zeros up to a multiple of the tile."""
    return F.pad(rows, (0, 0, 0, -len(rows) % (tile or 1)))
