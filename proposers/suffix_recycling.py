"""Suffix decoding and token recycling in one tree: what followed the same words before, and what else is likely.

A match is one long guess, and a tree of the target's leftovers many short ones. Here a convincing match is a path of
the tree, and recycled candidates fill the places that it leaves: where the text goes another way they are there, and
where there is no match the whole tree is theirs. Nothing is trained. (Suffix decoding: arXiv 2411.04975; token
recycling: arXiv 2408.08696; one or the other, by the length of the match: SAM decoding, arXiv 2411.10666.) Nothing is
drawn, so every rule looks for the target's own token among the candidates.
"""

from __future__ import annotations

from functools import partial

from proposers.base import Proposer, ProposerContext
from proposers.captured.drafter import CapturedDrafter
from proposers.drafting.matches_in_trees import MatchesInTrees
from proposers.suffix import SuffixProposer
from proposers.token_recycling import TokenRecyclingProposer
from runner.engine.request import DraftTokens, VerifyOutput
from runner.engine.schedule import Schedule


class SuffixRecyclingProposer(Proposer):
    """
    Args:
        suffix: finds matches, chains.
        recycling: grows trees, of as many nodes.
        min_match_score: of num_judged_tokens of a match, so many must be expected to be accepted.
    """

    reads_logits = True

    def __init__(
        self,
        *,
        num_speculative_tokens: int,
        context: ProposerContext,
        suffix: SuffixProposer,
        recycling: TokenRecyclingProposer,
        min_match_score: float,
        num_judged_tokens: int,
    ) -> None:
        super().__init__(num_speculative_tokens=num_speculative_tokens, context=context)
        assert recycling.tree_depth is not None, "chains leave no place for another guess"
        self.suffix, self.recycling = suffix, recycling
        self._trees = MatchesInTrees(
            context=context,
            num_nodes=num_speculative_tokens,
            num_own_nodes=num_speculative_tokens,
            source="token_recycling",
            matches=partial(suffix.matches, min_score=min_match_score, num_judged_tokens=num_judged_tokens),
            drafter=recycling,
        )

    def propose(self, schedule: Schedule) -> DraftTokens:
        return self._trees.propose(schedule)

    def update(self, schedule: Schedule, output: VerifyOutput) -> None:
        self.recycling.update(schedule, output)

    def captured_drafter(self, num_tokens: int) -> CapturedDrafter | None:
        return self._trees.captured(num_tokens, self.recycling.captured_drafter(num_tokens))

    def release(self, request_id: str) -> None:
        self.suffix.release(request_id)

    def restart(self) -> None:
        self.suffix.restart()
        self.recycling.restart()
