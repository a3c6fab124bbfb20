"""Runs one model over parts of requests: tokens in, logits out, their KV written on the way.

Owns the model and its KV cache tensors. Serves the target and every model-based draft alike; knows nothing of
sampling or of who asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kernels.reference.linear import rows_keep_their_bits
from kernels.reference.paged_attention import places_keep_their_bits
from runner.engine.decoder import Decoder
from runner.engine.forward_batch import ForwardBatch
from runner.engine.hidden_states import NORMED
from runner.engine.kv_cache import PagedKVCache
from runner.engine.launch import Launch, Part, StepLaunches
from runner.engine.segment import Family
from runner.engine.tile_shape import ANY_SHAPE_TILES, ROW_INVARIANT_TILES, SMALL_ROW_INVARIANT_TILES, TileShape
from runner.engine.transformers_model import TransformersModel

SCORED_ROWS = 240  # logits rows of prompt tokens at a time; whole tiles of either size


@dataclass(frozen=True, kw_only=True)
class ModelOutput:
    """What a pass over parts of requests yields, in the order of the parts."""

    logits: torch.Tensor  # [sum of num_logits, vocab] float32
    hidden_states: torch.Tensor | None  # [num tokens, num_taps * hidden], a row for every token; None without taps


class ModelRunner:
    def __init__(
        self,
        model: Decoder | TransformersModel,
        *,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        batch_invariant: bool,
        token_map: torch.Tensor | None = None,
    ) -> None:
        """token_map: [vocabulary of the texts] int64, the model's own token for each; None where it is the same one."""
        self.token_map = token_map
        self.model, self.block_size, self.device, self.dtype = model, block_size, device, dtype
        # Fixed tiles keep a row's bits on the CPU; torch's CUDA products promise nothing of the kind.
        if isinstance(model, Decoder) and batch_invariant and device.type == "cpu":
            choices = (ROW_INVARIANT_TILES, SMALL_ROW_INVARIANT_TILES)
            kept = next((tiles for tiles in choices if _keeps_bits(model, tiles, dtype)), None)
            self.tiles = kept or ROW_INVARIANT_TILES
            self.is_row_invariant = kept is not None
        else:
            self.tiles = ANY_SHAPE_TILES
            self.is_row_invariant = False
        self.cache: PagedKVCache | None = None

    @property
    def cache_bytes_per_block(self) -> int:
        return sum(self.model.kv_widths) * self.block_size * self.dtype.itemsize

    def allocate_cache(self, num_blocks: int) -> None:
        self.cache = PagedKVCache(self.model.kv_widths, num_blocks, self.block_size, self.dtype, self.device)

    def run(
        self,
        parts: Sequence[Part],
        draft_token_ids: torch.Tensor | None = None,
        take_prompt_logits: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """The logits of `forward`."""
        return self.forward(parts, draft_token_ids, take_prompt_logits).logits

    @torch.inference_mode()
    def forward(
        self,
        parts: Sequence[Part],
        draft_token_ids: torch.Tensor | None = None,
        take_prompt_logits: Callable[[torch.Tensor], None] | None = None,
        tap_layers: tuple[int, ...] = (),
    ) -> ModelOutput:
        """Compute the parts' tokens.

        Args:
            parts: what to compute; their blocks are reserved.
            draft_token_ids: [sum of num_draft_tokens] int64, in the order of the parts, -1 where there is none; never
                read back.
            take_prompt_logits: given the logits of the rows that are scored, [<= SCORED_ROWS, vocab] float32 at a
                time, in the order of the parts; those of a long prompt would not fit memory at once.
            tap_layers: which hidden states to return (runner.engine.hidden_states).
        """
        step = StepLaunches.of(parts)
        logits = []
        tapped = []
        for launch in (step.prefill, step.decode):
            if launch.segments:
                hidden, taps = self._launch(launch, draft_token_ids, tap_layers)
                if taps:
                    tapped.append(torch.cat(taps, dim=1)[: len(launch.token_ids)])
                for first in range(0, len(launch.scored_rows), SCORED_ROWS):
                    assert take_prompt_logits is not None, "scored rows need a taker"
                    take_prompt_logits(self._logits(hidden, launch.scored_rows[first : first + SCORED_ROWS]))
                logits.append(self._logits(hidden, launch.logits_rows))
        return ModelOutput(
            logits=_in_order(logits, step.logits_order),
            hidden_states=_in_order(tapped, step.token_order) if tapped else None,
        )

    def _launch(
        self, launch: Launch, draft_token_ids: torch.Tensor | None, tap_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(normed hidden states, tapped ones) of a launch's rows, padding included."""
        assert self.cache is not None, "allocate_cache comes first"
        batch = ForwardBatch.build(
            launch.family,
            launch.segments,
            launch.token_ids,
            shape=self.tiles[launch.family],
            block_size=self.block_size,
            device=self.device,
        )
        if launch.draft_rows:
            assert draft_token_ids is not None
            # A slot without a draft computes some token, whose result nobody keeps.
            known_ids = draft_token_ids.clamp(min=0)
            batch.token_ids.index_copy_(0, torch.tensor(launch.draft_rows, device=self.device), known_ids)
        if self.token_map is not None:
            batch = replace(batch, token_ids=self.token_map.index_select(0, batch.token_ids))
        inner = tuple(tap for tap in tap_layers if tap != NORMED)
        hidden, taps = self.model(batch, self.cache, inner)
        by_layer = {NORMED: hidden, **dict(zip(inner, taps, strict=True))}
        return hidden, [by_layer[tap] for tap in tap_layers]

    def _logits(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        # Always in the decode family's tiles: the head has one arithmetic, whichever launch a row comes from.
        if not rows:
            return torch.empty(0, self.model.vocab_size, device=self.device)
        tile = self.tiles["decode"].linear
        if len(hidden) == tile and rows[-1] - rows[0] == len(rows) - 1:  # one tile, and neighbours in it: no gather
            return self.model.logits(hidden, tile)[rows[0] : rows[-1] + 1]
        padding = -len(rows) % (tile or 1)
        index = torch.tensor(rows + rows[:1] * padding, device=self.device)
        return self.model.logits(hidden.index_select(0, index), tile)[: len(rows)]


def _in_order(rows: list[torch.Tensor], order: list[int] | None) -> torch.Tensor:
    """Rows of the launches as one tensor by part; without an order, of the one launch that has some."""
    if order is None:
        return next((own for own in rows if len(own)), rows[0])
    return torch.cat(rows).index_select(0, torch.tensor(order, device=rows[0].device))


def _keeps_bits(model: Decoder, tiles: dict[Family, TileShape], dtype: torch.dtype) -> bool:
    """Asked of this machine's BLAS at the start, with the weights of one layer and the head."""
    attention, mlp = model.layers[0].attention, model.layers[0].mlp
    layers = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    weights = [*(layer.weight for layer in layers), model.lm_head]
    return all(
        rows_keep_their_bits(weight, shape.linear)
        for shape in tiles.values()
        for weight in weights
        if shape.linear is not None
    ) and all(
        places_keep_their_bits(
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            tile_rows=shape.attention,
            context=shape.context,
            dtype=dtype,
        )
        for shape in tiles.values()
        if shape.context is not None and not shape.is_aligned
    )
