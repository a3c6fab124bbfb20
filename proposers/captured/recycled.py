"""Token recycling, captured: drafts from a table on the device, which every step's logits renew."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from proposers.captured.drafter import CapturedDrafter, CapturedDrafts, no_drafts
from proposers.lookup.candidate_table import CandidateTable
from runner.engine.device_batch import DeviceBatch
from runner.engine.request import Request
from runner.engine.upload import to_device


class CapturedRecycling(CapturedDrafter):
    def __init__(self, num_tokens: int, *, table: CandidateTable, tree_depth: int | None, capacity: int) -> None:
        """table: the proposer's own. tree_depth: None = chains."""
        super().__init__(num_tokens, tree_depth=tree_depth)
        self.table = table
        self._speculates = torch.zeros(capacity, dtype=torch.bool, device=table.token_ids.device)

    def start(self, requests: Sequence[Request]) -> None:
        speculates = [request.sampling_params.speculates for request in requests]
        self._speculates[: len(requests)].copy_(to_device(speculates, torch.bool, self._speculates.device))

    def draft(self, batch: DeviceBatch) -> CapturedDrafts:
        if self.num_tokens == 0:
            return no_drafts(batch)
        width = None if self.drafts_trees else 1
        last_token_ids = batch.last_token_ids[:, 1].contiguous()
        tree = self.table.trees(last_token_ids, num_nodes=self.num_tokens, depth=self.depth, width=width)
        return CapturedDrafts(tree.token_ids, parents=tree.parents if self.drafts_trees else None)

    def learn_logits(self, batch: DeviceBatch, draft_token_ids: Tensor, logits: Tensor) -> None:
        # Not from those that have all their tokens, whose step was launched before that was known; nor from the absent.
        goes_on = (batch.lengths < batch.limits) & self._speculates[: batch.count]
        last_token_ids = torch.where(goes_on, batch.last_token_ids[:, 1], -1).unsqueeze(1)
        draft_token_ids = torch.where(goes_on.unsqueeze(1), draft_token_ids, -1)
        self.table.learn(torch.cat((last_token_ids, draft_token_ids), dim=1).flatten(), logits)
