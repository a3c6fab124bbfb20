"""MTP: the module that a target was trained with to predict one token further drafts token by token.

DeepSeek-V3 (arXiv 2412.19437) drafts with its first module once; more drafts re-run it over its own output, as vLLM
does and FastMTP (arXiv 2509.18362) trains it for.
"""

from __future__ import annotations

from proposers.drafting.from_hidden_states import HeadProposer
from proposers.heads.autoregressive import AutoregressiveHead
from proposers.heads.mtp import load_mtp_head
from runner.engine.checkpoint import ModelSource


class MtpProposer(HeadProposer):
    def load_head(self, source: ModelSource, max_model_len: int | None) -> AutoregressiveHead:
        return load_mtp_head(source, self.context, max_model_len)
