"""What the heads of EAGLE, EAGLE-3, DFlash and DSpark consist of: decoder layers, and tables that may be the target's.

A head whose checkpoint brings no embedding or no projection uses the target's; one that brings `d2t` projects to a
draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from kernels.cpu.panels import Change, Weight
from proposers.heads.draft_vocabulary import target_ids
from proposers.vocabularies.partial import KnownTokens
from runner.engine.architecture import Architecture
from runner.engine.attention import Attention, one_of_each_shape
from runner.engine.checkpoint import ModelSource
from runner.engine.decoder import constant
from runner.engine.head_checkpoint import HeadTensor
from runner.engine.layers import DecoderLayer
from runner.engine.linear import ColumnParallelLinear, WeightTarget, empty_weight, weight_target
from runner.engine.loader import LoadedModel
from runner.engine.operations import head_logits, scale_rows, take_rows
from runner.engine.quantization import Quantization

EMBEDDING, LM_HEAD, DRAFT_TO_TARGET, TARGET_TO_DRAFT = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
LAYER = "layers.{}."  # before the names of a layer's tensors


class LayeredHead:
    fc: ColumnParallelLinear | None  # of the target's states, or of what else the first layer starts from
    layers: list[DecoderLayer]
    lm_head: Weight | None  # None: the target's
    known_tokens: KnownTokens | None = None  # of the draft vocabulary; None: all of the target's

    def __init__(
        self,
        arch: Architecture,
        target: LoadedModel,
        *,
        draft_vocab_size: int,
        max_model_len: int,
        dtype: torch.dtype,
        own: Collection[str],  # which of EMBEDDING, LM_HEAD and DRAFT_TO_TARGET the head brings
        quantization: Quantization,  # of its own products, by their modules
    ) -> None:
        size = arch.hidden_size
        self.target, self.hidden_size, self.max_model_len = target.model, size, max_model_len
        self.embed_tokens = torch.empty(arch.vocab_size, size, dtype=dtype) if EMBEDDING in own else None
        held = quantization.get("lm_head")
        self.lm_head = empty_weight(draft_vocab_size, size, dtype, held) if LM_HEAD in own else None
        self.draft_to_target = torch.empty(draft_vocab_size, dtype=torch.int64) if DRAFT_TO_TARGET in own else None
        # Of its own table and projection (Gemma); the target's have theirs.
        self.embedding_scale = constant(arch.embedding_scale, dtype)
        self.logits_softcap = constant(arch.logits_softcap)
        self.logits_scale: torch.Tensor | None = None

    @property
    def kv_widths(self) -> list[int]:
        return [layer.attention.kv_width for layer in self.layers]

    @property
    def attentions(self) -> list[Attention]:
        return one_of_each_shape(layer.attention for layer in self.layers)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_rows] int64 -> [num_rows, hidden]."""
        if self.embed_tokens is None:
            return self.target.embed(token_ids)
        rows = take_rows(self.embed_tokens, token_ids)
        return rows if self.embedding_scale is None else scale_rows(rows, self.embedding_scale)

    def logits(self, output: torch.Tensor, tile: int | None) -> torch.Tensor:
        """[num_rows, hidden], num_rows a multiple of tile -> [num_rows, known tokens] float32."""
        if self.lm_head is None:
            return self.target.logits(output, tile)
        return head_logits(output, self.lm_head, tile, self.logits_softcap, scale=self.logits_scale)

    def convert(self, change: Change) -> None:
        for part in (self.fc, *self.layers):
            if part is not None:
                part.convert(change)
        if self.lm_head is not None:
            self.lm_head = change(self.lm_head)

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Of tables and layers; the subclass puts its own before them."""
        own = ((EMBEDDING, self.embed_tokens), (LM_HEAD, self.lm_head), (DRAFT_TO_TARGET, self.draft_to_target))
        targets = {name: weight_target(weight) for name, weight in own if weight is not None}
        for index, layer in enumerate(self.layers):
            targets |= layer.weight_targets(LAYER.format(index))
        return targets

    def find_known_tokens(self, marks: HeadTensor | None, source: ModelSource) -> None:
        """Once d2t is filled. marks: the checkpoint's t2d, if it has one.

        Raises:
            UserError: they lead to no tokens of the target.
        """
        if self.draft_to_target is not None:
            vocab_size = self.target.vocab_size
            ids = target_ids(self.draft_to_target, None if marks is None else marks[...], vocab_size, source)
            self.known_tokens = KnownTokens(ids, vocab_size)
