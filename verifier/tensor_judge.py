"""Chains of drafts judged by a rule that has no kernel, where every request has as many places for drafts.

It makes the tensor operations of verifier/rules.py, which read nothing back and upload nothing; so they are captured
and recorded like kernels.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kernels.reference.rejection import Verified
from runner.engine.row_sampling import RowSampling
from runner.engine.sampling import SamplingRows
from runner.engine.step_operations import verify_strict
from verifier.draft_batch import DraftBatch
from verifier.rules import Rule


class TensorJudge:
    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._layouts = dict[tuple[int, int], DraftBatch]()  # by drafts and requests; a step runs before it is captured

    def __call__(
        self,
        logits: Tensor,  # [num_drafts + num_requests, vocab] float32, as mask_and_penalise leaves them
        rows: RowSampling,  # of these rows
        draft_token_ids: Tensor,  # [num_drafts] int64, -1 where there is none
        draft_probs: Tensor | None,  # [num_drafts, vocab] float32; None = one-hot
        cu_num_draft_tokens: Tensor,  # [num_requests + 1] int64
        *,
        longest: int,  # draft slots of every request
    ) -> Verified:
        num_requests = len(cu_num_draft_tokens) - 1
        judged = None if rows.all_greedy else self._judge(logits, rows, draft_token_ids, draft_probs, num_requests)
        if judged is not None and rows.is_greedy is None:
            return judged
        # Greedy requests are judged alike by all rules.
        strict = verify_strict(rows.argmax(logits), draft_token_ids, cu_num_draft_tokens, longest=longest)
        if judged is None or rows.is_greedy is None:
            return strict
        is_greedy = rows.is_greedy.view(num_requests, longest + 1)[:, 0]
        return Verified(
            torch.where(is_greedy.unsqueeze(1), strict.token_ids, judged.token_ids),
            torch.where(is_greedy, strict.num_accepted_tokens, judged.num_accepted_tokens),
            torch.where(is_greedy, strict.num_draft_tokens, judged.num_draft_tokens),
        )

    def _judge(
        self, logits: Tensor, rows: RowSampling, draft_token_ids: Tensor, draft_probs: Tensor | None, num_requests: int
    ) -> Verified:
        """As if no request were greedy."""
        layout = len(draft_token_ids), num_requests
        if layout not in self._layouts:
            self._layouts[layout] = DraftBatch.of_equal(draft_token_ids, None, num_requests)
        batch = replace(self._layouts[layout], token_ids=draft_token_ids, probs=draft_probs)
        drawn = SamplingRows(
            vocab_size=logits.shape[1],
            is_greedy=(False,) * len(logits),
            seeds=rows.seeds,
            positions=rows.positions,
            random_row_idx=None,
        )
        num_accepted, last_token_ids = self.rule.verify(rows.processed(logits), batch, drawn)
        return Verified(batch.assemble(num_accepted, last_token_ids), num_accepted, batch.num_draft_tokens())
