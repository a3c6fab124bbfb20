"""Heads over the target's hidden states that may have been trained to draft in one pass: P-EAGLE (arXiv 2602.01469).

Behind the row of the pending token stand rows of the mask token, each with the one state that was learned for all of
them; they yield the logits of the following places. KV of mask rows is scratch. Without a mask: token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch

from proposers.drafting.from_hidden_states import HeadProposer, MaskRows
from proposers.heads.autoregressive import AutoregressiveHead
from proposers.trees.static import Choices
from runner.engine.errors import UserError
from runner.engine.request import Request
from runner.engine.upload import to_device


class MaskableHead(AutoregressiveHead, Protocol):
    mask_token_id: int | None  # None: the head was trained to draft token by token

    def mask_state(self) -> torch.Tensor:
        """[1, width], as `project` gives them."""


class OnePassHeadProposer(HeadProposer):
    head: MaskableHead

    def __init__(self, *, speculative_token_tree: str | Choices | None, **keys: Any) -> None:
        """
        Raises:
            UserError: a tree is asked for from a head that drafts in one pass.
        """
        super().__init__(speculative_token_tree=speculative_token_tree, **keys)
        if speculative_token_tree is not None and self.head.mask_token_id is not None:
            raise UserError(
                "method.speculative_token_tree must be null for a head that drafts in one pass (P-EAGLE), got "
                f"{speculative_token_tree!r}; remove it, or choose a head that drafts token by token"
            )
        self._first_rows: dict[str, int] = {}  # request_id -> row of its first draft's output
        self._outputs = torch.empty(0)  # of the head, for every drafted place, request by request

    @torch.inference_mode()
    def captured_mask(self) -> tuple[int, torch.Tensor] | None:
        if self.head.mask_token_id is None:
            return None
        return self.head.mask_token_id, self.head.mask_state()

    def first_logits(self, requests: Sequence[Request]) -> torch.Tensor:
        if self.head.mask_token_id is None:
            return super().first_logits(requests)
        counts = [self._num_masks(request) for request in requests]
        masks = MaskRows(token_id=self.head.mask_token_id, state=self.head.mask_state(), counts=counts)
        self._outputs = self.last_rows(requests, masks)
        starts = [0, *accumulate(1 + count for count in counts)]
        self._first_rows = {request.request_id: row for request, row in zip(requests, starts, strict=False)}
        return self._logits_of(requests, 0)

    def next_logits(
        self, requests: Sequence[Request], step: int, token_ids: torch.Tensor, row_idx: torch.Tensor | None
    ) -> torch.Tensor:
        if self.head.mask_token_id is None:
            return super().next_logits(requests, step, token_ids, row_idx)
        return self._logits_of(requests, step)

    def _logits_of(self, requests: Sequence[Request], step: int) -> torch.Tensor:
        rows = [self._first_rows[request.request_id] + step for request in requests]
        self._output = self._outputs.index_select(0, to_device(rows, torch.int64, self.context.device))
        return self._logits()

    def _num_masks(self, request: Request) -> int:
        """As many as drafts can follow the first one; their places are reserved with those of the drafts."""
        num_places = len(request.block_table) * self.context.block_size
        room = min(self.max_model_len, num_places) - request.num_tokens
        return max(0, min(self.num_speculative_tokens, room) - 1)
