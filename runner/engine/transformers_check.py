"""Whether a model that transformers' code runs gives a row the same bits in any company, asked of the model itself.

Its code is not ours, so nothing but the whole of it can be asked: rows of several requests in one launch, and the same
rows in less company, through every layer and the head, over a cache of random keys and values.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from runner.engine.backend import COMPILED
from runner.engine.forward_batch import ForwardBatch, LaunchShape
from runner.engine.kv_cache import PagedKVCache
from runner.engine.launch_shapes import CPU_TILES, Shapes, cpu_shapes
from runner.engine.segment import Family, Segment
from runner.engine.transformers_model import TransformersModel

CONTEXT = 600  # positions, where a model has as many: more than one tile's keys, and as many as show long sums


def shapes_that_keep_rows(
    model: TransformersModel, *, block_size: int, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
) -> Shapes | None:
    """Of launches in which a row's bits are its own; None when there are none, though the model does what it can."""
    candidates: list[Shapes] = []
    for tiles in CPU_TILES:
        shapes = cpu_shapes(tiles, is_packed=True, has_kernel=dtype in COMPILED, max_model_len=model.max_model_len)
        if shapes not in candidates:  # a kernel's attention is the same in all tiles
            candidates.append(shapes)
    context = min(model.max_model_len, CONTEXT)
    rows = _Rows(model, context, block_size=block_size, device=device, dtype=dtype, kv_dtype=kv_dtype)
    return next((shapes for shapes in candidates if rows.are_kept(shapes)), None)


class _Rows:
    """Rows of tokens at positions of one text, whose keys and values lie in a cache that is filled with noise."""

    def __init__(
        self,
        model: TransformersModel,
        context: int,
        *,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
    ) -> None:
        self.model, self.context, self.block_size, self.device = model, context, block_size, device
        self.table = range(1, -(-context // block_size) + 1)
        self.cache = PagedKVCache(model.kv_widths, len(self.table) + 1, block_size, kv_dtype, device)
        self.generator = torch.Generator(device).manual_seed(0)
        slots = torch.arange((len(self.table) + 1) * block_size, device=device)
        for layer, width in enumerate(model.kv_widths):
            noise = torch.randn(len(slots), width, generator=self.generator, device=device)
            self.cache.write(layer, slots, noise.to(dtype))
        ids = torch.randint(model.vocab_size, (context,), generator=self.generator, device=device)
        self.token_ids: list[int] = ids.tolist()

    @torch.inference_mode()
    def are_kept(self, shapes: Shapes) -> bool:
        """Whether every row is what it is alone, or beside fewer of its own text, in both families."""
        last, quarter = self.context - 1, self.context // 4
        # The last row alone; five of a request that verifies; and one more, early in its text.
        decode = [range(last, last + 1), range(2 * quarter, min(2 * quarter + 5, last)), range(quarter, quarter + 1)]
        # A chunk that begins a request, of more rows than vectors take numbers at once, which may have been cut before
        # (of one row, too); and the beginning of another. Threads' shares do not end with rows: their number is odd.
        long, short = range(min(149, quarter)), range(3 * quarter, 3 * quarter + min(12, quarter))
        cuts = [0, 1, len(long) // 3, len(long)]
        pieces = [range(begin, end) for begin, end in itertools.pairwise(cuts)]
        return self._agree(shapes["decode"], "decode", decode, [[own] for own in decode[:2]]) and self._agree(
            shapes["prefill"], "prefill", [long, short], [[piece] for piece in (*pieces, short)]
        )

    def _agree(
        self, shape: LaunchShape, family: Family, together: Sequence[range], apart: Sequence[Sequence[range]]
    ) -> bool:
        """Whether spans have equal bits in one launch and in others, which hold parts of them.

        A short text leaves some of them empty, or all.
        """
        together = [span for span in together if span]
        if not together:
            return True
        found = self._compute(shape, family, together)
        where = {position: row for row, position in enumerate(position for span in together for position in span)}
        for parts in apart:
            spans = [span for span in parts if span]
            if not spans:
                continue
            rows = [where[position] for span in spans for position in span]
            alone = self._compute(shape, family, spans)
            if not all(torch.equal(own, among[rows]) for own, among in zip(alone, found, strict=True)):
                return False
        return True

    def _compute(self, shape: LaunchShape, family: Family, spans: Sequence[range]) -> tuple[Tensor, Tensor]:
        """(hidden states, logits) of the spans' rows."""
        segments = [Segment(start=span.start, num_tokens=len(span), block_table=self.table) for span in spans]
        token_ids = [self.token_ids[position] for span in spans for position in span]
        batch = ForwardBatch.build(
            family, segments, token_ids, shape=shape, block_size=self.block_size, device=self.device
        )
        hidden = self.model(batch, self.cache)[0][: len(token_ids)]
        return hidden, self.model.logits(hidden, None)
