"""The target drafts for itself: its first layers, its own final norm and head, token by token; all of it verifies.

Self-speculative decoding by an early exit (LayerSkip, Elhoushi et al., arXiv 2404.16710; transformers'
assistant_early_exit; Draft & Verify, arXiv 2309.08168, leaves out layers in between).
"""

from __future__ import annotations

from proposers.base import ProposerContext
from proposers.drafting.self_speculation import SelfSpeculationProposer, require_own_layers
from runner.engine.errors import UserError
from runner.engine.loader import LoadedModel

SHARE_OF_LAYERS = 4  # one of so many drafts: 4 of 16 and 8 of 32, as in transformers' and LayerSkip's own examples


class EarlyExitProposer(SelfSpeculationProposer):
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
        assert context.target is not None, "it drafts with the target"
        self.exit_layer = _exit_layer(exit_layer, context.target)
        super().__init__(
            num_speculative_tokens=num_speculative_tokens,
            context=context,
            draft_sample_method=draft_sample_method,
            num_layers=self.exit_layer,
        )


def _exit_layer(asked: int | None, target: LoadedModel) -> int:
    """How many of the target's layers draft.

    Raises:
        UserError: it has fewer, or none that can draft.
    """
    num_layers = require_own_layers(target, "early_exit", "the first layers").num_layers
    if asked is not None and asked > num_layers:
        raise UserError(
            f"method.exit_layer must be <= {num_layers}, the layers of {target.source.model}, got {asked}; lower it, "
            "or leave it out"
        )
    return asked or max(1, num_layers // SHARE_OF_LAYERS)
