"""Domino's head: DFlash's block, whose logits a GRU over the guessed tokens corrects (SpecForge's Domino)."""

from __future__ import annotations

from typing import Any

import torch

from proposers.base import ProposerContext
from proposers.heads.dflash import fill_block_head
from proposers.heads.domino_config import DominoConfig, read_domino_config
from proposers.heads.prefix_gru import PrefixGru
from proposers.heads.sequential import SequentialBlockHead
from runner.engine.checkpoint import ModelSource
from runner.engine.linear import WeightTarget


class DominoHead(SequentialBlockHead):
    sequel: PrefixGru

    def __init__(self, config: DominoConfig, *arguments: Any, dtype: torch.dtype, **keys: Any) -> None:
        super().__init__(config, *arguments, dtype=dtype, **keys)
        self.sequel = PrefixGru(
            self.embed,
            num_uncorrected=config.num_uncorrected,
            state_size=config.state_size,
            rank=config.rank,
            hidden_size=config.arch.hidden_size,
            vocab_size=config.arch.vocab_size,
            dtype=dtype,
        )

    def weight_targets(self) -> dict[str, WeightTarget]:
        return super().weight_targets() | self.sequel.weight_targets()


def load_domino_head(
    source: ModelSource,
    context: ProposerContext,
    max_model_len: int | None,
    aux_hidden_state_layer_ids: tuple[int, ...] | None,
) -> DominoHead:
    """Read a Domino head for the context's target; aux_hidden_state_layer_ids overrides what its config says.

    Raises:
        UserError: no such head, another target's, or tensors that are not those of its config.
    """
    assert context.target is not None, "heads need the target"
    config = read_domino_config(source, context.target, aux_hidden_state_layer_ids)
    return fill_block_head(DominoHead, config, source, context, max_model_len, "a Domino head")
