"""Suffix decoding and token recycling in one tree: what followed the same words before, and what else is likely.

A match is one long guess, and a tree of the target's leftovers many short ones. Here a convincing match is a path of
the tree, and recycled candidates fill the places that it leaves: where the text goes another way they are there, and
where there is no match the whole tree is theirs. Nothing is trained. (Suffix decoding: arXiv 2411.04975; token
recycling: arXiv 2408.08696; one or the other, by the length of the match: SAM decoding, arXiv 2411.10666.) Nothing is
drawn, so every rule looks for the target's own token among the candidates.
"""

from __future__ import annotations

import torch

from proposers.base import Proposer, ProposerContext, draft_tokens_from_lists
from proposers.captured.drafter import CapturedDrafter
from proposers.captured.match_in_tree import MatchInTree
from proposers.captured.recycled import CapturedRecycling
from proposers.suffix import SuffixProposer
from proposers.token_recycling import TokenRecyclingProposer
from proposers.trees.draft_tree import draft_tokens_from_nodes
from runner.engine.request import DraftTokens, VerifyOutput
from runner.engine.scheduler import Schedule
from runner.engine.step_operations import match_in_tree
from runner.engine.upload import to_device


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
        self.suffix, self.recycling, self.tree_depth = suffix, recycling, recycling.tree_depth
        self.min_match_score, self.num_judged_tokens = min_match_score, num_judged_tokens

    @torch.inference_mode()
    def propose(self, schedule: Schedule) -> DraftTokens:
        matches = self._matches(schedule)
        device, limits = self.context.device, [item.max_draft_tokens for item in schedule.decoding]
        if not any(limits):
            return DraftTokens.empty(len(limits), device)
        num_nodes = max(limits)
        match = to_device([own + [-1] * (num_nodes - len(own)) for own in matches], torch.int64, device)
        tree = match_in_tree(match, self.recycling.nodes(schedule, num_nodes), depth=self.tree_depth)
        token_ids, parents = torch.stack(tree).tolist()  # the step's one look at the device
        return draft_tokens_from_nodes(token_ids, parents, limits, device)

    def _matches(self, schedule: Schedule) -> list[list[int]]:
        return self.suffix.matches(schedule, min_score=self.min_match_score, num_judged_tokens=self.num_judged_tokens)

    def update(self, schedule: Schedule, output: VerifyOutput) -> None:
        self.recycling.update(schedule, output)

    def captured_drafter(self, num_tokens: int) -> CapturedDrafter:
        recycling = self.recycling.captured_drafter(num_tokens)
        if num_tokens == 0 or not isinstance(recycling, CapturedRecycling):
            return recycling

        def find_matches(schedule: Schedule) -> DraftTokens:
            return draft_tokens_from_lists(self._matches(schedule), self.context.device)

        return MatchInTree(
            recycling=recycling,
            find_matches=find_matches,
            capacity=self.context.max_num_seqs,
            device=self.context.device,
        )

    def release(self, request_id: str) -> None:
        self.suffix.release(request_id)

    def set_learning(self, is_learning: bool) -> None:
        self.suffix.set_learning(is_learning)
        self.recycling.set_learning(is_learning)

    def restart(self) -> None:
        self.suffix.restart()
        self.recycling.restart()
