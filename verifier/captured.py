"""Verification without the host, so that it can be captured, or recorded, with the rest of its step.

It runs the target over the drafts of a batch, then the rule. Every request has the same number of places for drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.reference.rejection import Verified
from runner.engine.device_batch import DeviceBatch
from runner.engine.model_runner import ModelRunner
from runner.engine.operations import take_rows
from runner.engine.step_operations import chain_rows, fit_drafts, tree_rows, walk_tree
from verifier.kernel_rules import ChainJudge
from verifier.rules import Rule, Strict, Synthetic
from verifier.tensor_judge import TensorJudge


class VerifiedBatch(NamedTuple):
    verified: Verified  # its token_ids: [count, depth + 1]
    logits: Tensor  # [count * (depth + 1), vocab] float32, as the target gave them, that these tokens were judged by
    draft_token_ids: Tensor  # [count, num_tokens] int64: the drafts that requests had room for, -1 where there is none
    draft_logits: Tensor  # [count * (num_tokens + 1), vocab] float32 behind the last committed token and each draft
    taps: list[Tensor]  # [count * (depth + 1), width] each: the last committed token's, then those of accepted drafts


class CapturedVerifier(ABC):
    def __init__(self, target: ModelRunner, *, num_tokens: int, greedy_only: bool = False) -> None:
        """
        Args:
            num_tokens: drafts of each request, at most.
            greedy_only: it decides as the rule does for greedy requests only.
        """
        self.target, self.num_tokens, self.greedy_only = target, num_tokens, greedy_only

    @abstractmethod
    def __call__(
        self,
        batch: DeviceBatch,
        draft_token_ids: Tensor,  # [count, batch.num_rows - 1] int64, -1 where there is none
        draft_probs: Tensor | None,  # [count * (batch.num_rows - 1), vocab] float32
        parents: Tensor | None,  # as draft_token_ids, of trees
        tap_layers: tuple[int, ...],
    ) -> VerifiedBatch:
        """Judge the drafts that requests have room for; the batch's lengths stay as they are."""


def captured_verifier(
    target: ModelRunner, rule: Rule, *, num_tokens: int, max_num_seqs: int, tree_depth: int | None, are_drawn: bool
) -> CapturedVerifier | None:
    """None where the rule needs the host: synthetic acceptance of trees.

    tree_depth: None = chains. are_drawn: the rule is to read the distributions of drafts.
    """
    if tree_depth is not None:
        if isinstance(rule, Synthetic):
            return None
        follows_target = isinstance(rule, Strict) or (rule.follows_target and not are_drawn)
        return TreeVerifier(target, num_tokens=num_tokens, depth=tree_depth, greedy_only=not follows_target)
    judge: ChainJudge | TensorJudge | None = None
    if num_tokens > 0:
        judge = ChainJudge(rule, target.device) if ChainJudge.knows(rule) else TensorJudge(rule)
    return ChainVerifier(target, judge, num_tokens=num_tokens, max_num_seqs=max_num_seqs)


class ChainVerifier(CapturedVerifier):
    def __init__(
        self, target: ModelRunner, judge: ChainJudge | TensorJudge | None, *, num_tokens: int, max_num_seqs: int
    ) -> None:
        """judge: None = nothing is drafted."""
        super().__init__(target, num_tokens=num_tokens)
        self._judge = judge
        places = torch.arange(num_tokens + 1, device=target.device)
        # [num_tokens + 1, num_tokens]: which drafts stand in front of what a row predicts.
        self._is_ancestor = places[:-1] < places.unsqueeze(1)
        counts = places.unsqueeze(1)
        # Of every number of drafts that a step may have for each request: [num_tokens + 1, max_num_seqs + 1] int64.
        self._cu = counts * torch.arange(max_num_seqs + 1, device=target.device)

    def __call__(
        self,
        batch: DeviceBatch,
        draft_token_ids: Tensor,
        draft_probs: Tensor | None,
        parents: Tensor | None,
        tap_layers: tuple[int, ...],
    ) -> VerifiedBatch:
        drafts, token_ids = fit_drafts(draft_token_ids, batch.last_token_ids[:, 1], batch.lengths, batch.step_limits)
        launch, predicted = self.target.decode_launch(batch, token_ids.flatten(), offset=-1, num_rows=batch.num_rows)
        hidden, taps = self.target.compute(launch, tap_layers)
        logits = of_target = self.target.model.logits(hidden, launch.linear_tile)
        rows, num_tokens = batch.sampling(predicted), batch.num_rows - 1
        if batch.processors is not None:
            logits = batch.processors.apply(logits, predicted, self._ancestors(drafts) if num_tokens else None)
        if self._judge is None or num_tokens == 0:
            none = self._cu[0, : batch.count]
            plain = Verified(rows.draw(logits).unsqueeze(1), none, none)
            return VerifiedBatch(plain, of_target, drafts, of_target, taps)
        cu = self._cu[num_tokens, : batch.count + 1]
        verified = self._judge(logits, rows, drafts.flatten(), draft_probs, cu, longest=num_tokens)
        return VerifiedBatch(verified, of_target, drafts, of_target, taps)

    def _ancestors(self, drafts: Tensor) -> Tensor:
        """[count, num_tokens] -> [count * (num_tokens + 1), num_tokens], -1 behind each row's."""
        num_tokens = drafts.shape[1]
        is_ancestor = self._is_ancestor[: num_tokens + 1, :num_tokens]
        return torch.where(is_ancestor, drafts.unsqueeze(1), -1).flatten(0, 1)


