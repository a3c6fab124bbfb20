"""MTP: the module that a target was trained with to predict one token further drafts token by token.

DeepSeek-V3 (arXiv 2412.19437) drafts with its first module once; more drafts re-run it over its own output, as vLLM
does and FastMTP (arXiv 2509.18362) trains it for.
"""

from __future__ import annotations

from proposers.base import ProposerContext
from proposers.drafting.from_hidden_states import HeadProposer
from proposers.heads.mtp import load_mtp_head
from runner.engine.checkpoint import ModelSource


class MtpProposer(HeadProposer):
    def __init__(
        self,
        *,
        num_speculative_tokens: int,
        context: ProposerContext,
        source: ModelSource,
        draft_sample_method: str,
        max_model_len: int | None = None,
        speculative_token_tree: str | tuple[tuple[int, ...], ...] | None = None,
        tree_depth: int = 5,
        tree_top_k: int = 4,
    ) -> None:
        head = load_mtp_head(source, context, max_model_len)
        super().__init__(
            num_speculative_tokens=num_speculative_tokens,
            context=context,
            draft_sample_method=draft_sample_method,
            head=head,
            max_model_len=head.max_model_len,
            speculative_token_tree=speculative_token_tree,
            tree_depth=tree_depth,
            tree_top_k=tree_top_k,
        )
