"""Suffix decoding (arXiv 2411.04975): drafts what followed the same words before, in this request or in finished ones.

The draft is as long as the match is convincing: the likeliest continuation, or, with speculative_token_tree "dynamic",
a tree of the likeliest ones. Responses of finished requests are remembered, up to
`suffix_decoding_max_cached_requests`; those of requests that were aborted or preempted are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from proposers.base import Proposer, ProposerContext, draft_tokens_from_lists
from proposers.lookup.suffix_cache import SuffixCache, compile_suffix_cache
from proposers.trees.draft_tree import DraftTree, draft_tokens_from_trees
from runner.engine.request import DraftTokens, Request, RequestStatus
from runner.engine.schedule import Schedule


class SuffixProposer(Proposer):
    """Trees over the running requests, and one over responses that have finished.

    Args:
        suffix_decoding_*: as in the configuration.
        corpus: token ids of earlier responses to start from, the oldest first; read at every start.
    """

    drafts_from_text = True

    def __init__(
        self,
        *,
        num_speculative_tokens: int,
        context: ProposerContext,
        suffix_decoding_max_tree_depth: int,
        suffix_decoding_max_cached_requests: int,
        suffix_decoding_max_spec_factor: float,
        suffix_decoding_min_token_prob: float,
        speculative_token_tree: str | None = None,
        corpus: Iterable[Sequence[int]] = (),
    ) -> None:
        super().__init__(num_speculative_tokens=num_speculative_tokens, context=context)
        compile_suffix_cache()
        self._empty_cache = partial(
            SuffixCache,
            max_tree_depth=suffix_decoding_max_tree_depth,
            max_cached_requests=suffix_decoding_max_cached_requests,
            max_spec_factor=suffix_decoding_max_spec_factor,
            min_token_prob=suffix_decoding_min_token_prob,
        )
        self._corpus = corpus
        self._is_new = False  # nothing but the corpus is known, which may take long to read
        self.restart()
        self._requests: dict[str, Request] = {}  # that have been scheduled and not been released
        self._rows: dict[str, int] = {}  # of those that have decoded
        self._num_known: dict[str, int] = {}  # committed tokens that the cache has of them
        self._drafts_trees = speculative_token_tree == "dynamic"

    def propose(self, schedule: Schedule) -> DraftTokens:
        rows, new_tokens = self._take_in(schedule)
        limits = [item.max_draft_tokens for item in schedule.decoding]
        if not self._drafts_trees:
            return draft_tokens_from_lists(self._cache.step(rows, new_tokens, limits), self.context.device)
        found = self._cache.step_trees(rows, new_tokens, limits)
        trees = [DraftTree(token_ids=tokens, parents=parents).depth_first() for tokens, parents in found]
        return draft_tokens_from_trees(trees, self.context.device)

    def matches(self, schedule: Schedule, *, min_score: float, num_judged_tokens: int) -> list[list[int]]:
        """Drafts of the decoding requests, each where its match is convincing, else none.

        Args:
            min_score: of num_judged_tokens of a match, so many must be expected to be accepted.
        """
        rows, new_tokens = self._take_in(schedule)
        found = self._cache.step_scored(rows, new_tokens, [num_judged_tokens] * len(rows))
        # Whether a match is convincing depends on nothing but the text: it is judged before it is cut.
        return [
            match.token_ids[: item.max_draft_tokens] if match.score >= min_score else []
            for match, item in zip(found, schedule.decoding, strict=True)
        ]

    def _take_in(self, schedule: Schedule) -> tuple[list[int], list[list[int]]]:
        """Of each decoding request: its row in the cache, and the committed tokens that the cache is to take in."""
        for item in schedule.scheduled:  # also those that may finish with their first token
            self._requests[item.request.request_id] = item.request
        rows, new_tokens = list[int](), list[list[int]]()
        for item in schedule.decoding:
            request = item.request
            request_id = request.request_id
            if request_id not in self._rows:
                self._rows[request_id], self._num_known[request_id] = self._cache.open(), 0
            rows.append(self._rows[request_id])
            new_tokens.append(request.tokens_between(self._num_known[request_id], request.num_tokens))
            self._num_known[request_id] = request.num_tokens
        return rows, new_tokens

    @property
    def drafts_trees(self) -> bool:
        return self._drafts_trees

    def release(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request_id in self._rows:
            self._cache.close(self._rows.pop(request_id))
            del self._num_known[request_id]
        if request is not None and request.status is RequestStatus.FINISHED:
            self._cache.insert(request.output_token_ids)
            self._is_new = False

    def restart(self) -> None:
        if self._is_new:
            return
        self._cache, self._is_new = self._empty_cache(), True
        for response in self._corpus:
            self._cache.insert(response)
