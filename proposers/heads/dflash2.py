"""DFlash 2's head: DFlash's block with convolutions along it, and a selector that goes through its candidates.

After z-lab's checkpoints and vLLM's Qwen3 DFlash 2. Embeddings and projection are the target's tables unless the head
brings its own; what a target does beside them (Gemma's scale, its soft cap) is not done here, for the head's config
has scales and a cap of its own.
"""

from __future__ import annotations

from typing import Any

import torch

from proposers.base import ProposerContext
from proposers.heads.candidate_selector import CandidateSelector
from proposers.heads.convolved_layer import ConvolvedLayer
from proposers.heads.dflash import fill_block_head
from proposers.heads.dflash2_config import DFlash2Config, read_dflash2_config
from proposers.heads.sequential import SequentialBlockHead
from runner.engine.checkpoint import ModelSource
from runner.engine.linear import WeightTarget
from runner.engine.operations import head_logits, take_rows
from runner.engine.quantization import Quantization


class DFlash2Head(SequentialBlockHead):
    config: DFlash2Config
    sequel: CandidateSelector
    reads_segments = True

    def __init__(self, config: DFlash2Config, *arguments: Any, dtype: torch.dtype, **keys: Any) -> None:
        super().__init__(config, *arguments, dtype=dtype, **keys)
        self.sequel = CandidateSelector(
            num_candidates=config.num_candidates,
            rank=config.selector_rank,
            hidden_size=config.arch.hidden_size,
            vocab_size=config.arch.vocab_size,
            logit_scale=config.logit_scale,
            logit_cap=config.logit_cap,
            dtype=dtype,
        )

    def new_layer(
        self, config: DFlash2Config, index: int, dtype: torch.dtype, quantization: Quantization
    ) -> ConvolvedLayer:
        sizes = {"num_taps": config.num_taps, "group_size": config.group_size}
        return ConvolvedLayer(config.arch, index, dtype, quantization=quantization, **sizes)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        table = self.target.embed_tokens if self.embed_tokens is None else self.embed_tokens
        rows, scale = take_rows(table, token_ids), self.config.embedding_scale
        return rows if scale == 1.0 else rows * scale

    def logits(self, output: torch.Tensor, tile: int | None) -> torch.Tensor:
        if self.lm_head is None:
            return self.target.raw_logits(output, tile)
        return head_logits(output, self.lm_head, tile)

    def weight_targets(self) -> dict[str, WeightTarget]:
        return super().weight_targets() | self.sequel.weight_targets("candidate_selector.")


def load_dflash2_head(
    source: ModelSource,
    context: ProposerContext,
    max_model_len: int | None,
    aux_hidden_state_layer_ids: tuple[int, ...] | None,
) -> DFlash2Head:
    """Read a DFlash 2 head for the context's target; aux_hidden_state_layer_ids overrides what its config says.

    Raises:
        UserError: no such head, another target's, or tensors that are not those of its config.
    """
    assert context.target is not None, "heads need the target"
    config = read_dflash2_config(source, context.target, aux_hidden_state_layer_ids)
    return fill_block_head(DFlash2Head, config, source, context, max_model_len, "a DFlash 2 head")
