"""The rejection sampler: target logits and draft tokens in, the step's tokens out.

Processes the logits as plain decoding does, lets one rule judge the drafts (verifier/rules.py), and lays out the
result. Requests of any kind and draft length, none included, share one batch; no loop over them touches a tensor, and
nothing is read back to the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runner.engine.request import DraftTokens, VerifyOutput
from runner.engine.sampling import SamplingRows, draw_tokens, process_logits
from verifier.draft_batch import DraftBatch
from verifier.kernel_rules import verify_chains
from verifier.rules import Block, Probabilistic, Rule, Strict, Synthetic, Typical
from verifier.tree_batch import TreeBatch

REJECTION_SAMPLE_METHODS = ("strict", "probabilistic", "standard", "block", "typical", "synthetic")


class RejectionSampler:
    """Applies one rule to every batch; holds no state but its configuration."""

    def __init__(
        self,
        *,
        rejection_sample_method: str,
        synthetic_conditional_rates: Sequence[float] | None = None,
        posterior_threshold: float = 0.09,
        posterior_alpha: float = 0.3,
    ) -> None:
        """
        Args:
            synthetic_conditional_rates: of the synthetic rule: for each place in the draft, the rate given that all
                before it were accepted.
            posterior_threshold, posterior_alpha: of the typical rule.
        """
        if rejection_sample_method not in REJECTION_SAMPLE_METHODS:
            raise ValueError(
                f"rejection_sample_method must be one of {', '.join(REJECTION_SAMPLE_METHODS)}, "
                f"got {rejection_sample_method!r}"
            )
        if (rejection_sample_method == "synthetic") != (synthetic_conditional_rates is not None):
            raise ValueError(
                "synthetic_conditional_rates must be given for rejection_sample_method 'synthetic' and for no other, "
                f"got {synthetic_conditional_rates!r} with {rejection_sample_method!r}"
            )
        self.rule: Rule
        if synthetic_conditional_rates is not None:
            self.rule = Synthetic(conditional_rates=synthetic_conditional_rates)
        elif rejection_sample_method == "typical":
            self.rule = Typical(posterior_threshold=posterior_threshold, posterior_alpha=posterior_alpha)
        else:
            self.rule = {"strict": Strict, "block": Block}.get(rejection_sample_method, Probabilistic)()

    def __call__(self, logits: Tensor, drafts: DraftTokens, rows: SamplingRows) -> VerifyOutput:
        """Decides one step.

        logits: [num_drafts + num_requests, vocab], any float dtype; request b's rows are the pending token's and then
            each draft's own, each predicting the token that follows it.
        """
        if drafts.cu_num_draft_tokens[-1] == 0:  # every rule without a draft is a draw from the target
            token_ids = draw_tokens(logits, rows)
            return VerifyOutput(token_ids=token_ids.unsqueeze(1), num_accepted_tokens=torch.zeros_like(token_ids))
        rule = self.rule
        if (drafts.are_candidates and rule.follows_target) or (rows.all_greedy and not isinstance(rule, Synthetic)):
            rule = Strict()
        if not drafts.has_branches:
            output = verify_chains(rule, logits, drafts, rows)
            if output is not None:
                return output
        processed = process_logits(logits, rows)
        if drafts.has_branches:
            return _verify_tree(rule, processed, TreeBatch.build(drafts, rows), rows)
        batch = DraftBatch.build(drafts, rows)
        num_accepted, last_token_ids = rule.verify(processed, batch, rows)
        return VerifyOutput(
            token_ids=batch.assemble(num_accepted, last_token_ids),
            num_accepted_tokens=num_accepted,
            num_draft_tokens=batch.num_draft_tokens() if drafts.is_padded else None,
        )


def _verify_tree(rule: Rule, processed: Tensor, tree: TreeBatch, rows: SamplingRows) -> VerifyOutput:
    last, last_token_ids = rule.verify_tree(processed, tree, rows)
    path = tree.paths[last]  # [num_requests, deepest]
    is_accepted = path >= 0
    num_accepted = is_accepted.sum(dim=1)
    token_ids = torch.nn.functional.pad(tree.tokens_on(path), (0, 1), value=-1)
    return VerifyOutput(
        token_ids=token_ids.scatter_(1, num_accepted.unsqueeze(1), last_token_ids.unsqueeze(1)),
        num_accepted_tokens=num_accepted,
        path=torch.where(is_accepted, path - tree.first_draft_idx.unsqueeze(1), -1),
    )
