"""EAGLE's head: decoder layers that continue the target's last hidden states (arXiv 2401.15077, 2406.16858).

The input of position p is fc(embedding of x_p beside the state of position p - 1); the output stands for the state of
position p, so it goes through the target's own head and is fed back. Layouts: SafeAILab's repositories, config of a
Llama with `bias` and tensors embed_tokens, fc, layers.*, of which layer 0 has no input_layernorm; and vLLM's, whose
config holds the former as `model`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from proposers.base import ProposerContext
from proposers.heads.eagle_layer import eagle_architecture, with_biases_of
from proposers.heads.head_sizes import longest_text, require_target_sizes
from proposers.heads.layered_head import EMBEDDING, LAYER, LM_HEAD, LayeredHead
from runner.engine.architecture import Architecture
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.forward_batch import ForwardBatch
from runner.engine.head_checkpoint import fill_head, read_head_config, read_head_tensors
from runner.engine.hidden_states import NORMED
from runner.engine.kv_cache import PagedKVCache
from runner.engine.layers import DecoderLayer
from runner.engine.linear import ColumnParallelLinear, WeightTarget
from runner.engine.loader import LoadedModel
from runner.engine.operations import Rows, add, beside
from runner.engine.quantization import Quantization, within
from runner.engine.shard import Shard
from runner.engine.stored_quantization import quantization_of_head


class EagleHead(LayeredHead):
    fc: ColumnParallelLinear
    tap_layers = (NORMED,)

    def __init__(
        self,
        arch: Architecture,
        hf_config: Any,
        target: LoadedModel,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        has_bias: bool,  # of fc
        own: Collection[str],  # which of EMBEDDING and LM_HEAD the head brings
        quantization: Quantization,  # as LayeredHead's
    ) -> None:
        super().__init__(
            arch,
            target,
            draft_vocab_size=arch.vocab_size,
            max_model_len=max_model_len,
            dtype=dtype,
            own=own,
            quantization=quantization,
        )
        shard, size = Shard(), arch.hidden_size
        self.fc = ColumnParallelLinear(
            2 * size, {"fc": size}, bias=has_bias, shard=shard, dtype=dtype, quantization=quantization
        )
        self.layers = [
            DecoderLayer(
                arch,
                index,
                shard,
                dtype,
                has_input_norm=index > 0,
                quantization=within(quantization, LAYER.format(index)),
            )
            for index in range(arch.num_layers)
        ]
        self._rope = self.layers[0].attention.rope(hf_config, max_model_len)

    def project(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def __call__(self, batch: ForwardBatch, hidden: torch.Tensor, cache: PagedKVCache) -> torch.Tensor:
        residual = self.fc(beside(self.embed(batch.token_ids), hidden), batch.linear_tile)
        rope = self._rope(batch.positions, residual)
        output: Rows | None = None
        for layer in self.layers:
            output, residual = layer(output, residual, rope, batch, cache)
        assert output is not None
        return add(output, residual)

    def weight_targets(self) -> dict[str, WeightTarget]:
        return self.fc.weight_targets("") | super().weight_targets()


def load_eagle_head(source: ModelSource, context: ProposerContext, max_model_len: int | None) -> EagleHead:
    """Read an EAGLE head for the context's target.

    Raises:
        UserError: no such head, another target's, or tensors that are not those of its config.
    """
    assert context.target is not None, "heads need the target"
    values = read_head_config(source)
    nested = values.get("model")
    values = dict(nested) if isinstance(nested, Mapping) else values
    if "draft_vocab_size" in values or "speculators_model_type" in values or "ttt_length" in values:
        raise UserError(
            f"{source.name}={source.model} must be an EAGLE head, and its config.json is an EAGLE-3 head's; "
            "set method.method=eagle3"
        )
    arch, config = eagle_architecture(values, source)
    require_target_sizes(source, context.target, hidden_size=arch.hidden_size, vocab_size=arch.vocab_size)
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in read_head_tensors(source).items()
        if not name.endswith("rotary_emb.inv_freq")  # derived from the config
    }
    arch = with_biases_of(arch, tensors) if tensors else arch
    quantization = quantization_of_head(tensors, source, context.device, arch=arch, layer=LAYER)
    with torch.device(context.device):
        head = EagleHead(
            arch,
            config,
            context.target,
            max_model_len=longest_text(source, config, max_model_len, context.max_model_len),
            dtype=context.dtype,
            has_bias=bool(values.get("bias", "fc.bias" in tensors)),
            own={EMBEDDING, LM_HEAD} & tensors.keys(),
            quantization=quantization,
        )
    fill_head(head.weight_targets(), tensors, source, "an EAGLE head")
    return head
