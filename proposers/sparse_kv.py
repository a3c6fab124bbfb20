"""The target drafts for itself over a part of its KV cache, a text's first tokens and its last; all of it verifies.

Self-speculative decoding for long contexts (MagicDec, Chen et al., arXiv 2408.11049; TriForce, arXiv 2404.11912, has
such a stage), where most of a step goes to reading the cache. What is kept is StreamingLLM's choice (Xiao et al.,
arXiv 2309.17453): the first tokens, which attention leans on whatever they say, and a window. Nothing is trained.
"""

from __future__ import annotations

from proposers.base import ProposerContext
from proposers.contexts.kept_context import KeptContext
from proposers.drafting.self_speculation import SelfSpeculationProposer, require_own_layers


class SparseKVProposer(SelfSpeculationProposer):
    def __init__(
        self,
        *,
        num_speculative_tokens: int,
        context: ProposerContext,
        draft_sample_method: str,
        num_sink_tokens: int,
        num_recent_tokens: int,
    ) -> None:
        """Both numbers in tokens; whole blocks of the cache are kept, those in which they begin and end too.

        Raises:
            UserError: the target has no layers that can draft.
        """
        assert context.target is not None, "it drafts with the target"
        model = require_own_layers(context.target, "sparse_kv", "all layers")
        super().__init__(
            num_speculative_tokens=num_speculative_tokens,
            context=context,
            draft_sample_method=draft_sample_method,
            num_layers=model.num_layers,
        )
        self.kept = KeptContext(
            num_first_blocks=-(-num_sink_tokens // context.block_size),
            num_recent_tokens=num_recent_tokens,
            block_size=context.block_size,
        )
