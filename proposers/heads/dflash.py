"""DFlash's head: one pass over a block of mask tokens, all of which see each other (Chen et al., arXiv 2602.06036).

The block is the pending token and mask tokens behind it, in the target's embeddings. In every layer its keys and values
stand behind those of the context, which no layer below computes: they are projected from hidden_norm(fc(states of the
target)), the same for all layers, without the layer's input norm. The head keeps KV of the context only; that of a
block is scratch. Layouts: z-lab's, Meta's for Muse Glimmer, speculators', whose heads may bring a draft vocabulary, and
DeepSpec's, which bring embeddings and projection and, for Gemma 4, that target's layers; NVIDIA's for Nemotron 3.5,
which bring embeddings. poolside's norm more of the context (proposers/heads/laguna_dflash.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch

from proposers.base import ProposerContext
from proposers.heads.dflash_config import CAP, DFlashConfig, read_dflash_config, require_cap_of_target, with_cap
from proposers.heads.fused_qkv import split_qkv
from proposers.heads.head_sizes import longest_text
from proposers.heads.layered_head import DRAFT_TO_TARGET, EMBEDDING, LAYER, LM_HEAD, TARGET_TO_DRAFT, LayeredHead
from runner.engine.checkpoint import ModelSource, resolve_directory
from runner.engine.errors import UserError
from runner.engine.forward_batch import ForwardBatch
from runner.engine.grouped_query_attention import GroupedQueryAttention
from runner.engine.head_checkpoint import fill_head, read_head_config, read_head_tensors
from runner.engine.head_order import order_of, reordered
from runner.engine.kv_cache import PagedKVCache
from runner.engine.layers import DecoderLayer
from runner.engine.linear import ColumnParallelLinear, WeightTarget
from runner.engine.loader import LoadedModel
from runner.engine.norms import RMSNorm
from runner.engine.operations import Rows
from runner.engine.quantization import Quantization, within
from runner.engine.shard import Shard
from runner.engine.stored_quantization import quantization_of_head

MASK_EMBEDDING = "mask_embedding.pt"
OLDER_PREFIX = "logit_head."  # of what some of SpecForge's have beside a block
SINKS = "attention_sink_bias"
# Of Meta's assistants.
RENAMED = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


class DFlashHead(LayeredHead):
    fc: ColumnParallelLinear
    reads_segments = False  # a layer asks which rows are a block's

    def __init__(
        self,
        config: DFlashConfig,
        target: LoadedModel,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        own: Collection[str],  # which of EMBEDDING, LM_HEAD and DRAFT_TO_TARGET the head brings
        quantization: Quantization,  # as LayeredHead's
    ) -> None:
        arch, shard = config.arch, Shard()
        super().__init__(
            arch,
            target,
            draft_vocab_size=config.draft_vocab_size,
            max_model_len=max_model_len,
            dtype=dtype,
            own=own,
            quantization=quantization,
        )
        self.config = config
        width, tapped = arch.hidden_size, len(config.tap_layers) * target.model.hidden_size
        self.fc = ColumnParallelLinear(
            tapped, {"fc": width}, bias=False, shard=shard, dtype=dtype, quantization=quantization
        )
        self.hidden_norm = RMSNorm.of(arch, dtype)
        self.layers = [
            self.new_layer(config, index, dtype, within(quantization, LAYER.format(index)))
            for index in range(arch.num_layers)
        ]
        for layer, is_causal in zip(self.layers, config.causal_layers, strict=True):
            layer.attention.is_causal = is_causal
        self.norm = RMSNorm.of(arch, dtype)
        self._rope = self.layers[0].attention.rope(config.hf_config, max_model_len)

    def new_layer(self, config: Any, index: int, dtype: torch.dtype, quantization: Quantization) -> DecoderLayer:
        """config: the head's own; quantization: by names within the layer."""
        return DecoderLayer(config.arch, index, Shard(), dtype, quantization=quantization)

    def write_context(self, batch: ForwardBatch, states: torch.Tensor, cache: PagedKVCache) -> None:
        """states: the target's, [num_rows, num_taps * hidden], of the tokens at the launch's positions."""
        context = self.context(states, batch.linear_tile)
        rope = self._rope(batch.positions, context)
        for layer in self.layers:
            attention = layer.attention
            assert isinstance(attention, GroupedQueryAttention), "of its families"
            attention.write_context(self.context_of(layer, context), rope, batch, cache)

    def context(self, states: torch.Tensor, tile: int | None) -> torch.Tensor:
        """[num_rows, num_taps * hidden] of the target -> [num_rows, hidden], the same for all layers."""
        return self.hidden_norm(self.fc(states, tile))

    def context_of(self, layer: DecoderLayer, context: torch.Tensor) -> torch.Tensor:
        """What the layer projects."""
        return context

    def __call__(self, batch: ForwardBatch, hidden: torch.Tensor, cache: PagedKVCache) -> torch.Tensor:
        """hidden: embeddings of blocks [num_rows, hidden] -> [num_rows, hidden], normed, as `logits` takes them."""
        rope = self._rope(batch.positions, hidden)
        output: Rows | None = None
        below: DecoderLayer | None = None
        residual = hidden
        for layer in self.layers:
            output, residual = layer(output, residual, rope, batch, cache, below)
            below = layer
        assert output is not None and below is not None
        return below.add_output(output, residual, self.norm)[0]

    def weight_targets(self) -> dict[str, WeightTarget]:
        norms = {"hidden_norm.weight": self.hidden_norm.target, "norm.weight": self.norm.target}
        return norms | self.fc.weight_targets("") | super().weight_targets()


