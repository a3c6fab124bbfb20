"""Suffix decoding, with a model drafter where no match is convincing (the hybrid of arXiv 2411.04975).

A match costs next to nothing and may be long; where the text says nothing new has been said before, the drafter guesses
as it would by itself. Which of them drafts is decided for every request in every step, by how many tokens of the match
are expected to be accepted. A drafter of trees always drafts, and a match is a path of its tree.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch

from proposers.base import Proposer, ProposerContext, draft_tokens_from_lists
from proposers.captured.drafter import CapturedDrafter
from proposers.captured.host_drafts import max_requests
from proposers.captured.matched import MatchedOrDrafted
from proposers.captured.token_by_token import CapturedChains
from proposers.drafting.matches_in_trees import MATCHED, MatchesInTrees, TreeDrafter
from proposers.suffix import SuffixProposer
from runner.engine.request import DraftTokens, Request, VerifyOutput
from runner.engine.schedule import Schedule
from runner.engine.upload import to_device


class HybridProposer(Proposer):
    def __init__(
        self,
        *,
        num_speculative_tokens: int,
        context: ProposerContext,
        suffix: SuffixProposer,
        drafter: Proposer,
        drafter_name: str,
        min_match_score: float,
        num_judged_tokens: int,
        speculative_token_tree: str | None = None,
    ) -> None:
        """
        Args:
            num_speculative_tokens: of a match at most, or of a tree's nodes.
            suffix: finds matches, chains.
            drafter: its context says that others draft up to num_speculative_tokens too.
            drafter_name: the source of its tokens.
            min_match_score: of num_judged_tokens of a match, so many must be expected to be accepted.
            speculative_token_tree: "dynamic": the drafter, a TreeDrafter, drafts dynamic trees; None: chains.
        """
        super().__init__(num_speculative_tokens=num_speculative_tokens, context=context)
        self.suffix, self.drafter, self.drafter_name = suffix, drafter, drafter_name
        self.taps_every_token = drafter.taps_every_token
        self._matches = partial(suffix.matches, min_score=min_match_score, num_judged_tokens=num_judged_tokens)
        self._matched: list[Request] = []  # in the last step in parts
        self._trees: MatchesInTrees | None = None
        if speculative_token_tree is not None:
            assert isinstance(drafter, TreeDrafter), f"{drafter_name} drafts chains"
            self._trees = MatchesInTrees(
                context=context,
                num_nodes=num_speculative_tokens,
                num_own_nodes=drafter.num_speculative_tokens,
                source=drafter_name,
                matches=self._matches,
                drafter=drafter,
            )

    def propose(self, schedule: Schedule) -> DraftTokens:
        if self._trees is not None:
            return self._trees.propose(schedule)
        matches = self.find_matches(schedule)
        counts = matches.num_draft_tokens
        decoding = schedule.decoding
        self._matched = [item.request for item, count in zip(decoding, counts, strict=True) if count]
        limits = [
            0 if count else min(item.max_draft_tokens, self.drafter.num_speculative_tokens)
            for item, count in zip(decoding, counts, strict=True)
        ]
        items = [replace(item, max_draft_tokens=limit) for item, limit in zip(decoding, limits, strict=True)]
        others = schedule.scheduled[len(items) :]  # those that decode come first
        drafted = self.drafter.propose(replace(schedule, scheduled=[*items, *others]))
        return _merge(matches, drafted, drafter_name=self.drafter_name)

    def find_matches(self, schedule: Schedule) -> DraftTokens:
        """Of the decoding requests; none where the drafter shall draft."""
        decoding = schedule.decoding
        matches = self._matches(schedule)
        num_left = sum(not match and item.max_draft_tokens > 0 for match, item in zip(matches, decoding, strict=True))
        # Where one has a longer match than others draft, they all have places for it.
        is_cut = num_left > 0 or len(decoding) > max_requests(self.num_speculative_tokens, self.context.device)
        most = self.drafter.num_speculative_tokens if is_cut else self.num_speculative_tokens
        drafts = draft_tokens_from_lists([match[:most] for match in matches], self.context.device)
        return replace(drafts, sources=(MATCHED,) * len(drafts.token_ids))

    def update(self, schedule: Schedule, output: VerifyOutput) -> None:
        self.drafter.update(schedule, output)
        self.drafter.keep_up([request for request in self._matched if not request.is_finished])
        self._matched = []

    def captured_drafter(self, num_tokens: int) -> CapturedDrafter | None:
        drafter = self.drafter.captured_drafter(min(num_tokens, self.drafter.num_speculative_tokens))
        if self._trees is not None:
            return self._trees.captured(num_tokens, drafter)
        if num_tokens == 0 or not isinstance(drafter, CapturedChains):
            return drafter
        return MatchedOrDrafted(
            num_tokens,
            drafter=drafter,
            find_matches=self.find_matches,
            source=self.drafter_name,
            capacity=self.context.max_num_seqs,
            device=self.context.device,
        )

    def release(self, request_id: str) -> None:
        self.suffix.release(request_id)
        self.drafter.release(request_id)

    def fills_blocks(self, request: Request) -> bool:
        return self.drafter.fills_blocks(request)

    def restart(self) -> None:
        self.suffix.restart()
        self.drafter.restart()

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self.drafter.tap_layers

    @property
    def cache_bytes_per_block(self) -> int:
        return self.drafter.cache_bytes_per_block

    @property
    def state_bytes(self) -> int:
        return self.drafter.state_bytes

    @property
    def has_passes(self) -> bool:
        return self.drafter.has_passes

    def allocate_cache(self, num_blocks: int) -> None:
        self.drafter.allocate_cache(num_blocks)


def _merge(matches: DraftTokens, drafted: DraftTokens, *, drafter_name: str) -> DraftTokens:
    """The drafts of a batch, every request's from one of the two."""
    pairs = list(zip(matches.num_draft_tokens, drafted.num_draft_tokens, strict=True))
    names = (MATCHED, drafter_name)
    sources = tuple(name for pair in pairs for name, count in zip(names, pair, strict=True) for _ in range(count))
    if not matches.sources:
        return replace(drafted, sources=sources)
    device, num_matched = matches.token_ids.device, len(matches.token_ids)
    index, taken = list[int](), [0, num_matched]
    for pair in pairs:
        for which, count in enumerate(pair):
            index += range(taken[which], taken[which] + count)
            taken[which] += count
    order, probs = to_device(index, torch.int64, device), None
    if drafted.probs is not None:
        one_hot = drafted.probs.new_zeros(num_matched, drafted.probs.shape[1])
        one_hot.scatter_(1, matches.token_ids.unsqueeze(1), 1.0)
        probs = torch.cat((one_hot, drafted.probs)).index_select(0, order)
    return DraftTokens(
        token_ids=torch.cat((matches.token_ids, drafted.token_ids)).index_select(0, order),
        cu_num_draft_tokens=[0, *accumulate(ours + theirs for ours, theirs in pairs)],
        probs=probs,
        sources=sources,
    )
