"""Medusa (Cai et al., arXiv 2401.10774): heads that each guess one of the next tokens from the last hidden state.

The target's own head has read that state to yield the last committed token; Medusa's head d guesses the token d + 1
places behind it. The guesses know nothing of each other, but their processors see the drafts before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from proposers.base import ProposerContext
from proposers.captured.drafter import CapturedDrafter
from proposers.captured.last_state import CapturedLastState
from proposers.captured.token_by_token import CapturedChains
from proposers.drafting.from_last_state import LastStateProposer
from proposers.drafting.ranked_trees import RankedTreeProposer, RankedTrees
from proposers.heads.medusa import MedusaHeads, load_medusa_heads
from proposers.trees.static import Choices
from runner.engine.checkpoint import ModelSource
from runner.engine.device_batch import DeviceBatch
from runner.engine.request import Request


class MedusaProposer(RankedTreeProposer, LastStateProposer):
    def __init__(
        self,
        *,
        num_speculative_tokens: int,
        context: ProposerContext,
        source: ModelSource,
        draft_sample_method: str,
        max_model_len: int | None = None,
        speculative_token_tree: str | Choices | None = None,
    ) -> None:
        assert context.target is not None, "Medusa's heads read the target's states"
        self.heads = load_medusa_heads(source, context.target, device=context.device, dtype=context.dtype)
        super().__init__(
            num_speculative_tokens=num_speculative_tokens,
            context=context,
            draft_sample_method=draft_sample_method,
            source=source,
            head=self.heads,
            max_depth=self.heads.shape.num_heads,
            max_model_len=max_model_len,
            is_tree=speculative_token_tree is not None,
        )
        if speculative_token_tree is not None:
            self.trees = RankedTrees(self, speculative_token_tree, max_depth=self.max_depth)
        self._rows = torch.empty(0)  # [active requests, hidden]

    def captured_drafter(self, num_tokens: int) -> CapturedDrafter | None:
        if not self.can_capture:
            return super().captured_drafter(num_tokens)

        def chains(depth: int) -> CapturedChains:
            return _CapturedMedusa(self.heads, self.tile, **self.captured_arguments(depth))

        return chains(num_tokens) if self.trees is None else self.trees.captured(num_tokens, chains)

    def first_logits(self, requests: Sequence[Request]) -> torch.Tensor:
        self._rows = self.last_states(requests)
        return self._logits(0)

    def next_logits(
        self, requests: Sequence[Request], step: int, token_ids: torch.Tensor, row_idx: torch.Tensor | None
    ) -> torch.Tensor:
        if row_idx is not None:
            self._rows = self._rows.index_select(0, row_idx)
        return self._logits(step)

    def _logits(self, head: int) -> torch.Tensor:
        return self.heads.logits(self.in_tiles(self._rows), head, self.tile)[: len(self._rows)]


class _CapturedMedusa(CapturedLastState):
    def __init__(self, heads: MedusaHeads, tile: int | None, **common: Any) -> None:
        super().__init__(**common)
        self.heads, self.tile = heads, tile

    def logits_after(
        self, batch: DeviceBatch, states: torch.Tensor, step: int, token_ids: torch.Tensor
    ) -> torch.Tensor:
        return self.heads.logits(states, step, self.tile)
