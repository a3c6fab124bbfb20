"""poolside's DFlash heads for Laguna: that family's layers over a context that is normed on its way, state by state.

Each tapped state of the target has a norm of its own in front of fc, and each layer reads the context through its input
norm, as it reads a block's rows. (vLLM's and SGLang's DFlashLagunaForCausalLM.)
"""

from __future__ import annotations

from typing import Any

import torch

from proposers.base import ProposerContext
from proposers.heads.dflash import DFlashHead, fill_block_head
from proposers.heads.dflash_config import DFlashConfig, read_dflash_config
from proposers.heads.laguna_dflash_config import read_laguna_layers
from runner.engine.checkpoint import ModelSource
from runner.engine.head_checkpoint import read_head_config
from runner.engine.layers import DecoderLayer
from runner.engine.linear import WeightTarget
from runner.engine.loader import LoadedModel
from runner.engine.norms import RMSNorm
from runner.engine.operations import beside


class LagunaDFlashHead(DFlashHead):
    def __init__(self, config: DFlashConfig, target: LoadedModel, *, dtype: torch.dtype, **keys: Any) -> None:
        super().__init__(config, target, dtype=dtype, **keys)
        self.tap_norms = [RMSNorm.of(config.arch, dtype, target.model.hidden_size) for _ in config.tap_layers]

    def context(self, states: torch.Tensor, tile: int | None) -> torch.Tensor:
        taps = states.chunk(len(self.tap_norms), dim=1)
        return super().context(beside(*(norm(own) for norm, own in zip(self.tap_norms, taps, strict=True))), tile)

    def context_of(self, layer: DecoderLayer, context: torch.Tensor) -> torch.Tensor:
        assert layer.input_norm is not None, "of the family"
        return layer.input_norm(context)

    def weight_targets(self) -> dict[str, WeightTarget]:
        norms = {f"aux_hidden_norms.{at}.weight": norm.target for at, norm in enumerate(self.tap_norms)}
        return norms | super().weight_targets()


def load_laguna_head(
    source: ModelSource,
    context: ProposerContext,
    max_model_len: int | None,
    aux_hidden_state_layer_ids: tuple[int, ...] | None,
) -> LagunaDFlashHead:
    """Read such a head for the context's target; aux_hidden_state_layer_ids overrides what its config says.

    Raises:
        UserError: no such head, another target's, or tensors that are not those of its config.
    """
    assert context.target is not None, "heads need the target"
    values = read_head_config(source)
    config = read_dflash_config(
        source, values, context.target, aux_hidden_state_layer_ids, read_layers=read_laguna_layers
    )
    return fill_block_head(LagunaDFlashHead, config, source, context, max_model_len, "a Laguna DFlash head")
