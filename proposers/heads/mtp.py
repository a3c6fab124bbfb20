"""An MTP module as a draft head: its forward in every published layout, and how it is built for a target.

The row of x_p takes the embedding of x_p and the state of position p - 1, which is the target's behind its final norm,
or for drafted tokens the module's own output. Embedding and head are the target's, or the module's where its copies
differ. Every row has its embedding, as in training; vLLM's modules see zeros for that of x_1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kernels.cpu.panels import Change, Weight
from proposers.base import ProposerContext
from proposers.heads.embeddings import embeddings_of
from proposers.heads.head_sizes import longest_text
from proposers.heads.mtp_block import MtpBlock, OwnBlock, TransformersBlock, block_architecture
from proposers.heads.mtp_checkpoint import MtpTensors, describe_module, read_module
from proposers.vocabularies.partial import KnownTokens
from runner.engine.architecture import Architecture
from runner.engine.attention import Attention
from runner.engine.checkpoint import ModelSource
from runner.engine.decoder import Decoder
from runner.engine.errors import UserError
from runner.engine.forward_batch import ForwardBatch
from runner.engine.head_checkpoint import fill_head
from runner.engine.hidden_states import NORMED
from runner.engine.kv_cache import PagedKVCache
from runner.engine.layer_kinds import FULL, SLIDING
from runner.engine.layers import DecoderLayer
from runner.engine.linear import ColumnParallelLinear, WeightTarget, empty_weight, weight_target
from runner.engine.loader import LoadedModel
from runner.engine.norm_operations import rms_norm_pair
from runner.engine.norms import RMSNorm
from runner.engine.operations import head_logits
from runner.engine.quantization import Quantization, within
from runner.engine.shard import Shard
from runner.engine.stored_quantization import quantization_of_head
from runner.engine.transformers_model import TransformersModel


class MtpHead:
    tap_layers = (NORMED,)
    known_tokens: KnownTokens | None = None

    def __init__(
        self,
        found: MtpTensors,
        block: MtpBlock,
        target: LoadedModel,
        *,
        rms_norm_eps: float,
        norms_add_one: bool,  # to their weights
        max_model_len: int,
        dtype: torch.dtype,
        quantization: Quantization,  # of what is not the block's, by modules
    ) -> None:
        layout, size, vocab_size = found.layout, target.model.hidden_size, target.model.vocab_size
        self.layout, self.block, self.target, self.max_model_len = layout, block, target.model, max_model_len
        norm = partial(RMSNorm, size, rms_norm_eps, dtype, adds_one=norms_add_one)
        self.token_norm, self.hidden_norm = norm(), norm()
        self.projection = ColumnParallelLinear(
            2 * size,
            {layout.projection.format(index=0): size},
            bias=False,
            shard=Shard(),
            dtype=dtype,
            quantization=within(quantization, found.prefix),
        )
        if layout.final_norm is None:
            assert isinstance(target.model, Decoder), "others were refused"
            self.final_norm = target.model.norm
        else:
            self.final_norm = norm()
        self.embed_tokens = torch.empty(vocab_size, size, dtype=dtype) if found.own_embedding else None
        held = quantization.get(found.own_head.removesuffix(".weight"))
        self.lm_head: Weight | None = empty_weight(vocab_size, size, dtype, held) if found.own_head else None
        # Of the target's head, where lm_head becomes a copy of it (proposers/heads/quantized.py).
        self.logits_softcap: torch.Tensor | None = None
        self.logits_scale: torch.Tensor | None = None
        self._names = found

    @property
    def kv_widths(self) -> list[int]:
        return [self.block.kv_width]

    @property
    def layers(self) -> Sequence[DecoderLayer]:
        return self.block.layers

    @property
    def attentions(self) -> Sequence[Attention]:
        return self.block.attentions

    def project(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def __call__(self, batch: ForwardBatch, hidden: torch.Tensor, cache: PagedKVCache) -> torch.Tensor:
        both = rms_norm_pair(
            *embeddings_of(batch.token_ids, self.embed_tokens, self.target),
            hidden,
            embedding_weight=self.token_norm.weight,
            state_weight=self.hidden_norm.weight,
            eps=self.hidden_norm.eps,
            states_first=self.layout.is_hidden_first,
        )
        return self.block(self.projection(both, batch.linear_tile), batch, cache, self.final_norm)

    def logits(self, output: torch.Tensor, tile: int | None) -> torch.Tensor:
        if self.lm_head is None:
            return self.target.logits(output, tile)
        return head_logits(output, self.lm_head, tile, self.logits_softcap, scale=self.logits_scale)

    def convert(self, change: Change) -> None:
        self.projection.convert(change)
        self.block.convert(change)
        if self.lm_head is not None:
            self.lm_head = change(self.lm_head)

    def weight_targets(self) -> dict[str, WeightTarget]:
        layout, prefix = self.layout, self._names.prefix
        norms = {
            layout.token_norm: self.token_norm,
            layout.hidden_norm: self.hidden_norm,
            layout.final_norm: self.final_norm,
        }
        targets = {
            f"{prefix}{name.format(index=0)}.weight": norm.target for name, norm in norms.items() if name is not None
        }
        if self.embed_tokens is not None:
            targets[self._names.own_embedding] = WeightTarget(view=self.embed_tokens)
        if self.lm_head is not None:
            targets[self._names.own_head] = weight_target(self.lm_head)
        return targets | self.projection.weight_targets(prefix) | self.block.weight_targets(self._names.block_prefix)


def load_mtp_head(source: ModelSource, context: ProposerContext, max_model_len: int | None) -> MtpHead:
    """Read the MTP module of the context's target, from its own checkpoint or from a directory of the module's.

    Raises:
        UserError: no module there, another target's, or tensors that are not those of its config.
    """
    target = context.target
    assert target is not None, "heads need the target"
    module = describe_module(source, target)
    found = read_module(source, module, target)
    length = longest_text(source, module.config, max_model_len, context.max_model_len)
    name = f"{source.name}={source.model}"
    arch: Architecture | None = None
    if module.arch is not None:
        has_mlp = found.layout.has_mlp or getattr(module.config, "mtp_mlp_layer_types", None) == ["dense"]
        arch = block_architecture(
            replace(module.arch, experts=None) if has_mlp else module.arch,
            module.config,
            _kind(module.config, found.layout.attends, name),
        )
    quantization = quantization_of_head(found.tensors, source, context.device, arch=arch, layer=found.block_prefix)
    block: MtpBlock
    if arch is not None:
        block = OwnBlock(
            arch,
            module.config,
            max_model_len=length,
            dtype=context.dtype,
            device=context.device,
            name=name,
            quantization=within(quantization, found.block_prefix),
        )
    else:
        assert isinstance(target.model, TransformersModel), "another target's block was refused"
        with torch.device(context.device):
            block = TransformersBlock(target.model, name)
    with torch.device(context.device):
        eps = float(module.config.rms_norm_eps) if module.arch is None else module.arch.rms_norm_eps
        head = MtpHead(
            found,
            block,
            target,
            rms_norm_eps=eps,
            norms_add_one=module.arch is not None and module.arch.norms_add_one,
            max_model_len=length,
            dtype=context.dtype,
            quantization=quantization,
        )
    fill_head(head.weight_targets(), found.tensors, source, f"an MTP module in {found.layout.title} layout")
    return head


def _kind(config: Any, attends: str, name: str) -> str | None:
    """Of layer_types, what a module attends to; None: where layers of the target differ, to all.

    Raises:
        UserError: the config states a kind that there is not.
    """
    if attends == "to all":
        return None
    stated = getattr(config, "mtp_layer_types", None)
    kinds = stated or ([SLIDING] if attends == "to a window" else config.layer_types)
    if not isinstance(kinds, list) or kinds[0] not in (SLIDING, FULL):
        raise UserError(
            f"{name}: mtp_layer_types must be a list of {SLIDING} and {FULL}, got {stated!r}; mend its config"
        )
    return str(kinds[0])
