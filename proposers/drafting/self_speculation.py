"""Drafts token by token with the target's own layers, over the target's own cache.

There is no checkpoint, no weight and no cache beside the target's, and no prompt to follow: the layers find the keys
and values of what is committed where the target has put them. Theirs of the last token and of drafts go to the places
behind, where verification, and whatever is computed later, stores its own before anybody reads it. These places lie
behind the prompt, so that no block which others share is written to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from proposers.base import ProposerContext
from proposers.captured.drafter import CapturedDrafter, NoDrafts
from proposers.captured.self_speculation import CapturedSelfSpeculation
from proposers.contexts.kept_context import KeptContext
from proposers.drafting.token_by_token import TokenByTokenProposer
from runner.engine.decoder import Decoder
from runner.engine.errors import UserError
from runner.engine.launch import Part
from runner.engine.loader import LoadedModel
from runner.engine.request import Request


class SelfSpeculationProposer(TokenByTokenProposer):
    kept: KeptContext | None = None  # what drafts attend to; None: to all that is committed

    def __init__(
        self, *, num_speculative_tokens: int, context: ProposerContext, draft_sample_method: str, num_layers: int
    ) -> None:
        """num_layers: how many of the target's layers draft, the first ones."""
        super().__init__(
            num_speculative_tokens=num_speculative_tokens, context=context, draft_sample_method=draft_sample_method
        )
        assert context.target_runner is not None, "it drafts with the target"
        self.runner = context.target_runner.of_first_layers(num_layers)

    @property
    def has_passes(self) -> bool:
        return True

    def allocate_cache(self, num_blocks: int) -> None:
        self.runner.read_cache(self.context.cache_of_target())

    def captured_drafter(self, num_tokens: int) -> CapturedDrafter | None:
        if num_tokens == 0:
            return NoDrafts()
        if not self.runner.is_paged:
            return None
        return CapturedSelfSpeculation(
            runner=self.runner,
            kept=self.kept,
            max_model_len=self.max_model_len,
            **self.captured_arguments(num_tokens),
        )

    def first_logits(self, requests: Sequence[Request]) -> torch.Tensor:
        return self.runner.run(
            [
                Part(
                    request=request,
                    start=request.num_tokens - 1,
                    end=request.num_tokens,
                    num_logits=1,
                    unseen_blocks=self._unseen_blocks(request),
                )
                for request in requests
            ]
        )

    def next_logits(
        self, requests: Sequence[Request], step: int, token_ids: torch.Tensor, row_idx: torch.Tensor | None
    ) -> torch.Tensor:
        parts = []
        for request in requests:
            end, unseen = request.num_tokens + step - 1, self._unseen_blocks(request)
            parts.append(
                Part(request=request, start=end, end=end, num_draft_tokens=1, num_logits=1, unseen_blocks=unseen)
            )
        return self.runner.run(parts, token_ids)

    def _unseen_blocks(self, request: Request) -> range:
        return range(0) if self.kept is None else self.kept.unseen_blocks(request.num_tokens)


def require_own_layers(target: LoadedModel, method: str, drafting: str) -> Decoder:
    """The target's layers; drafting: which of them draft, as people say it.

    Raises:
        UserError: they cannot.
    """
    model, name = target.model, target.source.model
    if not isinstance(model, Decoder):
        raise UserError(
            f"method={method} drafts with {drafting} of {name}, which must run on our own decoder; this "
            f"{target.hf_config.model_type} runs through transformers' code; choose another method"
        )
    if model.is_recurrent:
        raise UserError(
            f"method={method} must have attention in all layers of {name}: drafts would move on states of layers "
            f"of {target.hf_config.model_type}; choose another method, or method=mtp where the target "
            "has a module"
        )
    return model
