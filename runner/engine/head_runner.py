"""Runs a draft head over rows of requests: tokens and hidden states in, hidden states out, its KV written on the way.

A draft head (EAGLE, MTP) predicts from a token and the hidden state of the position before it. Owns the head's KV
cache, whose blocks are those of the target's block tables; knows nothing of sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from runner.engine.forward_batch import ForwardBatch, PackedLaunch
from runner.engine.kv_cache import PagedKVCache
from runner.engine.launch_shapes import Shapes, can_pack, decoder_shapes
from runner.engine.layers import Attention
from runner.engine.paged_shape import PagedShape
from runner.engine.programs import can_record, graph_store
from runner.engine.segment import Family, Segment
from runner.engine.tile_shape import ANY_SHAPE_TILES
from runner.engine.upload import to_device


class DraftHead(Protocol):
    """Layers over the hidden states of a target."""

    max_model_len: int

    @property
    def kv_widths(self) -> list[int]:
        """Elements a token takes in each layer's cache."""

    @property
    def attention(self) -> Attention | None:
        """Of one of its layers; None where transformers' own code attends."""

    def pack(self) -> None:
        """As Decoder.pack, of the head's own products."""

    def __call__(self, batch: ForwardBatch, hidden: torch.Tensor, cache: PagedKVCache) -> torch.Tensor:
        """hidden: [num_rows, width] of the position before each row, or a row of its output -> its output rows."""


class HeadRunner:
    def __init__(
        self,
        head: DraftHead,
        *,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        batch_invariant: bool,
        captures_graphs: bool = False,
    ) -> None:
        """captures_graphs: passes over generated tokens become graphs; else each kernel is launched alone."""
        self.head, self.block_size, self.device, self.dtype = head, block_size, device, dtype
        self.shapes: Shapes = dict(ANY_SHAPE_TILES)
        if head.attention is not None:
            weights = [head.attention.qkv_proj.weight, head.attention.o_proj.weight]
            if can_pack(weights):
                head.pack()
            captures_graphs = captures_graphs and can_record(head.attention.o_proj.weight)
            self.shapes = decoder_shapes(
                head.attention,
                batch_invariant=batch_invariant,
                max_model_len=head.max_model_len,
                is_bucketed=captures_graphs,
            )
        self.graphs = graph_store(device) if captures_graphs else None
        self.cache: PagedKVCache | None = None

    @property
    def is_paged(self) -> bool:
        """As ModelRunner's."""
        return self.graphs is not None and isinstance(self.shapes["decode"], PagedShape)

    @property
    def cache_bytes_per_block(self) -> int:
        return sum(self.head.kv_widths) * self.block_size * self.dtype.itemsize

    def allocate_cache(self, num_blocks: int) -> None:
        if self.graphs is not None:
            self.graphs = graph_store(self.device)  # graphs of another cache would write there
        self.cache = PagedKVCache(self.head.kv_widths, num_blocks, self.block_size, self.dtype, self.device)

    @torch.inference_mode()
    def run(
        self,
        family: Family,
        segments: Sequence[Segment],
        token_ids: torch.Tensor,  # [num_rows] int64
        hidden: torch.Tensor,  # [num_rows, width], as the head takes them
        *,
        is_causal: bool = True,
    ) -> torch.Tensor:  # [num_rows, width of its output]
        """Compute the rows of the segments, one after another; their blocks are reserved."""
        cache = self.cache
        assert cache is not None, "allocate_cache comes first"
        packed = self._packed(family, segments, len(token_ids), is_causal=is_causal)
        numbers = to_device(packed.numbers, torch.int64, self.device)
        numbers[: len(token_ids)].copy_(token_ids)
        padded = F.pad(hidden, (0, 0, 0, packed.num_rows - len(token_ids)))

        def compute(numbers: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor]:
            return (self.head(packed.unpack(numbers), hidden, cache),)

        if self.graphs is None or packed.key is None:
            return compute(numbers, padded)[0][: len(token_ids)]
        # Copied: the next replay writes where this one did, and outputs are fed back or kept.
        return self.graphs((packed.key, padded.shape[1]), compute, numbers, padded)[0][: len(token_ids)].clone()

    def launch(
        self, family: Family, segments: Sequence[Segment], num_rows: int, *, is_causal: bool = True
    ) -> ForwardBatch:
        """A launch of the segments' num_rows rows, and padding; its token ids are placeholders."""
        packed = self._packed(family, segments, num_rows, is_causal=is_causal)
        return packed.unpack(to_device(packed.numbers, torch.int64, self.device))

    def in_tiles(self, rows: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """Rows [num_rows, width] padded to whole tiles of the decode family, and the tile, as `logits` takes them."""
        tile = self.shapes["decode"].linear
        return pad_to_tiles(rows, tile), tile

    def _packed(self, family: Family, segments: Sequence[Segment], num_rows: int, *, is_causal: bool) -> PackedLaunch:
        return PackedLaunch.of(
            family,
            segments,
            [0] * num_rows,
            shape=self.shapes[family],
            block_size=self.block_size,
            is_causal=is_causal,
        )


def pad_to_tiles(rows: torch.Tensor, tile: int | None) -> torch.Tensor:
    """Rows [num_rows, width], and rows of zeros up to a multiple of the tile."""
    return F.pad(rows, (0, 0, 0, -len(rows) % (tile or 1)))
