"""EAGLE-3: a head over hidden states from several depths of the target drafts (arXiv 2503.01840).

Token by token, or, with a head that was trained for it, in one pass (P-EAGLE, arXiv 2602.01469).
"""

from __future__ import annotations

from proposers.base import ProposerContext
from proposers.drafting.one_pass_heads import OnePassHeadProposer
from proposers.heads.eagle3 import load_eagle3_head
from runner.engine.checkpoint import ModelSource


class Eagle3Proposer(OnePassHeadProposer):
    def __init__(
        self,
        *,
        num_speculative_tokens: int,
        context: ProposerContext,
        source: ModelSource,
        draft_sample_method: str,
        max_model_len: int | None = None,
        aux_hidden_state_layer_ids: tuple[int, ...] | None = None,
        speculative_token_tree: str | tuple[tuple[int, ...], ...] | None = None,
        tree_depth: int = 5,
        tree_top_k: int = 4,
    ) -> None:
        head = load_eagle3_head(source, context, max_model_len, aux_hidden_state_layer_ids)
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
