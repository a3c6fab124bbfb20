"""A block in one pass, then token by token through its logits (DSpark, Cheng et al., arXiv 2607.05147).

DFlash's rows know of no guess; here each guess changes the logits of the place behind it (`rnn` heads: of all places
behind it), by a table of low rank.
"""

from __future__ import annotations

from typing import Any

from proposers.base import ProposerContext
from proposers.drafting.sequential_blocks import SequentialBlockProposer
from proposers.heads.dspark import load_dspark_head
from runner.engine.checkpoint import ModelSource


class DSparkProposer(SequentialBlockProposer):
    def __init__(
        self,
        *,
        context: ProposerContext,
        source: ModelSource,
        max_model_len: int | None = None,  # longest text that the head sees; None: the target's
        aux_hidden_state_layer_ids: tuple[int, ...] | None = None,
        **keys: Any,
    ) -> None:
        """
        Raises:
            UserError: no such head, or choices that are deeper than its block.
        """
        head = load_dspark_head(source, context, max_model_len, aux_hidden_state_layer_ids)
        super().__init__(head, context=context, source=source, **keys)
