"""Drafts with a head that reads one hidden state of the target and keeps no KV: Medusa, the MLP speculator.

The state is the normed one that the target's own head read to yield the last committed token.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kernels.cpu.panels import Change, Weight, pack
from proposers.base import ProposerContext
from proposers.drafting.token_by_token import TokenByTokenProposer
from proposers.heads.quantized import quantize_head
from runner.engine.checkpoint import ModelSource
from runner.engine.head_runner import pad_to_tiles
from runner.engine.hidden_states import NORMED
from runner.engine.launch_shapes import can_pack, product_tile
from runner.engine.request import Request, VerifyOutput
from runner.engine.schedule import Schedule

logger = logging.getLogger(__name__)


class LastStateHead(Protocol):
    """What guesses from that state."""

    @property
    def product_weights(self) -> list[Weight]:
        """Of all its products, [out_features, in_features] each."""

    def convert(self, change: Change) -> None:
        """As Decoder.convert."""


class LastStateProposer(TokenByTokenProposer):
    """Keeps each request's last state; a method adds how its head gets from it to logits."""

    taps_every_token = False

    def __init__(
        self,
        *,
        num_speculative_tokens: int,
        context: ProposerContext,
        draft_sample_method: str,
        source: ModelSource,
        head: LastStateHead,
        max_depth: int,  # tokens that the head can guess one after another
        max_model_len: int | None,  # longest text that gets drafts; None: the target's
        is_tree: bool = False,  # num_speculative_tokens are nodes, of which there may be more
    ) -> None:
        if num_speculative_tokens > max_depth and not is_tree:
            logger.warning(
                "%d tokens are asked of %s, which guesses %d ahead: so many are drafted at most",
                num_speculative_tokens,
                source.model,
                max_depth,
            )
            num_speculative_tokens = max_depth
        super().__init__(
            num_speculative_tokens=num_speculative_tokens,
            context=context,
            draft_sample_method=draft_sample_method,
        )
        self.max_depth = max_depth
        self.max_model_len = min(max_model_len or context.max_model_len, context.max_model_len)
        self.tile = product_tile(context.device, batch_invariant=context.batch_invariant)
        quantize_head(head, source, context.device)
        if can_pack(head.product_weights):
            head.convert(pack)
            self.tile = 1
        self._states: dict[str, torch.Tensor] = {}  # request_id -> [hidden]

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return (NORMED,) if self.num_speculative_tokens > 0 else ()

    def max_draft_tokens(self, request: Request, limit: int) -> int:
        return self.room(request, min(limit, self.max_depth))

    @torch.inference_mode()
    def update(self, schedule: Schedule, output: VerifyOutput) -> None:
        if not self.tap_layers:
            return
        assert output.hidden_states is not None, "the verifier was asked for hidden states"
        last = dict[str, torch.Tensor]()
        for index, item in enumerate(schedule.scheduled):
            request = item.request
            is_next = request.num_computed_tokens == request.num_tokens - 1  # else more of the prompt is to come
            if is_next and not request.is_finished and self.may_draft(request):
                last[request.request_id] = output.hidden_states.of(index, request.num_computed_tokens - item.start)[-1]
        if last:  # copied: a view would keep the states of the whole step
            self._states.update(zip(last, torch.stack(list(last.values())), strict=True))

    def fills_blocks(self, request: Request) -> bool:
        return True  # the last token's state is all that is kept, and not there

    @property
    def can_capture(self) -> bool:
        """Whether its products take any number of rows, as captured steps have them."""
        return self.num_speculative_tokens > 0 and self.tile in (None, 1)

    def release(self, request_id: str) -> None:
        self._states.pop(request_id, None)

    def captured_arguments(self, num_tokens: int) -> dict[str, Any]:
        return {
            **super().captured_arguments(min(num_tokens, self.max_depth)),
            "states": self._states,
            "capacity": self.context.max_num_seqs,
            "max_depth": self.most_drafts(self.num_speculative_tokens),
            "max_model_len": self.max_model_len,
        }

    def last_states(self, requests: Sequence[Request]) -> torch.Tensor:
        """[len(requests), hidden], of the position before each request's last token."""
        return torch.stack([self._states[request.request_id] for request in requests])

    def in_tiles(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [num_rows, width], and rows of zeros up to whole tiles."""
        return pad_to_tiles(rows, self.tile)
