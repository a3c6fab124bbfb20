"""A small model that was trained to draft in one pass, over mask tokens (PARD, An et al., arXiv 2504.18583).

Behind the committed text stand K - 1 mask tokens; the last row of the text and the rows of the masks yield K
distributions. KV of mask rows is scratch: what is committed there is computed again in the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from proposers.base import ProposerContext
from proposers.captured.drafter import CapturedDrafter
from proposers.captured.pard import CapturedPard
from proposers.draft_model import DraftModelProposer
from proposers.drafting.in_one_pass import OnePassProposer
from proposers.heads.mask_token import mask_token_id
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.head_checkpoint import read_head_config
from runner.engine.request import Request


class PardProposer(OnePassProposer, DraftModelProposer):
    def __init__(
        self,
        *,
        num_speculative_tokens: int,
        context: ProposerContext,
        source: ModelSource,
        draft_sample_method: str,
        max_model_len: int | None = None,
    ) -> None:
        config = read_head_config(source)
        if config.get("spd_type") == "pard2":
            raise UserError(
                f"{source.name}={source.model}: spd_type must be pard, got pard2, whose embeddings are warped by "
                "hidden states of the target (warp_model.bin), which this runner does not do; choose a PARD checkpoint"
            )
        super().__init__(
            num_speculative_tokens=num_speculative_tokens,
            context=context,
            source=source,
            draft_sample_method=draft_sample_method,
            max_model_len=max_model_len,
        )
        self.mask_token_id = mask_token_id(config, source, self.runner.model.vocab_size)

    def captured_drafter(self, num_tokens: int) -> CapturedDrafter | None:
        if num_tokens == 0 or not self.runner.is_paged:
            return super().captured_drafter(num_tokens)
        return CapturedPard(
            runner=self.runner,
            num_computed=self._num_computed,
            mask_token_id=self.mask_token_id,
            capacity=self.context.max_num_seqs,
            max_depth=max(num_tokens, self.context.max_draft_tokens or 0),
            max_model_len=self.max_model_len,
            **self.captured_arguments(num_tokens),
        )

    def all_logits(self, requests: Sequence[Request], counts: Sequence[int]) -> torch.Tensor:
        self._catch_up(requests)
        parts = [
            self._part(request, request.num_tokens, num_draft_tokens=count - 1, num_logits=count)
            for request, count in zip(requests, counts, strict=True)
        ]
        masks = torch.full((sum(counts) - len(counts),), self.mask_token_id, device=self.context.device)
        return self.runner.run(parts, masks)
