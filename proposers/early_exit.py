"""The target drafts for itself: its first layers, its own final norm and head, token by token; all of it verifies.

Self-speculative decoding by an early exit (LayerSkip, Elhoushi et al., arXiv 2404.16710; transformers'
assistant_early_exit; Draft & Verify, arXiv 2309.08168, leaves out layers in between). There is no checkpoint, no weight
and no cache beside the target's, and no prompt to follow: the first layers find the keys and values of what is
committed where the target has put them. Theirs of the last token and of drafts go to the places behind, where
verification, and whatever is computed later, stores its own before anybody reads it. These places lie behind the
prompt, so that no block which others share is written to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from proposers.base import ProposerContext
from proposers.captured.drafter import CapturedDrafter, NoDrafts
from proposers.captured.early_exit import CapturedEarlyExit
from proposers.drafting.token_by_token import TokenByTokenProposer
from runner.engine.decoder import Decoder
from runner.engine.errors import UserError
from runner.engine.launch import Part
from runner.engine.loader import LoadedModel
from runner.engine.request import Request

SHARE_OF_LAYERS = 4  # one of so many drafts: 4 of 16 and 8 of 32, as in transformers' and LayerSkip's own examples


class EarlyExitProposer(TokenByTokenProposer):
    def __init__(
        self,
        *,
        num_speculative_tokens: int,
        context: ProposerContext,
        draft_sample_method: str,
        exit_layer: int | None = None,
    ) -> None:
        """exit_layer: how many of the target's layers draft; None: a quarter of them, at least one.

        Raises:
            UserError: the target has fewer layers, or none that can draft.
        """
        super().__init__(
            num_speculative_tokens=num_speculative_tokens, context=context, draft_sample_method=draft_sample_method
        )
        assert context.target is not None and context.target_runner is not None, "it drafts with the target"
        self.exit_layer = _exit_layer(exit_layer, context.target)
        self.runner = context.target_runner.of_first_layers(self.exit_layer)

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
        return CapturedEarlyExit(
            runner=self.runner, max_model_len=self.max_model_len, **self.captured_arguments(num_tokens)
        )

    def first_logits(self, requests: Sequence[Request]) -> torch.Tensor:
        ends = [request.num_tokens for request in requests]
        parts = zip(requests, ends, strict=True)
        return self.runner.run([Part(request=own, start=end - 1, end=end, num_logits=1) for own, end in parts])

    def next_logits(
        self, requests: Sequence[Request], step: int, token_ids: torch.Tensor, row_idx: torch.Tensor | None
    ) -> torch.Tensor:
        ends = [request.num_tokens + step - 1 for request in requests]
        parts = zip(requests, ends, strict=True)
        return self.runner.run(
            [Part(request=own, start=end, end=end, num_draft_tokens=1, num_logits=1) for own, end in parts], token_ids
        )


def _exit_layer(asked: int | None, target: LoadedModel) -> int:
    """How many of the target's layers draft.

    Raises:
        UserError: it has fewer, or none that can draft.
    """
    model, name = target.model, target.source.model
    if not isinstance(model, Decoder):
        raise UserError(
            f"method=early_exit drafts with the first layers of {name}, which must run on our own decoder; this "
            f"{target.hf_config.model_type} runs through transformers' code; choose another method"
        )
    if model.is_recurrent:
        raise UserError(
            f"method=early_exit must have attention in all layers of {name}: drafts would move on states of layers "
            f"of {target.hf_config.model_type}; choose another method, or method=mtp where the target "
            "has a module"
        )
    if asked is not None and asked > model.num_layers:
        raise UserError(
            f"method.exit_layer must be <= {model.num_layers}, the layers of {name}, got {asked}; lower it, or leave "
            "it out"
        )
    return asked or max(1, model.num_layers // SHARE_OF_LAYERS)