BlockHead = TypeVar("BlockHead", bound=DFlashHead)


def load_dflash_head(
    source: ModelSource,
    context: ProposerContext,
    max_model_len: int | None,
    aux_hidden_state_layer_ids: tuple[int, ...] | None,
) -> DFlashHead:
    """Read a DFlash head for the context's target; aux_hidden_state_layer_ids overrides what its config says.

    Raises:
        UserError: no such head, another target's, or tensors that are not those of its config.
    """
    assert context.target is not None, "heads need the target"
    values = read_head_config(source)
    block = read_dflash_config(source, values, context.target, aux_hidden_state_layer_ids, kind_keys=(CAP,))
    config = with_cap(block, values, source)
    return fill_block_head(DFlashHead, config, source, context, max_model_len, "a DFlash head")


def fill_block_head(
    head_class: Callable[..., BlockHead],
    config: DFlashConfig,
    source: ModelSource,
    context: ProposerContext,
    max_model_len: int | None,
    what: str,  # that errors call it
) -> BlockHead:
    """The head of this config, built on the context's device and filled from its checkpoint.

    Raises:
        UserError: tensors that are not those of the config, or logits that it caps otherwise than the target whose
            projection it uses.
    """
    target = context.target
    assert target is not None, "heads need the target"
    if not source.is_dummy:
        _require_no_mask_embedding(source)
    tensors = split_qkv({_plain(name): own for name, own in read_head_tensors(source).items()}, config.arch)
    marks = tensors.pop(TARGET_TO_DRAFT, None)
    is_cut = config.draft_vocab_size != target.model.vocab_size
    needed = {LM_HEAD, DRAFT_TO_TARGET} if is_cut else set[str]()
    if source.is_dummy:
        brought = ((EMBEDDING, config.brings_embedding), (LM_HEAD, config.brings_projection))
        own = needed | {name for name, is_brought in brought if is_brought}
    else:
        own = needed | ({EMBEDDING, LM_HEAD, DRAFT_TO_TARGET} & tensors.keys())
    if LM_HEAD not in own:
        require_cap_of_target(config, source, target)
    for name, tensor in tensors.items():
        if (order := order_of(name, tensor.shape[0], config.arch.head_orders)) is not None:
            tensors[name] = reordered(tensor[...], order)
    repeated = config.arch.keys_of_values
    quantization = quantization_of_head(
        tensors, source, context.device, arch=config.arch, layer=LAYER, repeated=repeated
    )
    with torch.device(context.device):
        head = head_class(
            config,
            target,
            max_model_len=longest_text(source, config.hf_config, max_model_len, context.max_model_len),
            dtype=context.dtype,
            own=own,
            quantization=quantization,
        )
    fill_head(head.weight_targets(), tensors, source, what, repeated)
    head.find_known_tokens(marks, source)
    return head


def _plain(name: str) -> str:
    return RENAMED.get(name, name.removeprefix(OLDER_PREFIX)).replace(SINKS, "sinks")


def _require_no_mask_embedding(source: ModelSource) -> None:
    """Raises UserError for a head (MiMo's) whose mask token has an embedding beside the table; vLLM would read it."""
    if (resolve_directory(source, pickles=(MASK_EMBEDDING,)) / MASK_EMBEDDING).is_file():
        raise UserError(
            f"{source.name}={source.model} must take its mask token's embedding from the table of embeddings, got a "
            f"{MASK_EMBEDDING} beside its weights, which is not read here; choose a head without one"
        )
