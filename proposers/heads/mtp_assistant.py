"""Gemma 4's published drafter: a few layers of queries over the keys and values that the target has cached.

The row of x_p takes the embedding of x_p by the target and the state of position p - 1, which is the target's behind
its final norm; for drafted tokens it is the drafter's own, of the row before. All rows of a step stand at the place of
the last committed token and see what the target has cached before it (a place's key enters the cache with its token).
So nothing is stored, and no prompt is followed. In each layer they see the keys of the target's last layer of the same
kind. (Gemma4AssistantForCausalLM and SinglePositionMultiTokenCandidateGenerator of transformers.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernels.cpu.panels import Change, Weight, unpacked
from proposers.base import ProposerContext
from proposers.heads.head_sizes import longest_text
from proposers.heads.mtp_assistant_config import AssistantConfig, read_assistant_config
from proposers.heads.vocabulary_clusters import VocabularyClusters
from proposers.vocabularies.partial import KnownTokens
from runner.engine.attention import Attention, one_of_each_shape
from runner.engine.checkpoint import ModelSource
from runner.engine.decoder import LAYER
from runner.engine.forward_batch import ForwardBatch
from runner.engine.head_checkpoint import fill_head, read_head_tensors
from runner.engine.hidden_states import NORMED
from runner.engine.kv_cache import PagedKVCache
from runner.engine.layers import DecoderLayer
from runner.engine.linear import ColumnParallelLinear, WeightTarget
from runner.engine.loader import LoadedModel
from runner.engine.norms import RMSNorm
from runner.engine.operations import Rows, beside, head_logits
from runner.engine.quantization import Quantization, within
from runner.engine.shard import Shard
from runner.engine.stored_quantization import quantization_of_head

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class MtpAssistantHead:
    tap_layers = (NORMED,)
    known_tokens: KnownTokens | None = None
    logits_softcap: torch.Tensor | None = None
    logits_scale: torch.Tensor | None = None

    def __init__(
        self,
        config: AssistantConfig,
        target: LoadedModel,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        table_name: str,  # of the projection to the vocabulary, in the checkpoint
        quantization: Quantization,  # of other products, by their modules
    ) -> None:
        arch, shard, state_size = config.arch, Shard(), target.model.hidden_size
        self.target, self.max_model_len = target.model, max_model_len
        self.hidden_size, self.state_size = arch.hidden_size, state_size
        self.pre_projection = ColumnParallelLinear(
            2 * state_size,
            {"pre_projection": arch.hidden_size},
            bias=False,
            shard=shard,
            dtype=dtype,
            quantization=quantization,
        )
        self.layers = [
            DecoderLayer(arch, index, shard, dtype, quantization=within(quantization, LAYER.format(index)))
            for index in range(arch.num_layers)
        ]
        self.norm = RMSNorm.of(arch, dtype)
        self.post_projection = ColumnParallelLinear(
            arch.hidden_size,
            {"post_projection": state_size},
            bias=False,
            shard=shard,
            dtype=dtype,
            quantization=quantization,
        )
        self._table_name = table_name
        # With clusters in their order, and looked up: it stays dense.
        self.lm_head: Weight | None = torch.empty(arch.vocab_size, arch.hidden_size, dtype=dtype)
        self.clusters = (
            None
            if config.clusters is None
            else VocabularyClusters(config.clusters, arch.vocab_size, arch.hidden_size, dtype)
        )
        kinds = {layer.attention.rope_key: layer.attention for layer in self.layers}
        self._ropes = {key: own.rope(config.hf_config, max_model_len) for key, own in kinds.items()}

    @property
    def kv_widths(self) -> list[int]:
        return [layer.attention.kv_width for layer in self.layers]

    @property
    def attentions(self) -> list[Attention]:
        return one_of_each_shape(layer.attention for layer in self.layers)

    def project(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def __call__(self, batch: ForwardBatch, hidden: torch.Tensor, cache: PagedKVCache) -> torch.Tensor:
        """cache: the target's."""
        tile = batch.linear_tile
        inputs = beside(self.target.embed(batch.token_ids), hidden[:, : self.state_size])
        residual = self.pre_projection(inputs, tile)
        positions = batch.positions + 1  # a head's row is placed at the position before its token's
        ropes = {key: rope(positions, residual) for key, rope in self._ropes.items()}
        output: Rows | None = None
        below: DecoderLayer | None = None
        for layer in self.layers:
            normed, residual = layer.before_attention(output, residual, below)
            rope = ropes[layer.attention.rope_key]
            output, residual = layer.after_input_norm(normed, residual, rope, batch, cache)
            below = layer
        assert output is not None and below is not None
        normed, _ = below.add_output(output, residual, self.norm)
        return beside(self.post_projection(normed, tile), normed)

    def logits(self, output: torch.Tensor, tile: int | None) -> torch.Tensor:
        normed, weight = output[:, -self.hidden_size :], self.lm_head
        assert weight is not None, "its own"
        if self.clusters is not None:
            return self.clusters.logits(normed, unpacked(weight), tile)
        return head_logits(normed, weight, tile)

    def convert(self, change: Change) -> None:
        for product in (self.pre_projection, self.post_projection):
            product.convert(change)
        for layer in self.layers:
            layer.convert(change)
        if self.clusters is not None:
            self.clusters.convert(change)
        elif self.lm_head is not None:
            self.lm_head = change(self.lm_head)

    def weight_targets(self) -> dict[str, WeightTarget]:
        targets = {"model.norm.weight": self.norm.target}
        for index, layer in enumerate(self.layers):
            targets |= layer.weight_targets(LAYER.format(index))
        for product in (self.pre_projection, self.post_projection):
            targets |= product.weight_targets("")
        assert self.lm_head is not None
        targets[self._table_name] = WeightTarget(view=unpacked(self.lm_head))
        return targets if self.clusters is None else targets | self.clusters.weight_targets()


def load_mtp_assistant(
    source: ModelSource, values: Mapping[str, Any], context: ProposerContext, max_model_len: int | None
) -> MtpAssistantHead:
    """Read the drafter of the context's target; values: of its config.json.

    Raises:
        UserError: another target's, or tensors that are not those of its config.
    """
    target = context.target
    assert target is not None, "heads need the target"
    config = read_assistant_config(source, values, target)
    unread = config.arch.unread
    tensors = {name: tensor for name, tensor in read_head_tensors(source).items() if name not in unread}
    if HEAD in tensors:  # else it is the embedding, which has no other use: tokens are embedded by the target
        tensors.pop(EMBEDDING, None)
    quantization = quantization_of_head(tensors, source, context.device, arch=config.arch, layer=LAYER)
    with torch.device(context.device):
        head = MtpAssistantHead(
            config,
            target,
            max_model_len=longest_text(source, config.hf_config, max_model_len, context.max_model_len),
            dtype=context.dtype,
            table_name=HEAD if HEAD in tensors else EMBEDDING,
            quantization=quantization,
        )
    fill_head(head.weight_targets(), tensors, source, "a drafter over its target's keys and values")
    if head.clusters is not None and head.lm_head is not None:
        head.lm_head = head.clusters.in_order(unpacked(head.lm_head), source)
    return head
