"""Runs a draft head over rows of requests: tokens and hidden states in, hidden states out, its KV written on the way.

A draft head (EAGLE, MTP) predicts from a token and the hidden state of the position before it. The blocks of its KV
cache are those of the target's block tables. Knows nothing of sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from runner.engine.backend import runs_kernels
from runner.engine.forward_batch import ForwardBatch, PackedLaunch
from runner.engine.graphs import GraphMemory
from runner.engine.kv_cache import PagedKVCache
from runner.engine.layers import DecoderLayer
from runner.engine.paged_runner import PagedLayers, PagedRunner
from runner.engine.segment import Family, Segment
from runner.engine.start_check import compile_products
from runner.engine.upload import to_device


class DraftHead(PagedLayers, Protocol):
    """Layers over the hidden states of a target."""

    @property
    def layers(self) -> Sequence[DecoderLayer]:
        """Of our own; none where transformers' code runs."""

    def __call__(self, batch: ForwardBatch, hidden: torch.Tensor, cache: PagedKVCache) -> torch.Tensor:
        """hidden: [num_rows, width] of the position before each row, or a row of its output -> its output rows."""


class HeadRunner(PagedRunner):
    def __init__(
        self,
        head: DraftHead,
        *,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        batch_invariant: bool,
        kv_dtype: torch.dtype | None = None,
        graph_memory: GraphMemory | None = None,
        reads_segments: bool = False,  # as PackedLaunch.of
    ) -> None:
        super().__init__(
            head,
            block_size=block_size,
            device=device,
            dtype=dtype,
            batch_invariant=batch_invariant,
            graph_memory=graph_memory,
            kv_dtype=kv_dtype,
        )
        self.head, self.reads_segments = head, reads_segments
        if head.layers and batch_invariant and runs_kernels(device):
            compile_products(head.layers, dtype, self.shapes["decode"].linear)

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
        packed = self._packed(family, segments, len(token_ids), is_causal=is_causal)
        numbers = to_device(packed.numbers, torch.int64, self.device)
        numbers[: len(token_ids)].copy_(token_ids)
        padded = F.pad(hidden, (0, 0, 0, packed.num_rows - len(token_ids)))

        def compute(numbers: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor]:
            return (self.compute(packed.unpack(numbers), hidden),)

        if self.graphs is None or packed.key is None:
            return compute(numbers, padded)[0][: len(token_ids)]
        # Copied: the next replay writes where this one did, and outputs are fed back or kept.
        return self.graphs((packed.key, padded.shape[1]), compute, numbers, padded)[0][: len(token_ids)].clone()

    def compute(self, batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        """A launch that is on the device: the head's output for its rows."""
        assert self.cache is not None, "allocate_cache comes first"
        return self.head(batch, hidden, self.cache)

    def launch(
        self, family: Family, segments: Sequence[Segment], num_rows: int, *, is_causal: bool = True
    ) -> ForwardBatch:
        """A launch of the segments' num_rows rows, and padding; its token ids are placeholders."""
        packed = self._packed(family, segments, num_rows, is_causal=is_causal)
        return packed.unpack(to_device(packed.numbers, torch.int64, self.device))

    def in_tiles(self, rows: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """Rows [num_rows, ...] padded to whole tiles of the decode family, and the tile, as `logits` takes them."""
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
            reads_segments=self.reads_segments,
        )


def pad_to_tiles(rows: torch.Tensor, tile: int | None) -> torch.Tensor:
    """Rows [num_rows, ...], and rows of zeros up to a multiple of the tile."""
    missing = -len(rows) % (tile or 1)
    return rows if missing == 0 else F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing))
