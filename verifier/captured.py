"""Verification without the host, so that a CUDA graph can capture it with the rest of its step.

It runs the target over the drafts of a batch, then the rule. Every request has the same number of places for drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from runner.engine.device_requests import DeviceBatch
from runner.engine.model_runner import ModelRunner
from runner.engine.paged_shape import PagedShape
from verifier.kernel_rules import ChainJudge
from verifier.rules import Rule, Strict, Synthetic

if TYPE_CHECKING:
    from kernels.rejection import Verified


class VerifiedBatch(NamedTuple):
    verified: Verified  # its token_ids: [count, depth + 1]
    taps: list[Tensor]  # [count * (depth + 1), width] each: the last committed token's, then those of accepted drafts


class CapturedVerifier(ABC):
    def __init__(self, target: ModelRunner, *, num_tokens: int, greedy_only: bool) -> None:
        """
        Args:
            num_tokens: drafts of each request.
            greedy_only: it decides as the rule does for greedy requests only.
        """
        self.target, self.num_tokens, self.greedy_only = target, num_tokens, greedy_only
        shape = target.shapes["decode"]
        assert isinstance(shape, PagedShape)
        self.shape = shape

    @abstractmethod
    def __call__(
        self,
        batch: DeviceBatch,
        draft_token_ids: Tensor,  # [count, num_tokens] int64, -1 where there is none
        draft_probs: Tensor | None,  # [count * num_tokens, vocab] float32
        parents: Tensor | None,  # [count, num_tokens] int64, of trees
        tap_layers: tuple[int, ...],
    ) -> VerifiedBatch:
        """Judge the drafts that requests have room for; the batch's lengths stay as they are."""


def captured_verifier(
    target: ModelRunner, rule: Rule, *, num_tokens: int, max_num_seqs: int, tree_depth: int | None
) -> CapturedVerifier | None:
    """None where the rule needs the host: synthetic acceptance of trees. tree_depth: None = chains."""
    if tree_depth is not None:
        if isinstance(rule, Synthetic):
            return None
        return TreeVerifier(target, num_tokens=num_tokens, depth=tree_depth, greedy_only=not isinstance(rule, Strict))
    # For greedy requests the rules without a kernel accept what the strict one accepts.
    is_known = num_tokens == 0 or ChainJudge.knows(rule)
    judge = ChainJudge(rule if is_known else Strict(), target.device) if num_tokens > 0 else None
    return ChainVerifier(target, judge, num_tokens=num_tokens, max_num_seqs=max_num_seqs, greedy_only=not is_known)


class ChainVerifier(CapturedVerifier):
    def __init__(
        self, target: ModelRunner, judge: ChainJudge | None, *, num_tokens: int, max_num_seqs: int, greedy_only: bool
    ) -> None:
        """judge: None = nothing is drafted."""
        super().__init__(target, num_tokens=num_tokens, greedy_only=greedy_only)
        self._judge = judge
        self._cu = torch.arange(max_num_seqs + 1, dtype=torch.int64, device=target.device) * num_tokens

    def __call__(
        self,
        batch: DeviceBatch,
        draft_token_ids: Tensor,
        draft_probs: Tensor | None,
        parents: Tensor | None,
        tap_layers: tuple[int, ...],
    ) -> VerifiedBatch:
        from kernels.fit_drafts import fit_drafts
        from kernels.rejection import Verified

        drafts, token_ids = fit_drafts(draft_token_ids, batch.last_token_ids[:, 1], batch.lengths, batch.limits)
        launch, predicted = batch.launch(
            token_ids.flatten(),
            offset=-1,
            num_rows=self.num_tokens + 1,
            shape=self.shape,
            block_size=self.target.block_size,
        )
        hidden, taps = self.target.compute(launch, tap_layers)
        logits = self.target.model.logits(hidden, self.shape.linear)
        rows = batch.sampling(predicted)
        if self._judge is None:
            none = torch.zeros_like(batch.lengths)
            return VerifiedBatch(Verified(rows.draw(logits).unsqueeze(1), none, none), taps)
        cu = self._cu[: batch.count + 1]
        return VerifiedBatch(
            self._judge(logits, rows, drafts.flatten(), draft_probs, cu, longest=self.num_tokens), taps
        )


class TreeVerifier(CapturedVerifier):
    """Follows the target's own tokens down the tree; moves the KV of accepted drafts to where a chain's would be."""

    def __init__(self, target: ModelRunner, *, num_tokens: int, depth: int, greedy_only: bool) -> None:
        super().__init__(target, num_tokens=num_tokens, greedy_only=greedy_only)
        self.depth = depth

    def __call__(
        self,
        batch: DeviceBatch,
        draft_token_ids: Tensor,
        draft_probs: Tensor | None,
        parents: Tensor | None,
        tap_layers: tuple[int, ...],
    ) -> VerifiedBatch:
        from kernels.chain_rows import chain_rows
        from kernels.fit_drafts import fit_drafts
        from kernels.rejection import Verified
        from kernels.tree_rows import tree_rows
        from kernels.walk_tree import walk_tree

        assert parents is not None and self.target.cache is not None
        num_rows, block_size = self.num_tokens + 1, self.target.block_size
        drafts, token_ids = fit_drafts(draft_token_ids, batch.last_token_ids[:, 1], batch.lengths, batch.limits)
        # Node j is stored j + 1 places behind the pending token, whatever its depth.
        slots = chain_rows(
            batch.lengths, batch.block_tables, offset=-1, num_rows=num_rows, block_size=block_size, rows_per_tile=1
        ).slots.view(-1, num_rows)
        rows = tree_rows(batch.lengths, slots, parents, first=0, offset=-1, depth=self.depth, **self.shape.tree_tiles)
        launch = batch.tree_launch(token_ids.flatten(), rows, self.shape)
        hidden, taps = self.target.compute(launch, tap_layers)
        logits = self.target.model.logits(hidden, self.shape.linear)
        drawn = batch.sampling(rows.predicted).draw(logits)
        walked = walk_tree(drawn, drafts, parents, slots, depth=self.depth)
        self.target.cache.move(walked.source_slots, walked.target_slots)
        verified = Verified(walked.token_ids, walked.num_accepted_tokens, walked.num_draft_tokens)
        return VerifiedBatch(verified, [tap.index_select(0, walked.rows) for tap in taps])
