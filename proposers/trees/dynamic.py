"""What trees whose shape follows from probabilities may hold (speculative_token_tree: dynamic)."""

from __future__ import annotations

from proposers.base import ProposerContext
from runner.engine.errors import UserError


def require_candidate_sets(context: ProposerContext, draft_sample_method: str) -> None:
    """Raises UserError when the shape would depend on draws whose laws the rule is to read."""
    if context.needs_draft_probs and draft_sample_method != "greedy":
        raise UserError(
            "method.draft_sample_method must be greedy for speculative_token_tree=dynamic under a rule that reads the "
            f"drafts' laws, got {draft_sample_method!r}: the shape of the tree would depend on what was drawn; set it, "
            "choose rejection_sample_method=strict, or give the tree as paths"
        )
