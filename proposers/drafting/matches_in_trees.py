"""Matches in the text as paths of draft trees: one long guess, and what else a drafter holds likely.

A convincing match comes first, as long as there are places, and the drafter's likeliest nodes fill those that it
leaves: where the text goes another way they are there, and where there is no match the whole tree is the drafter's.
(Suffix decoding, arXiv 2411.04975, takes one or the other.) Nothing is drawn, so every rule looks for the target's own
token among the candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch.nn.functional import pad

from kernels.reference.likeliest_tree import Tree
from proposers.base import ProposerContext, draft_tokens_from_lists
from proposers.captured.drafter import CapturedDrafter
from proposers.captured.host_drafts import max_requests
from proposers.captured.match_in_tree import MatchInTree
from proposers.trees.draft_tree import draft_tokens_from_nodes
from runner.engine.request import DraftTokens
from runner.engine.schedule import Schedule
from runner.engine.step_operations import match_in_tree
from runner.engine.upload import to_device

MATCHED = "suffix"  # the source of matched tokens, where others draft too


@runtime_checkable
class TreeDrafter(Protocol):
    """A proposer whose drafts are dynamic trees."""

    def nodes(self, schedule: Schedule) -> Tree:
        """Of each decoding request, at most its max_draft_tokens nodes, -1 behind the last: [num_requests, most] int64.

        The likeliest come first, so that the first n are its tree of n nodes. Stays on the device.
        """


class MatchesInTrees:
    def __init__(
        self,
        *,
        context: ProposerContext,
        num_nodes: int,
        num_own_nodes: int,
        matches: Callable[[Schedule], list[list[int]]],
        drafter: TreeDrafter,
        source: str,
    ) -> None:
        """
        Args:
            num_nodes: of a request's tree at most.
            num_own_nodes: of them the drafter's at most.
            matches: of each decoding request, at most its max_draft_tokens; none where it is not convincing.
            drafter: makes trees.
            source: of a tree without a match; one with a match is the match's.
        """
        self.context, self.num_nodes, self.num_own_nodes = context, num_nodes, num_own_nodes
        self._matches, self._drafter, self._source = matches, drafter, source

    @torch.inference_mode()
    def propose(self, schedule: Schedule) -> DraftTokens:
        device, most = self.context.device, self._width_for(len(schedule.decoding))
        limits = [min(item.max_draft_tokens, most) for item in schedule.decoding]
        matches = self._cut_matches(schedule)  # also where nobody may draft: they take the text in
        if not any(limits):
            return DraftTokens.empty(len(limits), device)
        num_nodes = max(limits)
        match = to_device([own + [-1] * (num_nodes - len(own)) for own in matches], torch.int64, device)
        tree = Tree(*(pad(own, (0, num_nodes - own.shape[1]), value=-1) for own in self._own_nodes(schedule)))
        token_ids, parents = torch.stack(match_in_tree(match, tree, depth=num_nodes)).tolist()
        drafts = draft_tokens_from_nodes(token_ids, parents, limits, device)
        names = [MATCHED if match else self._source for match in matches]
        counts = drafts.num_draft_tokens
        sources = tuple(name for name, count in zip(names, counts, strict=True) for _ in range(count))
        return replace(drafts, sources=sources)

    def captured(self, num_tokens: int, drafter: CapturedDrafter | None) -> CapturedDrafter | None:
        """drafter: for the trees of a load that allows so many drafts; None: it needs the host."""
        if drafter is None or not drafter.drafts_trees:
            return drafter
        return MatchInTree(
            num_tokens,
            drafter=drafter,
            find_matches=self._find_matches,
            source=self._source,
            width_for=self._width_for,
            capacity=self.context.max_num_seqs,
            device=self.context.device,
        )

    def _own_nodes(self, schedule: Schedule) -> Tree:
        limits = [min(item.max_draft_tokens, self.num_own_nodes) for item in schedule.decoding]
        items = [replace(item, max_draft_tokens=limit) for item, limit in zip(schedule.decoding, limits, strict=True)]
        return self._drafter.nodes(replace(schedule, scheduled=items))

    def _find_matches(self, schedule: Schedule) -> DraftTokens:
        drafts = draft_tokens_from_lists(self._cut_matches(schedule), self.context.device)
        return replace(drafts, sources=(MATCHED,) * len(drafts.token_ids))

    def _cut_matches(self, schedule: Schedule) -> list[list[int]]:
        most = self._width_for(len(schedule.decoding))
        return [match[:most] for match in self._matches(schedule)]

    def _width_for(self, num_requests: int) -> int:
        """For drafts of each of so many requests: all have as many as the one with the longest match needs."""
        fits = num_requests <= max_requests(self.num_nodes, self.context.device)
        return self.num_nodes if fits else self.num_own_nodes
