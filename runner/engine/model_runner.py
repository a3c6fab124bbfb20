"""Runs one model over parts of requests: tokens in, logits out, their KV written on the way.

Serves the target and every model-based draft alike; knows nothing of sampling or of who asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels.reference.gated_delta import DeltaStates
from runner.engine.decoder import Decoder
from runner.engine.device_requests import DeviceBatch
from runner.engine.forward_batch import ForwardBatch, PackedLaunch
from runner.engine.hidden_states import NORMED
from runner.engine.launch import Launch, Part, StepLaunches
from runner.engine.launch_shapes import Shapes, row_invariant_shapes
from runner.engine.operations import take_rows
from runner.engine.paged_runner import PagedRunner
from runner.engine.transformers_check import shapes_that_keep_rows
from runner.engine.transformers_model import TransformersModel
from runner.engine.upload import to_device

SCORED_ROWS = 240  # logits rows of prompt tokens at a time; whole tiles of either size


@dataclass(frozen=True, kw_only=True)
class ModelOutput:
    """What a pass over parts of requests yields, in the order of the parts; logits hold until the next pass."""

    logits: torch.Tensor  # [sum of num_logits, vocab] float32
    hidden_states: torch.Tensor | None  # [num tokens, num_taps * hidden], a row for every token; None without taps


class ModelRunner(PagedRunner):
    def __init__(
        self,
        model: Decoder | TransformersModel,
        *,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        batch_invariant: bool,
        token_map: torch.Tensor | None = None,
        captures_graphs: bool = False,
    ) -> None:
        """token_map: [vocabulary of the texts] int64, the model's own token for each; None where it is the same one."""
        super().__init__(
            model,
            block_size=block_size,
            device=device,
            dtype=dtype,
            batch_invariant=batch_invariant,
            captures_graphs=captures_graphs,
            products=model.product_weights if isinstance(model, Decoder) else (),
            is_recurrent=model.is_recurrent,
        )
        self._num_uncertain = 0
        self.model, self.token_map = model, token_map
        # Multiplications of a row by weights; 0: not known.
        self.products_per_row = model.products_per_row if isinstance(model, Decoder) else 0
        kept: Shapes | None = None
        if isinstance(model, Decoder) and batch_invariant:
            kept = row_invariant_shapes(
                self.shapes,
                model.sample_layers,
                model.beside_layers,
                softcap=model.logits_softcap,
                max_model_len=model.max_model_len,
                shard=model.shard,
            )
        elif isinstance(model, TransformersModel) and model.keeps_rows:
            kept = shapes_that_keep_rows(model, block_size=block_size, device=device, dtype=dtype)
        self.shapes, self.is_row_invariant = kept or self.shapes, kept is not None

    def allocate_cache(self, num_blocks: int, *, max_num_seqs: int = 0, num_uncertain: int = 0) -> None:
        self._num_uncertain = num_uncertain
        super().allocate_cache(num_blocks, max_num_seqs=max_num_seqs, num_uncertain=num_uncertain)

    def empty_states(self, max_num_seqs: int, num_uncertain: int, device: torch.device) -> Sequence[DeltaStates | None]:
        if not (isinstance(self.model, Decoder) and self.is_recurrent):
            return ()
        return self.model.empty_states(max_num_seqs + 1, num_uncertain, self.dtype, device)

    def num_state_bytes(self, max_num_seqs: int, num_uncertain: int) -> int:
        """Of recurrent layers; arguments as of allocate_cache."""
        states = self.empty_states(max_num_seqs, num_uncertain, torch.device("meta"))
        return sum(own.num_bytes for own in states if own is not None)

    def decode_launch(
        self, batch: DeviceBatch, token_ids: torch.Tensor, *, offset: int, num_rows: int, **others: Any
    ) -> tuple[ForwardBatch, torch.Tensor]:
        self._require_room(num_rows - 1)
        return super().decode_launch(batch, token_ids, offset=offset, num_rows=num_rows, **others)

    def _require_room(self, num_uncertain: int) -> None:
        """States forget what lies further back."""
        if self.is_recurrent and num_uncertain > self._num_uncertain:
            raise ValueError(f"num_uncertain must be <= {self._num_uncertain}, as allocated, got {num_uncertain}")

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
                hidden, all_logits, taps = self._launch(launch, draft_token_ids, tap_layers)
                if taps:
                    tapped.append(torch.cat(taps, dim=1)[: len(launch.token_ids)])
                for first in range(0, len(launch.scored_rows), SCORED_ROWS):
                    assert take_prompt_logits is not None, "scored rows need a taker"
                    take_prompt_logits(self._logits(hidden, launch.scored_rows[first : first + SCORED_ROWS]))
                logits.append(self._logits(hidden, launch.logits_rows) if all_logits is None else all_logits)
        return ModelOutput(
            logits=_in_order(logits, step.logits_order),
            hidden_states=_in_order(tapped, step.token_order) if tapped else None,
        )

    def _launch(
        self, launch: Launch, draft_token_ids: torch.Tensor | None, tap_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
        """(normed hidden states, logits, tapped states): of all rows, padding included, but logits without it.

        Logits come along where a graph computes them: of a launch that wants those of every token.
        """
        if self.is_recurrent:
            self._require_room(max(segment.num_uncertain for segment in launch.segments))
        packed = PackedLaunch.of(
            launch.family,
            launch.segments,
            launch.token_ids,
            shape=self.shapes[launch.family],
            block_size=self.block_size,
            has_states=self.is_recurrent,
        )
        size, num_tokens = len(packed.numbers), len(launch.token_ids)
        uploaded = to_device(packed.numbers + launch.draft_rows, torch.int64, self.device)
        numbers = uploaded[:size]
        if launch.draft_rows:
            assert draft_token_ids is not None
            # A slot without a draft computes some token, whose result nobody keeps.
            numbers.index_copy_(0, uploaded[size:], draft_token_ids.clamp(min=0))
        captures = self.graphs is not None and packed.key is not None
        # Of prompts they would be lost: the launch behind may be a replay, which writes where this one did.
        with_logits = captures and launch.family == "decode" and len(launch.logits_rows) == num_tokens

        def compute(numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
            batch = packed.unpack(numbers)
            hidden, taps = self.compute(batch, tap_layers)
            logits = [self.model.logits(hidden, batch.linear_tile)] if with_logits else []
            return (hidden, *logits, *taps)

        if captures:
            assert self.graphs is not None
            hidden, *others = self.graphs((packed.key, tap_layers, with_logits), compute, numbers)
        else:
            hidden, *others = compute(numbers)
        return hidden, others.pop(0)[:num_tokens] if with_logits else None, others

    def compute(self, batch: ForwardBatch, tap_layers: tuple[int, ...] = ()) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A launch that is on the device: (normed hidden states of its rows, their tapped states)."""
        assert self.cache is not None, "allocate_cache comes first"
        if self.token_map is not None:
            batch = replace(batch, token_ids=take_rows(self.token_map.unsqueeze(1), batch.token_ids).squeeze(1))
        inner = tuple(tap for tap in tap_layers if tap != NORMED)
        hidden, taps = self.model(batch, self.cache, inner)
        by_layer = {NORMED: hidden, **dict(zip(inner, taps, strict=True))}
        return hidden, [by_layer[tap] for tap in tap_layers]

    def _logits(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        # Always in the decode family's tiles: the head has one arithmetic, whichever launch a row comes from.
        if not rows:
            return torch.empty(0, self.model.vocab_size, device=self.device)
        tile = self.shapes["decode"].linear
        if rows[-1] - rows[0] == len(rows) - 1:  # neighbours: no gather
            if len(rows) % (tile or 1) == 0:
                return self.model.logits(hidden[rows[0] : rows[-1] + 1], tile)
            if len(hidden) == tile:
                return self.model.logits(hidden, tile)[rows[0] : rows[-1] + 1]
        padding = -len(rows) % (tile or 1)
        index = to_device(rows + rows[:1] * padding, torch.int64, self.device)
        return self.model.logits(hidden.index_select(0, index), tile)[: len(rows)]


def _in_order(rows: list[torch.Tensor], order: list[int] | None) -> torch.Tensor:
    """Rows of the launches as one tensor by part; without an order, of the one launch that has some."""
    if order is None:
        return next((own for own in rows if len(own)), rows[0])
    return torch.cat(rows).index_select(0, to_device(order, torch.int64, rows[0].device))
