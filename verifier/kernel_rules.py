"""Chains of drafts judged by kernels, Triton's or a CPU's: the rules of verifier/rules.py that have one.

Same streams and keys as there, so both decide alike but for ties within a rounding. Greedy requests are judged by the
target's argmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.rejection import Verified
from runner.engine.backend import runs_kernels
from runner.engine.request import DraftTokens, VerifyOutput
from runner.engine.row_sampling import RowSampling
from runner.engine.sampling import SamplingRows, mask_and_penalise
from runner.engine.step_operations import verify_strict, verify_synthetic
from runner.engine.upload import to_device
from verifier.rules import Probabilistic, Rule, Strict, Synthetic


class ChainJudge:
    """A rule's kernel, with what it needs on the device; reads nothing back and uploads nothing."""

    def __init__(self, rule: Rule, device: torch.device) -> None:
        assert self.knows(rule)
        self.rule = rule
        self._rates: Tensor | None = None
        if isinstance(rule, Synthetic):
            self._rates = to_device(rule.conditional_rates, torch.float64, device)

    @staticmethod
    def knows(rule: Rule) -> bool:
        return isinstance(rule, Strict | Synthetic | Probabilistic)

    def __call__(
        self,
        logits: Tensor,  # [num_drafts + num_requests, vocab] float32, as mask_and_penalise leaves them
        rows: RowSampling,  # of these rows
        draft_token_ids: Tensor,  # [num_drafts] int64
        draft_probs: Tensor | None,  # [num_drafts, vocab] float32; None = one-hot
        cu_num_draft_tokens: Tensor,  # [num_requests + 1] int64
        *,
        longest: int,  # draft of a request
    ) -> Verified:
        if isinstance(self.rule, Probabilistic) and not rows.all_greedy:
            return _by_probabilities(logits, rows, draft_token_ids, draft_probs, cu_num_draft_tokens, longest)
        drawn = rows.draw(logits)
        if self._rates is None:
            return verify_strict(drawn, draft_token_ids, cu_num_draft_tokens, longest=longest)
        assert isinstance(self.rule, Synthetic)
        self.rule.check_depth(longest)
        return verify_synthetic(
            drawn,
            draft_token_ids,
            cu_num_draft_tokens,
            rows.seeds,
            rows.positions,
            self._rates,
            longest=longest,
        )


def _by_probabilities(
    logits: Tensor, rows: RowSampling, draft_token_ids: Tensor, draft_probs: Tensor | None, cu: Tensor, longest: int
) -> Verified:
    keys = (rows.seeds, rows.positions)
    if runs_kernels(logits):
        from kernels.probabilistic_rejection import verify_probabilistic

        return verify_probabilistic(
            logits,
            rows.truncated(logits),
            draft_token_ids,
            draft_probs,
            cu,
            *keys,
            max_num_draft_tokens=longest,
            is_greedy=rows.is_greedy,
            temperatures=rows.temperatures,
        )
    from kernels.cpu.probabilistic_rejection import verify_probabilistic as on_cpu

    processed = rows.processed(logits).contiguous()
    return on_cpu(
        processed,
        processed.softmax(dim=-1),
        draft_token_ids,
        None if draft_probs is None else draft_probs.contiguous(),
        cu,
        *keys,
        max_num_draft_tokens=longest,
        is_greedy=rows.is_greedy,
        argmax=None if rows.is_greedy is None else rows.argmax(logits),
    )


def verify_chains(rule: Rule, logits: Tensor, drafts: DraftTokens, rows: SamplingRows) -> VerifyOutput | None:
    """What the rule says of a step whose drafts are chains; None where it has no kernel.

    logits: [num_drafts + num_requests, vocab], unprocessed, as RejectionSampler takes them.
    """
    if not ChainJudge.knows(rule):
        return None
    verified = ChainJudge(rule, logits.device)(
        mask_and_penalise(logits, rows),
        rows.of_every_row(),
        drafts.token_ids,
        drafts.probs,
        to_device(drafts.cu_num_draft_tokens, torch.int64, logits.device),
        longest=max(drafts.num_draft_tokens),
    )
    return VerifyOutput(
        token_ids=verified.token_ids,
        num_accepted_tokens=verified.num_accepted_tokens,
        num_draft_tokens=verified.num_draft_tokens if drafts.is_padded else None,
    )
