"""Prompt lookup: what followed the last few tokens when they occurred before (Saxena, 2023; vLLM's `ngram`).

The longest matching n-gram wins, among equals the most recent occurrence. Every n-gram of a request is indexed
once, so a step costs time in its new tokens, not in the length of the context.
"""

from __future__ import annotations

from proposers.base import Proposer, ProposerContext, draft_tokens_from_lists
from runner.engine.request import DraftTokens
from runner.engine.scheduler import Schedule


class NgramIndex:
    """Where each n-gram of one growing sequence was last followed by a token."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self.min_n, self.max_n = min_n, max_n
        self.token_ids: list[int] = []
        self._continuation: dict[tuple[int, ...], int] = {}  # n-gram -> position of the token that followed

    def extend(self, token_ids: list[int]) -> None:
        for token in token_ids:
            # The sequence's own last n-grams enter only now that something follows them.
            end = len(self.token_ids)
            for n in range(self.min_n, min(self.max_n, end) + 1):
                self._continuation[tuple(self.token_ids[end - n :])] = end
            self.token_ids.append(token)

    def lookup(self, num_tokens: int) -> list[int]:
        """num_tokens tokens that followed the longest known suffix; empty when none is known."""
        for n in range(min(self.max_n, len(self.token_ids)), self.min_n - 1, -1):
            start = self._continuation.get(tuple(self.token_ids[-n:]))
            if start is not None:
                # A match so near the end that its continuation runs into the end is a period: the copy goes on
                # through what it has just copied, as in LZ77.
                period = len(self.token_ids) - start
                guess = self.token_ids[start : start + num_tokens]
                while len(guess) < num_tokens:
                    guess.append(guess[len(guess) - period])
                return guess
        return []


class NgramProposer(Proposer):
    def __init__(
        self, *, num_speculative_tokens: int, context: ProposerContext, prompt_lookup_min: int, prompt_lookup_max: int
    ) -> None:
        super().__init__(num_speculative_tokens=num_speculative_tokens, context=context)
        self.min_n, self.max_n = prompt_lookup_min, prompt_lookup_max
        self._indices: dict[str, NgramIndex] = {}

    def propose(self, schedule: Schedule) -> DraftTokens:
        guesses = []
        for item in schedule.decoding:
            request = item.request
            index = self._indices.setdefault(request.request_id, NgramIndex(self.min_n, self.max_n))
            index.extend(request.tokens_between(len(index.token_ids), request.num_tokens))
            guesses.append(index.lookup(item.max_draft_tokens))
        return draft_tokens_from_lists(guesses, self.context.device)

    def release(self, request_id: str) -> None:
        self._indices.pop(request_id, None)
