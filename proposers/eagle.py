"""EAGLE: a head that continues the target's last hidden states drafts token by token (arXiv 2401.15077)."""

from __future__ import annotations

from proposers.drafting.from_hidden_states import HeadProposer
from proposers.heads.autoregressive import AutoregressiveHead
from proposers.heads.eagle import load_eagle_head
from runner.engine.checkpoint import ModelSource


class EagleProposer(HeadProposer):
    def load_head(self, source: ModelSource, max_model_len: int | None) -> AutoregressiveHead:
        return load_eagle_head(source, self.context, max_model_len)
