"""Drafts trees level by level, with drafters that can go on from any node: candidates, a choice, the next level.

Static trees (Medusa's choices) are known before anything is drafted, so nothing is read back. Dynamic ones (EAGLE-2)
have their candidates' probabilities read at each level: a launch is laid out on the host. Without a tree: chains,
token by token. A request that follows a grammar has a chain in any case, which walks the grammar.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from kernels.reference.likeliest_tree import Tree
from proposers.base import ProposerContext
from proposers.drafting.token_by_token import TokenByTokenProposer
from proposers.trees.candidates import draw_candidates, likeliest_candidates, perturbed
from proposers.trees.draft_tree import padded_tree
from proposers.trees.growth import DynamicGrowth, GrownTree, Growth, StaticGrowth
from proposers.trees.static import Choices, check_ranks, static_tree
from runner.engine.request import DraftTokens, Request
from runner.engine.sampling import SamplingRows, process_logits
from runner.engine.sampling_rows import BitmaskRows
from runner.engine.schedule import Schedule
from runner.engine.upload import to_device

MAX_LEN_BITS = 24  # of the 32 of a key: the longest sequence's tokens; the others count up to 256 nodes of a level
TREE_DEPTH, TREE_TOP_K = 5, 4  # of a dynamic tree, where nobody says otherwise


@dataclass(frozen=True, kw_only=True)
class TreeNode:
    """A drafted token that more tokens are to be drafted behind."""

    row: int  # of the level before, whose candidate it is
    path: tuple[int, ...]  # from a child of the pending token to itself: how many nodes were fed before each of them


@dataclass(frozen=True)
class _Level:
    """Candidates of one level."""

    token_ids: torch.Tensor  # [num_rows, width] int64
    probs: torch.Tensor | None  # [num_rows, width, vocab]
    scores: list[list[float]] | None  # [num_rows, width]: log-probabilities


class LevelByLevelProposer(TokenByTokenProposer):
    def __init__(
        self,
        *,
        num_speculative_tokens: int,
        context: ProposerContext,
        draft_sample_method: str,
        speculative_token_tree: str | Choices | None,  # "dynamic", or paths of ranks; None: chains
        tree_depth: int,  # of a dynamic tree, levels at most
        tree_top_k: int,  # of a dynamic tree: candidates of a node, and nodes of a level that go on
    ) -> None:
        """
        Raises:
            UserError: ranks beyond the vocabulary.
        """
        super().__init__(
            num_speculative_tokens=num_speculative_tokens, context=context, draft_sample_method=draft_sample_method
        )
        self.is_dynamic = speculative_token_tree == "dynamic"
        self.choices: Choices = ()
        if isinstance(speculative_token_tree, tuple):
            self.choices = speculative_token_tree
            check_ranks(self.choices, context.vocab_size)
        # The configuration ensures it: otherwise the shape would depend on what was drawn.
        assert not self.is_dynamic or draft_sample_method == "greedy" or not context.needs_draft_probs
        self.tree_depth, self.tree_top_k = tree_depth, tree_top_k

    @abstractmethod
    def level_logits(
        self, requests: Sequence[Request], owners: Sequence[int], nodes: Sequence[TreeNode], token_ids: torch.Tensor
    ) -> torch.Tensor:
        """Compute the nodes of one level; logits [len(nodes), vocab] behind each.

        Args:
            requests: those of this step's first_logits.
            owners: the place among `requests` of each node's request, [len(nodes)].
            nodes: their depth is the length of their paths; the request's pending token has depth 0.
            token_ids: [len(nodes)] int64.
        """

    @property
    def drafts_trees(self) -> bool:
        return self.is_dynamic or bool(self.choices)

    @property
    def max_fed_nodes(self) -> int:
        """Nodes of a request's tree that level_logits is given in one step, at most; 0 without trees."""
        if self.choices:
            return min(len(self.choices), self.num_speculative_tokens)
        return self.tree_top_k * (self.tree_depth - 1) if self.is_dynamic else 0

    @torch.inference_mode()
    def propose(self, schedule: Schedule) -> DraftTokens:
        if not self.drafts_trees:
            return super().propose(schedule)
        grown, levels = self._grown_trees(schedule)
        if not levels:
            return DraftTokens.empty(len(grown), self.context.device)
        trees = [tree.depth_first() for tree in grown]
        numbers = to_device([number for tree in trees for number in tree.numbers], torch.int64, self.context.device)
        probs = [level.probs.flatten(0, 1) for level in levels if level.probs is not None]
        return DraftTokens(
            token_ids=torch.cat([level.token_ids.flatten() for level in levels]).index_select(0, numbers),
            cu_num_draft_tokens=[0, *accumulate(len(tree.parents) for tree in trees)],
            probs=torch.cat(probs).index_select(0, numbers) if probs else None,
            parent_indices=[parent for tree in trees for parent in tree.parents],
        )

    @torch.inference_mode()
    def nodes(self, schedule: Schedule) -> Tree:
        """Of each decoding request its dynamic tree, the likeliest nodes first, as `propose` drafts it."""
        grown, levels = self._grown_trees(schedule)
        nothing = torch.empty(0, dtype=torch.int64, device=self.context.device)
        candidates = torch.cat([nothing, *(level.token_ids.flatten() for level in levels)])
        return padded_tree(candidates, [tree.numbers for tree in grown], [tree.parents for tree in grown])

    def _grown_trees(self, schedule: Schedule) -> tuple[list[GrownTree], list[_Level]]:
        """Of each decoding request, nodes numbered among the candidates of all levels; no level where nobody drafts."""
        decoding = schedule.decoding
        counts = [self.max_draft_tokens(item.request, item.max_draft_tokens) for item in decoding]
        active = [index for index, count in enumerate(counts) if count > 0]
        trees = [GrownTree([], [])] * len(decoding)
        if not active:
            return trees, []
        requests = [decoding[index].request for index in active]
        need_probs = self.keeps_probs(requests)
        growth = self._growth(requests, [counts[index] for index in active], need_probs=need_probs)
        levels = self._grow(growth, requests, need_probs=need_probs)
        for index, tree in zip(active, growth.trees(), strict=True):
            trees[index] = tree
        return trees, levels

    def _growth(self, requests: Sequence[Request], counts: Sequence[int], *, need_probs: bool) -> Growth:
        is_chain = [request.sampling_params.structured_outputs is not None for request in requests]
        if self.is_dynamic:
            return DynamicGrowth(
                counts, depth=self.tree_depth, top_k=[1 if chain else self.tree_top_k for chain in is_chain]
            )
        line = tuple((0,) * depth for depth in range(1, 1 + max(map(len, self.choices))))
        trees = [
            static_tree(line if chain else self.choices, count) for chain, count in zip(is_chain, counts, strict=True)
        ]
        in_order = [need_probs and not request.sampling_params.is_greedy for request in requests]
        return StaticGrowth(trees, in_order=in_order)

    def _grow(self, growth: Growth, requests: Sequence[Request], *, need_probs: bool) -> list[_Level]:
        walk = self.context.grammars.walk([request.request_id for request in requests])
        logits = self.first_logits(requests)
        paths: torch.Tensor | None = None  # [num_rows, depth]: the drafts on the way to each row
        fed_paths: list[tuple[int, ...]] = [()] * len(requests)  # of each row, as TreeNode tells them
        num_fed = [0] * len(requests)
        levels = []
        while True:
            owners = growth.owners
            bitmask = walk.bitmask(owners)
            level = self._candidates(logits, requests, owners, paths, bitmask, growth, need_probs=need_probs)
            levels.append(level)
            going = growth.grow(level.token_ids.shape[1], level.scores)
            if not going:
                return levels
            walk.advance(owners, level.token_ids[:, 0])
            nodes = []
            for owner, (row, _) in zip(growth.owners, going, strict=True):
                nodes.append(TreeNode(row=row, path=(*fed_paths[row], num_fed[owner])))
                num_fed[owner] += 1
            fed_paths = [node.path for node in nodes]
            rows, ranks = to_device(list(zip(*going, strict=True)), torch.int64, self.context.device)
            token_ids = level.token_ids[rows, ranks]
            fresh = token_ids.unsqueeze(1)
            paths = fresh if paths is None else torch.cat((paths.index_select(0, rows), fresh), dim=1)
            logits = self.level_logits(requests, growth.owners, nodes, token_ids)

    def _candidates(
        self,
        logits: torch.Tensor,
        requests: Sequence[Request],
        owners: list[int],
        paths: torch.Tensor | None,
        bitmask: BitmaskRows | None,
        growth: Growth,
        *,
        need_probs: bool,
    ) -> _Level:
        depth = 0 if paths is None else paths.shape[1]
        rows = SamplingRows.build(
            requests,
            owners,
            [depth] * len(owners),
            paths,
            vocab_size=self.context.vocab_size,
            eos_token_ids=self.context.eos_token_ids,
            device=self.context.device,
            bitmask=bitmask,
            path_idx=list(range(len(owners))),
        )
        processed = process_logits(logits, rows)
        width = min(growth.width, self.context.vocab_size)
        if growth.needs_scores:
            found = likeliest_candidates(perturbed(processed, rows, self.draft_sample_method), rows, width)
            return _Level(found.token_ids, None, found.log_probs.tolist())
        token_ids, probs = draw_candidates(
            processed,
            rows,
            self.draft_sample_method,
            width,
            need_probs=need_probs,
            draft_step=self._level_step(rows, owners, depth),
        )
        return _Level(token_ids, probs, None)

    def _level_step(self, rows: SamplingRows, owners: Sequence[int], depth: int) -> int | torch.Tensor:
        """The key of a level's draws. A rule that looks at several branches takes what is drawn below them for
        independent, so that it holds the row's place in its request's level, too."""
        step = self.draft_step(rows, depth)
        if isinstance(step, int):
            return step
        seen = Counter[int]()
        places = []
        for owner in owners:
            places.append(seen[owner] << MAX_LEN_BITS)
            seen[owner] += 1
        return step + to_device(places, torch.int64, self.context.device)
