"""Runs one model over parts of requests: tokens in, logits out, their KV written on the way.

Serves the target and every model-based draft alike; knows nothing of sampling or of who asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from runner.engine.decoder import Decoder
from runner.engine.forward_batch import ForwardBatch, PackedLaunch
from runner.engine.graphs import GraphMemory
from runner.engine.hidden_states import NORMED
from runner.engine.kv_cache import LayerStates
from runner.engine.launch import Launch, Part, StepLaunches
from runner.engine.launch_shapes import Shapes
from runner.engine.operations import take_rows
from runner.engine.paged_runner import PagedRunner
from runner.engine.start_check import row_invariant_shapes
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
        kv_dtype: torch.dtype | None = None,
        token_map: torch.Tensor | None = None,
        graph_memory: GraphMemory | None = None,
    ) -> None:
        """token_map: [vocabulary of the texts] int64, the model's own token for each; None where it is the same one."""
        super().__init__(
            model,
            block_size=block_size,
            device=device,
            dtype=dtype,
            batch_invariant=batch_invariant,
            graph_memory=graph_memory,
            kv_dtype=kv_dtype,
            products=model.product_weights if isinstance(model, Decoder) else (),
            is_recurrent=model.is_recurrent,
        )
        self.model, self.token_map = model, token_map
        self.kv_scales = list(model.kv_scales)
        # Multiplications of a row by weights; 0: not known.
        self.products_per_row = model.products_per_row if isinstance(model, Decoder) else 0
        kept: Shapes | None = None
        if isinstance(model, Decoder) and batch_invariant:
            kept = row_invariant_shapes(
                self.shapes,
                model.sample_layers,
                model.beside_layers,
                softcap=model.logits_softcap,
                last_norm=model.norm,
                max_model_len=model.max_model_len,
                block_size=block_size,
                kv_dtype=self.kv_dtype,
                shard=model.shard,
            )
        elif isinstance(model, TransformersModel) and model.keeps_rows:
            kept = shapes_that_keep_rows(
                model, block_size=block_size, device=device, dtype=dtype, kv_dtype=self.kv_dtype
            )
        self.shapes, self.is_row_invariant = kept or self.shapes, kept is not None

    def of_first_layers(self, num_layers: int) -> ModelRunner:
        """A runner of the first layers, the norm and the head: over the same weights, in launches of the same shapes.

        It has graphs of its own. Once this one has a cache, it is to read that (read_cache).
        """
        assert isinstance(self.model, Decoder), "other models have no layers of ours"
        own = copy(self)
        own.model = self.model.of_first_layers(num_layers)
        own.kv_widths, own.products_per_row = own.model.kv_widths, own.model.products_per_row
        own.kv_scales = list(own.model.kv_scales)
        own.release_cache()
        return own

    def empty_states(self, max_num_seqs: int, num_uncertain: int, device: torch.device) -> Sequence[LayerStates | None]:
        if not (isinstance(self.model, Decoder) and self.is_recurrent):
            return ()
        return self.model.empty_states(max_num_seqs + 1, num_uncertain, self.dtype, device)

    def num_state_bytes(self, max_num_seqs: int, num_uncertain: int) -> int:
        """Of recurrent layers; arguments as of allocate_cache."""
        states = self.empty_states(max_num_seqs, num_uncertain, torch.device("meta"))
        return sum(own.num_bytes for own in states if own is not None)

    def run(self, parts: Sequence[Part], draft_token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """The logits of `forward`, of parts without scored rows."""
        return self.forward(parts, draft_token_ids).logits

    @torch.inference_mode()
    def forward(
        self,
        parts: Sequence[Part],
        draft_token_ids: torch.Tensor | None = None,
        take_prompt_logits: Callable[[torch.Tensor], None] | None = None,
        tap_layers: tuple[int, ...] = (),
        *,
        taps_every_token: bool = True,
    ) -> ModelOutput:
        """Compute the parts' tokens.

        Args:
            parts: what to compute; their blocks are reserved.
            draft_token_ids: [sum of num_draft_tokens] int64, in the order of the parts, -1 where there is none; never
                read back.
            take_prompt_logits: given the logits of the rows that are scored, [<= SCORED_ROWS, vocab] float32 at a
                time, in the order of the parts; those of a long prompt would not fit memory at once.
            tap_layers: which hidden states to return (runner.engine.hidden_states).
            taps_every_token: False: of a part's prompt tokens without logits they may be zeros, but for the last one.
        """
        step = StepLaunches.of(parts)
        logits = []
        tapped = []
        for launch in (step.prefill, step.decode):
            if launch.segments:
                late = self._late_rows(launch, tap_layers, taps_every_token=taps_every_token)
                hidden, all_logits, taps = self._launch(launch, draft_token_ids, tap_layers, late)
                if taps:
                    tapped.append(torch.cat(taps, dim=1)[: len(launch.token_ids)])
                scored = _places(launch.scored_rows, late)
                for first in range(0, len(scored), SCORED_ROWS):
                    assert take_prompt_logits is not None, "scored rows need a taker"
                    take_prompt_logits(self._logits(hidden, scored[first : first + SCORED_ROWS]))
                wanted = _places(launch.logits_rows, late)
                logits.append(self._logits(hidden, wanted) if all_logits is None else all_logits)
        return ModelOutput(
            logits=_in_order(logits, step.logits_order),
            hidden_states=_in_order(tapped, step.token_order) if tapped else None,
        )

    def _late_rows(self, launch: Launch, tap_layers: tuple[int, ...], *, taps_every_token: bool) -> list[int] | None:
        """LateRows of a launch of prompts: what logits or states are wanted of; None: all of its rows."""
        if not isinstance(self.model, Decoder) or self.model.late_from == self.model.num_layers:
            return None
        is_tapped = any(map(self._is_late, tap_layers))
        if launch.family == "decode" or (is_tapped and taps_every_token):
            return None
        wanted = {*launch.scored_rows, *launch.logits_rows}
        if is_tapped:  # a chunk may end with the prompt and yield nothing, as where a request is computed again
            wanted |= {end - 1 for end in accumulate(segment.num_tokens for segment in launch.segments)}
        return None if len(wanted) == len(launch.token_ids) else sorted(wanted)

    def _is_late(self, tap: int) -> bool:
        """Whether late rows alone have this state."""
        assert isinstance(self.model, Decoder)
        return tap == NORMED or tap > self.model.late_from

    def _launch(
        self,
        launch: Launch,
        draft_token_ids: torch.Tensor | None,
        tap_layers: tuple[int, ...],
        late: list[int] | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
        """(normed hidden states of the late rows, logits, tapped states), padding included, but logits without it.

        Logits come along where a graph computes them: of a launch that wants those of every token.
        """
        if self.is_recurrent:
            self.require_room(max(segment.num_uncertain for segment in launch.segments))
        packed = PackedLaunch.of(
            launch.family,
            launch.segments,
            launch.token_ids,
            shape=self.shapes[launch.family],
            block_size=self.block_size,
            reads_segments=self.is_recurrent,
            late_rows=late,
        )
        size, num_tokens = len(packed.numbers), len(launch.token_ids)
        uploaded = to_device(packed.numbers + launch.draft_rows, torch.int64, self.device)
        numbers = uploaded[:size]
        if launch.draft_rows:
            assert draft_token_ids is not None
            # A slot without a draft computes some token, whose result nobody keeps.
            numbers.index_copy_(0, uploaded[size:], draft_token_ids.clamp(min=0))
        beside = self.inputs_beside(launch, packed.num_rows)
        captures = self.graphs is not None and packed.key is not None
        # Of prompts they would be lost: the launch behind may be a replay, which writes where this one did.
        with_logits = captures and launch.family == "decode" and len(launch.logits_rows) == num_tokens

        def compute(numbers: torch.Tensor, *beside: torch.Tensor) -> tuple[torch.Tensor, ...]:
            batch = packed.unpack(numbers)
            hidden, taps = self.compute(batch, tap_layers, *beside)
            logits = [self.model.logits(hidden, batch.linear_tile)] if with_logits else []
            return (hidden, *logits, *taps)

        if captures:
            assert self.graphs is not None
            hidden, *others = self.graphs((packed.key, tap_layers, with_logits), compute, numbers, *beside)
        else:
            hidden, *others = compute(numbers, *beside)
        own_logits = others.pop(0)[:num_tokens] if with_logits else None
        if late is not None:
            others = [
                _spread(own, late, packed.num_rows) if self._is_late(tap) else own
                for tap, own in zip(tap_layers, others, strict=True)
            ]
        return hidden, own_logits, others

    def inputs_beside(self, launch: Launch, num_rows: int) -> tuple[torch.Tensor, ...]:
        """What the model takes beside the launch's numbers; a row for each of num_rows, padding included."""
        return ()

    def compute(
        self, batch: ForwardBatch, tap_layers: tuple[int, ...] = (), *beside: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A launch that is on the device: (normed hidden states of its rows, their tapped states).

        beside: as inputs_beside gives them.
        """
        assert self.cache is not None, "allocate_cache comes first"
        if self.token_map is not None:
            batch = replace(batch, token_ids=take_rows(self.token_map.unsqueeze(1), batch.token_ids).squeeze(1))
        inner = tuple(tap for tap in tap_layers if tap != NORMED)
        hidden, taps = self.model(batch, self.cache, inner, *beside)
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


def _places(rows: list[int], late: list[int] | None) -> list[int]:
    """Of rows of a launch among the late ones."""
    if late is None:
        return rows
    place = {row: at for at, row in enumerate(late)}
    return [place[row] for row in rows]


def _spread(states: torch.Tensor, late: list[int], num_rows: int) -> torch.Tensor:
    """[late rows, width], padding included, at their places in the launch [num_rows, width]; zeros elsewhere."""
    index = to_device(late, torch.int64, states.device)
    return states.new_zeros(num_rows, states.shape[1]).index_copy_(0, index, states[: len(late)])


def _in_order(rows: list[torch.Tensor], order: list[int] | None) -> torch.Tensor:
    """Rows of the launches as one tensor by part; without an order, of the one launch that has some."""
    if order is None:
        return next((own for own in rows if len(own)), rows[0])
    return torch.cat(rows).index_select(0, to_device(order, torch.int64, rows[0].device))
