"""EAGLE-3: a head over hidden states from several depths of the target drafts (arXiv 2503.01840).

Token by token, or, with a head that was trained for it, in one pass (P-EAGLE, arXiv 2602.01469).
"""

from __future__ import annotations

from typing import Any

from proposers.drafting.one_pass_heads import MaskableHead, OnePassHeadProposer
from proposers.heads.eagle3 import load_eagle3_head
from runner.engine.checkpoint import ModelSource


class Eagle3Proposer(OnePassHeadProposer):
    def __init__(self, *, aux_hidden_state_layer_ids: tuple[int, ...] | None, **keys: Any) -> None:
        self.aux_hidden_state_layer_ids = aux_hidden_state_layer_ids
        super().__init__(**keys)

    def load_head(self, source: ModelSource, max_model_len: int | None) -> MaskableHead:
        return load_eagle3_head(source, self.context, max_model_len, self.aux_hidden_state_layer_ids)
