"""Drafts trees over ranked candidates, for drafters that know every depth's distribution beforehand: Medusa, DFlash.

A depth has one distribution whatever the tokens before it are, so its candidates serve all nodes above. Their
processors (penalties, bad words, a grammar) see the tree's first path, and treat other branches as if they held the
same tokens, which changes what is accepted and never the text. Candidates are drawn as draft_sample_method says;
siblings without replacement, with their probs where the rule reads them. A rule that looks beyond its cut (block) takes
the draws below two nodes for independent, which one list for both is not: it gets the likeliest candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from kernels.reference.likeliest_tree import Tree
from proposers.captured.drafter import CapturedDrafter
from proposers.captured.ranked_trees import CapturedChoiceTrees, CapturedLikeliestTrees
from proposers.captured.token_by_token import CapturedChains
from proposers.drafting.token_by_token import TokenByTokenProposer
from proposers.trees.best_first import Path, best_first_paths
from proposers.trees.candidates import draw_candidates, likeliest_candidates, perturbed
from proposers.trees.draft_tree import padded_tree
from proposers.trees.rank_tree import RankTree, draft_tokens_from_ranks
from proposers.trees.static import Choices, check_depth, check_ranks, static_tree
from runner.engine.draft_trees import has_cousins
from runner.engine.request import DraftTokens, Request
from runner.engine.sampling import SamplingRows
from runner.engine.schedule import Schedule
from runner.engine.upload import to_device


class RankedTrees:
    """What speculative_token_tree asks of a drafter; `max_draft_tokens` of that one is how deep a tree may be."""

    def __init__(self, proposer: TokenByTokenProposer, tree: str | Choices, *, max_depth: int) -> None:
        """
        Args:
            tree: "dynamic", or the choices of a static tree.
            max_depth: tokens that the drafter can guess one after another.

        Raises:
            UserError: choices that are deeper than the drafter guesses, or wider than the vocabulary.
        """
        self.proposer = proposer
        self.choices = None if isinstance(tree, str) else tree
        if self.choices is None:  # the configuration ensures it: otherwise the shape would depend on what was drawn
            assert proposer.draft_sample_method == "greedy" or not proposer.context.needs_draft_probs
        else:
            check_depth(self.choices, max_depth=max_depth)
            check_ranks(self.choices, proposer.context.vocab_size)
            if proposer.context.keys_by_draft_step and has_cousins(self.choices[: proposer.num_speculative_tokens]):
                proposer.draft_sample_method = "greedy"
        self.max_depth = max_depth

    def captured(self, num_nodes: int, chains: Callable[[int], CapturedChains]) -> CapturedDrafter:
        """The trees in a captured step. chains: the same drafter, for chains of so many tokens."""
        if num_nodes == 0:
            return chains(0)
        if self.choices is None:
            return CapturedLikeliestTrees(chains(min(num_nodes, self.max_depth)), num_nodes=num_nodes)
        choices = self.choices[:num_nodes]
        device = self.proposer.context.device
        return CapturedChoiceTrees(chains(max(map(len, choices))), choices=choices, device=device)

    def depths(self, num_nodes: int) -> list[int] | None:
        """Of a static tree's first node, first two, and so on; None: as many as the nodes, up to max_depth."""
        return None if self.choices is None else list(accumulate(map(len, self.choices[:num_nodes]), max))

    @torch.inference_mode()
    def propose(self, schedule: Schedule) -> DraftTokens:
        requests, depths, num_nodes = self._sizes(schedule)
        if not any(depths):
            return DraftTokens.empty(len(requests), self.proposer.context.device)
        if self.choices is None:
            paths, token_ids = self._best_paths(requests, depths, num_nodes)
            return draft_tokens_from_ranks([RankTree.of_paths(own) for own in paths], token_ids)
        within = {most: tuple(path for path in self.choices if len(path) <= most) for most in set(depths)}
        trees = [static_tree(within[depth], count) for count, depth in zip(num_nodes, depths, strict=True)]
        return self._static(requests, trees)

    @torch.inference_mode()
    def nodes(self, schedule: Schedule) -> Tree:
        """Of each decoding request its dynamic tree, the likeliest nodes first, as `propose` drafts it."""
        requests, depths, num_nodes = self._sizes(schedule)
        if not any(depths):
            nothing = [list[int]()] * len(requests)
            return padded_tree(torch.empty(0, dtype=torch.int64, device=self.proposer.context.device), nothing, nothing)
        paths, token_ids = self._best_paths(requests, depths, num_nodes)
        _, num_depths, num_candidates = token_ids.shape
        numbers = [
            [(b * num_depths + len(path) - 1) * num_candidates + path[-1] for path in own]
            for b, own in enumerate(paths)
        ]
        parents = []
        for own in paths:
            places = {path: node for node, path in enumerate(own)} | {(): -1}
            parents.append([places[path[:-1]] for path in own])
        return padded_tree(token_ids.flatten(), numbers, parents)

    def _sizes(self, schedule: Schedule) -> tuple[list[Request], list[int], list[int]]:
        """The decoding requests; how deep the tree of each may be, and how many nodes it may have."""
        depths = [
            self.proposer.max_draft_tokens(item.request, item.max_draft_tokens) if item.max_draft_tokens else 0
            for item in schedule.decoding
        ]
        num_nodes = [
            item.max_draft_tokens if depth else 0 for item, depth in zip(schedule.decoding, depths, strict=True)
        ]
        return [item.request for item in schedule.decoding], depths, num_nodes

    def _static(self, requests: Sequence[Request], trees: Sequence[RankTree]) -> DraftTokens:
        proposer, context = self.proposer, self.proposer.context
        counts = [len(tree.num_candidates) for tree in trees]
        widths = [max(ranks) for ranks in _by_depth([tree.num_candidates for tree in trees])]
        token_ids = torch.zeros(len(trees), len(widths), max(widths), dtype=torch.int64, device=context.device)
        keeps_probs = proposer.keeps_probs(requests)
        probs: list[torch.Tensor] = []  # a depth's, [active * width, vocab]
        first_rows: dict[tuple[int, int], int] = {}  # (request, depth) -> the row in probs of its first candidate
        num_rows = 0

        def draw(processed: torch.Tensor, rows: SamplingRows, step: int, active: list[int]) -> torch.Tensor:
            nonlocal num_rows
            drafted, step_probs = draw_candidates(
                processed,
                rows,
                proposer.draft_sample_method,
                widths[step],
                need_probs=keeps_probs,
                draft_step=proposer.draft_step(rows, step),
            )
            token_ids[to_device(active, torch.int64, context.device), step, : widths[step]] = drafted
            if step_probs is not None:  # every node has its row
                probs.append(step_probs.flatten(0, 1))
                first_rows.update({(b, step): num_rows + place * widths[step] for place, b in enumerate(active)})
                num_rows += len(active) * widths[step]
            return drafted[:, 0]

        proposer.walk(requests, counts, draw)
        drafts = draft_tokens_from_ranks(trees, token_ids)
        if not probs:
            return drafts
        of_nodes = [
            first_rows[b, depth - 1] + rank
            for b, tree in enumerate(trees)
            for depth, rank in zip(tree.depths, tree.ranks, strict=True)
        ]
        return replace(drafts, probs=torch.cat(probs).index_select(0, to_device(of_nodes, torch.int64, context.device)))

    def _best_paths(
        self, requests: Sequence[Request], depths: Sequence[int], num_nodes: Sequence[int]
    ) -> tuple[list[list[Path]], torch.Tensor]:
        """The nodes of highest joint probability, which takes the step's one look at the device.

        Returns each request's, the likeliest first, and the candidates [num_requests, depth, num_candidates] int64.

        Under coupled the distribution is that of logits + noise: of what the target draws, if its logits are the
        drafter's but for an error that is Gumbel too.
        """
        proposer, context = self.proposer, self.proposer.context
        shape = len(requests), max(depths), min(max(num_nodes), context.vocab_size)
        token_ids = torch.zeros(shape, dtype=torch.int64, device=context.device)
        log_probs = torch.full(shape, float("-inf"), device=context.device)

        def draw(processed: torch.Tensor, rows: SamplingRows, step: int, active: list[int]) -> torch.Tensor:
            logits = perturbed(processed, rows, proposer.draft_sample_method, proposer.draft_step(rows, step))
            found = likeliest_candidates(logits, rows, shape[2])
            places = to_device(active, torch.int64, context.device)
            token_ids[places, step], log_probs[places, step] = found
            return found.token_ids[:, 0]

        proposer.walk(requests, depths, draw)
        return best_first_paths(log_probs, num_nodes), token_ids


class RankedTreeProposer(TokenByTokenProposer):
    """Drafts the trees that it was asked for, and else what the class behind it drafts."""

    trees: RankedTrees | None = None

    def propose(self, schedule: Schedule) -> DraftTokens:
        return super().propose(schedule) if self.trees is None else self.trees.propose(schedule)

    def nodes(self, schedule: Schedule) -> Tree:
        """Of each decoding request its dynamic tree, the likeliest nodes first."""
        assert self.trees is not None, "the tree is a dynamic one"
        return self.trees.nodes(schedule)


def _by_depth(counts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Lists of any length, turned over."""
    return [[own[depth] for own in counts if len(own) > depth] for depth in range(max(map(len, counts)))]
