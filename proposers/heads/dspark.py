"""DSpark's head: DFlash's block, whose logits a sequential head goes through (Cheng et al., arXiv 2607.05147).

Read from the layouts of DeepSpec, which brings embeddings and projection, and of speculators, which shares the
target's. The confidence head is read and set aside: it is to say how much of a block is worth verifying, which here
goes by the load (`num_speculative_tokens_per_batch_size`), and changes no guess.
"""

from __future__ import annotations

from typing import Any

import torch

from proposers.base import ProposerContext
from proposers.heads.dflash import fill_block_head
from proposers.heads.dspark_config import DSparkConfig, read_dspark_config
from proposers.heads.markov import MarkovHead
from proposers.heads.sequential import SequentialBlockHead
from runner.engine.checkpoint import ModelSource
from runner.engine.linear import WeightTarget
from runner.engine.quantization import Quantization, within

MARKOV = "markov_head."  # before the names of the sequential head's tensors


class DSparkHead(SequentialBlockHead):
    sequel: MarkovHead

    def __init__(
        self,
        config: DSparkConfig,
        *arguments: Any,
        dtype: torch.dtype,
        quantization: Quantization,
        **keys: Any,
    ) -> None:
        super().__init__(config, *arguments, dtype=dtype, quantization=quantization, **keys)
        self.sequel = MarkovHead(
            config.markov_head_type,
            rank=config.markov_rank,
            hidden_size=config.arch.hidden_size,
            vocab_size=config.arch.vocab_size,
            draft_vocab_size=config.draft_vocab_size,
            dtype=dtype,
            quantization=within(quantization, MARKOV),
        )
        # Of the confidence head: a weight for each part of its input, and one more.
        self.confidence: torch.Tensor | None = None
        if config.has_confidence_head:
            width = config.arch.hidden_size + config.markov_rank * config.confidence_head_with_markov
            self.confidence = torch.empty(width + 1, dtype=dtype)

    def weight_targets(self) -> dict[str, WeightTarget]:
        targets = super().weight_targets() | self.sequel.weight_targets(MARKOV)
        if self.confidence is not None:
            targets["confidence_head.proj.weight"] = WeightTarget(view=self.confidence[:-1].unsqueeze(0))
            targets["confidence_head.proj.bias"] = WeightTarget(view=self.confidence[-1:])
        return targets


def load_dspark_head(
    source: ModelSource,
    context: ProposerContext,
    max_model_len: int | None,
    aux_hidden_state_layer_ids: tuple[int, ...] | None,
) -> DSparkHead:
    """Read a DSpark head for the context's target; aux_hidden_state_layer_ids overrides what its config says.

    Raises:
        UserError: no such head, another target's, or tensors that are not those of its config.
    """
    assert context.target is not None, "heads need the target"
    config = read_dspark_config(source, context.target, aux_hidden_state_layer_ids)
    return fill_block_head(DSparkHead, config, source, context, max_model_len, "a DSpark head")
