"""MTP: the module that a target was trained with to predict one token further drafts token by token.

DeepSeek-V3 (arXiv 2412.19437) drafts with its first module once; more drafts re-run it over its own output, as vLLM
does and FastMTP (arXiv 2509.18362) trains it for. Gemma 4's stands in a checkpoint of its own and is a few layers over
what the target has cached.
"""

from __future__ import annotations

from proposers.drafting.from_hidden_states import HeadProposer
from proposers.heads.autoregressive import AutoregressiveHead
from proposers.heads.mtp import load_mtp_head
from proposers.heads.mtp_assistant import load_mtp_assistant
from runner.engine.checkpoint import ModelSource
from runner.engine.head_checkpoint import read_head_config
from runner.engine.mtp_layout import ASSISTANTS


class MtpProposer(HeadProposer):
    def load_head(self, source: ModelSource, max_model_len: int | None) -> AutoregressiveHead:
        target = self.context.target
        assert target is not None, "heads need the target"
        if not source.has_files_of(target.source):
            values = read_head_config(source)
            if values.get("model_type") in ASSISTANTS:
                return load_mtp_assistant(source, values, self.context, max_model_len)
        return load_mtp_head(source, self.context, max_model_len)
