"""Chains of drafts judged by Triton kernels: the rules of verifier/rules.py that have one.

Same streams and keys as there, so both decide alike but for ties within a rounding. Greedy requests are judged by the
target's argmax, here inside the launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.engine.request import DraftTokens, VerifyOutput
from runner.engine.sampling import SamplingRows, draw_tokens, mask_and_penalise, row_laws
from runner.engine.upload import to_device
from verifier.rules import Probabilistic, Rule, Strict, Synthetic


def verify_chains(rule: Rule, logits: Tensor, drafts: DraftTokens, rows: SamplingRows) -> VerifyOutput | None:
    """What the rule says of a step whose drafts are chains; None where it has no kernel.

    logits: [num_drafts + num_requests, vocab], unprocessed, as RejectionSampler takes them.
    """
    from kernels.probabilistic_rejection import verify_probabilistic
    from kernels.rejection import verify_strict, verify_synthetic

    longest = max(drafts.num_draft_tokens)
    cu = to_device(drafts.cu_num_draft_tokens, torch.int64, logits.device)
    if isinstance(rule, Strict):
        verified = verify_strict(draw_tokens(logits, rows), drafts.token_ids, cu, max_num_draft_tokens=longest)
    elif isinstance(rule, Synthetic):
        rule.check_depth(longest)
        verified = verify_synthetic(
            draw_tokens(logits, rows),
            drafts.token_ids,
            cu,
            rows.seeds,
            rows.positions,
            to_device(rule.conditional_rates, torch.float64, logits.device),
            max_num_draft_tokens=longest,
        )
    elif isinstance(rule, Probabilistic):
        logits = mask_and_penalise(logits, rows)
        every = rows.of_every_row()
        verified = verify_probabilistic(
            logits,
            row_laws(logits, rows),
            drafts.token_ids,
            drafts.probs,
            cu,
            rows.seeds,
            rows.positions,
            max_num_draft_tokens=longest,
            is_greedy=every["is_greedy"],
            temperatures=every["temperatures"],
        )
    else:
        return None
    return VerifyOutput(
        token_ids=verified.token_ids,
        num_accepted_tokens=verified.num_accepted_tokens,
        num_draft_tokens=verified.num_draft_tokens if drafts.is_padded else None,
    )
