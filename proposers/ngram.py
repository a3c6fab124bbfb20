"""Prompt lookup: what followed the last few tokens when they occurred before (Saxena, 2023; vLLM's `ngram`).

The longest matching n-gram wins, among equals the most recent occurrence. Every n-gram of a request is indexed
once, so a step costs time in its new tokens, not in the length of the context.
"""

from __future__ import annotations

import torch

from proposers.base import Proposer, ProposerContext
from proposers.lookup.ngram_index import NgramIndex
from runner.engine.request import DraftTokens
from runner.engine.schedule import Schedule
from runner.engine.upload import upload


class NgramProposer(Proposer):
    drafts_from_text = True

    def __init__(
        self, *, num_speculative_tokens: int, context: ProposerContext, prompt_lookup_min: int, prompt_lookup_max: int
    ) -> None:
        super().__init__(num_speculative_tokens=num_speculative_tokens, context=context)
        longest = context.max_model_len  # a match cannot be longer, and the index grows with what it looks for
        self.index = NgramIndex(min(prompt_lookup_min, longest), min(prompt_lookup_max, longest))
        self._sequences: dict[str, int] = {}  # request_id -> its number in the index
        self._num_indexed: dict[str, int] = {}  # request_id -> tokens of it that the index holds

    def propose(self, schedule: Schedule) -> DraftTokens:
        sequences, token_ids, num_new, limits = [], [], [], []
        for item in schedule.decoding:
            request = item.request
            request_id, num_tokens = request.request_id, request.num_tokens
            if request_id not in self._sequences:
                self._sequences[request_id] = self.index.add()
            num_indexed = self._num_indexed.get(request_id, 0)
            token_ids += request.tokens_between(num_indexed, num_tokens)
            self._num_indexed[request_id] = num_tokens
            sequences.append(self._sequences[request_id])
            num_new.append(num_tokens - num_indexed)
            limits.append(item.max_draft_tokens)
        drafts, cu_num_draft_tokens = self.index.extend_and_draft(sequences, token_ids, num_new, limits)
        return DraftTokens(
            token_ids=upload(torch.from_numpy(drafts), self.context.device),
            cu_num_draft_tokens=cu_num_draft_tokens.tolist(),
        )

    def release(self, request_id: str) -> None:
        if request_id in self._sequences:
            self.index.release(self._sequences.pop(request_id))
            del self._num_indexed[request_id]