class TreeVerifier(CapturedVerifier):
    """Follows the target's own tokens down the tree; moves the KV of accepted drafts to where a chain's would be."""

    def __init__(self, target: ModelRunner, *, num_tokens: int, depth: int, greedy_only: bool) -> None:
        super().__init__(target, num_tokens=num_tokens, greedy_only=greedy_only)
        self.depth = depth
        self._nodes = torch.arange(-1, num_tokens, device=target.device)
        self._places = torch.arange(depth, device=target.device)

    def __call__(
        self,
        batch: DeviceBatch,
        draft_token_ids: Tensor,
        draft_probs: Tensor | None,
        parents: Tensor | None,
        tap_layers: tuple[int, ...],
    ) -> VerifiedBatch:
        assert parents is not None and self.target.cache is not None
        num_rows, block_size, shape = batch.num_rows, self.target.block_size, self.target.paged_shape
        drafts, token_ids = fit_drafts(draft_token_ids, batch.last_token_ids[:, 1], batch.lengths, batch.step_limits)
        # Node j is stored j + 1 places behind the pending token, whatever its depth.
        slots = chain_rows(
            batch.lengths, batch.block_tables, offset=-1, num_rows=num_rows, block_size=block_size, rows_per_tile=1
        ).slots.view(-1, num_rows)
        rows = tree_rows(batch.lengths, slots, parents, first=0, offset=-1, depth=self.depth, **shape.tree_tiles)
        launch = batch.tree_launch(token_ids.flatten(), rows, shape)
        hidden, taps = self.target.compute(launch, tap_layers)
        logits = of_target = self.target.model.logits(hidden, shape.linear)
        if batch.processors is not None:
            logits = batch.processors.apply(logits, rows.predicted, self._ancestors(drafts, parents))
        drawn = batch.sampling(rows.predicted).draw(logits)
        walked = walk_tree(drawn, drafts, parents, slots, depth=self.depth)
        self.target.cache.move(walked.source_slots, walked.target_slots)
        verified = Verified(walked.token_ids, walked.num_accepted_tokens, walked.num_draft_tokens)
        tells_logprobs = batch.sampling_flags.num_top_logprobs is not None
        of_path = take_rows(of_target, walked.rows) if tells_logprobs else of_target
        return VerifiedBatch(verified, of_path, drafts, of_target, [take_rows(tap, walked.rows) for tap in taps])

    def _ancestors(self, drafts: Tensor, parents: Tensor) -> Tensor:
        """The way to each node, and to the pending token none: [count * (num_nodes + 1), depth], -1 behind each."""
        if drafts.shape[1] == 0:
            return drafts.new_full((len(drafts), self.depth), -1)
        nodes, upwards = self._nodes[: 1 + drafts.shape[1]].expand(len(drafts), -1), list[Tensor]()
        for _ in range(self.depth):
            known = nodes.clamp(min=0)
            upwards.append(torch.where(nodes >= 0, drafts.gather(1, known), -1))
            nodes = torch.where(nodes >= 0, parents.gather(1, known), -1)
        way = torch.stack(upwards, dim=2).flatten(0, 1)  # from each node up
        places = (way >= 0).sum(dim=1, keepdim=True) - 1 - self._places
        return torch.where(places >= 0, way.gather(1, places.clamp(min=0)), -1)
