"""EAGLE-3's head: a decoder layer over hidden states from several depths of the target (arXiv 2503.01840).

fc takes the tapped states to the head's width; layer 0 attends from [norm(embedding of x_p), norm(state of p - 1)] and
adds to the state; what comes out is fed back as it is and, normed, goes through a head over the draft vocabulary.
P-EAGLE (arXiv 2602.01469) is the same layer trained to draft in one pass: mask tokens with one learned state in place
of what would have been fed back.
How each published layout says so is read by proposers.heads.eagle3_config.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from proposers.base import ProposerContext
from proposers.heads.eagle3_config import Eagle3Config, read_eagle3_config
from proposers.heads.eagle_layer import with_biases_of
from proposers.heads.embeddings import embeddings_of
from proposers.heads.head_sizes import longest_text, require_target_sizes
from proposers.heads.layered_head import DRAFT_TO_TARGET, EMBEDDING, LAYER, LM_HEAD, TARGET_TO_DRAFT, LayeredHead
from runner.engine.backend import runs_kernels
from runner.engine.checkpoint import ModelSource
from runner.engine.forward_batch import ForwardBatch
from runner.engine.head_checkpoint import HeadTensor, fill_head, read_head_config, read_head_tensors
from runner.engine.kv_cache import PagedKVCache
from runner.engine.layers import DecoderLayer
from runner.engine.linear import ColumnParallelLinear, WeightTarget
from runner.engine.loader import LoadedModel
from runner.engine.norm_operations import rms_norm_pair
from runner.engine.norms import RMSNorm
from runner.engine.quantization import Quantization, within
from runner.engine.shard import Shard
from runner.engine.stored_quantization import quantization_of_head

MASK_HIDDEN = "mask_hidden"


class Eagle3Head(LayeredHead):
    def __init__(
        self,
        config: Eagle3Config,
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
        size, num_taps = arch.hidden_size, len(config.tap_layers)
        self.tap_layers = config.tap_layers
        self.norm_before_residual, self.norm_output = config.norm_before_residual, config.norm_output
        tapped = config.target_hidden_size
        self.fc = (
            ColumnParallelLinear(
                num_taps * tapped, {"fc": size}, bias=False, shard=shard, dtype=dtype, quantization=quantization
            )
            if config.has_fc
            else None
        )
        self.input_norm = RMSNorm.of(arch, dtype, num_taps * tapped) if config.norm_before_fc else None
        self.mask_token_id = config.mask_token_id
        self.mask_hidden = torch.empty(num_taps * tapped, dtype=dtype) if config.mask_token_id is not None else None
        self.fc_norms = [RMSNorm.of(arch, dtype, tapped) for _ in range(num_taps)] if config.fc_norm else []
        self.hidden_norm = RMSNorm.of(arch, dtype)
        self.layers = [
            DecoderLayer(
                arch,
                index,
                shard,
                dtype,
                in_features=2 * size if index == 0 else None,
                quantization=within(quantization, LAYER.format(index)),
            )
            for index in range(arch.num_layers)
        ]
        self.norm = RMSNorm.of(arch, dtype)
        self._rope = self.layers[0].attention.rope(config.hf_config, max_model_len)

    def project(self, states: torch.Tensor) -> torch.Tensor:
        if self.fc is None:
            return states
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norms:
            taps = states.chunk(len(self.fc_norms), dim=1)
            states = torch.cat([norm(tap) for norm, tap in zip(self.fc_norms, taps, strict=True)], dim=1)
        # Kernels and packed weights give a row the same bits in any company; others need tiles, and these are none.
        return self.fc(states, 1 if runs_kernels(states) else None)

    def mask_state(self) -> torch.Tensor:
        """[1, H]: what stands for the state before a place whose token is yet to be guessed."""
        assert self.mask_hidden is not None, "a head that drafts in one pass"
        return self.project(self.mask_hidden.unsqueeze(0))

    def __call__(self, batch: ForwardBatch, hidden: torch.Tensor, cache: PagedKVCache) -> torch.Tensor:
        first, *others = self.layers
        assert first.input_norm is not None
        state, rope = hidden[:, : self.hidden_size], self._rope(batch.positions, hidden)
        ids, is_scaled = batch.token_ids, self.embedding_scale is not None
        both = rms_norm_pair(
            *((self.embed(ids), None) if is_scaled else embeddings_of(ids, self.embed_tokens, self.target)),
            state,
            embedding_weight=first.input_norm.weight,
            state_weight=self.hidden_norm.weight,
            eps=self.hidden_norm.eps,
        )
        residual = both[:, self.hidden_size :] if self.norm_before_residual else state
        output, residual = first.after_input_norm(both, residual, rope, batch, cache)
        below = first
        for layer in others:
            output, residual = layer(output, residual, rope, batch, cache, below)
            below = layer
        if self.norm_output:
            return below.add_output(output, residual, self.norm)[0]
        return below.output_beside(output, residual, self.norm)

    def logits(self, output: torch.Tensor, tile: int | None) -> torch.Tensor:
        return super().logits(output[:, -self.hidden_size :], tile)

    def weight_targets(self) -> dict[str, WeightTarget]:
        targets = {
            "norm.weight": self.norm.target,
            "layers.0.hidden_norm.weight": self.hidden_norm.target,
        }
        if self.fc is not None:
            targets |= self.fc.weight_targets("")
        if self.input_norm is not None:
            targets["input_norm.weight"] = self.input_norm.target
        for index, norm in enumerate(self.fc_norms):
            targets[f"fc_norm.{index}.weight"] = norm.target
        if self.mask_hidden is not None:
            targets[MASK_HIDDEN] = WeightTarget(view=self.mask_hidden)
        return targets | super().weight_targets()


def load_eagle3_head(
    source: ModelSource,
    context: ProposerContext,
    max_model_len: int | None,
    aux_hidden_state_layer_ids: tuple[int, ...] | None,
) -> Eagle3Head:
    """Read an EAGLE-3 head for the context's target; aux_hidden_state_layer_ids overrides what its config says.

    Raises:
        UserError: no such head, another target's, or tensors that are not those of its config.
    """
    target = context.target
    assert target is not None, "heads need the target"
    config = read_eagle3_config(source, read_head_config(source), target, aux_hidden_state_layer_ids)
    require_target_sizes(source, target, hidden_size=config.target_hidden_size, vocab_size=config.arch.vocab_size)
    tensors = _read_tensors(source, config)
    marks = tensors.pop(TARGET_TO_DRAFT, None)
    if tensors:
        config = replace(config, arch=with_biases_of(config.arch, tensors))
    repeated = config.arch.keys_of_values
    quantization = quantization_of_head(
        tensors, source, context.device, arch=config.arch, layer=LAYER, repeated=repeated
    )
    with torch.device(context.device):
        head = Eagle3Head(
            config,
            target,
            max_model_len=longest_text(source, config.hf_config, max_model_len, context.max_model_len),
            dtype=context.dtype,
            own=_own_tensors(config, {EMBEDDING, LM_HEAD} if source.is_dummy and config.brings_ends else tensors),
            quantization=quantization,
        )
    fill_head(head.weight_targets(), tensors, source, "an EAGLE-3 head", repeated)
    head.find_known_tokens(marks, source)
    return head


def _read_tensors(source: ModelSource, config: Eagle3Config) -> dict[str, HeadTensor]:
    """Tensors by speculators' names; SafeAILab calls the first layer midlayer, NeMo writes `model.` before them."""
    tensors = dict[str, HeadTensor]()
    has_one_vocabulary = config.draft_vocab_size == config.arch.vocab_size
    for written, tensor in read_head_tensors(source).items():
        name = written.removeprefix("model.")
        if name.endswith("rotary_emb.inv_freq") or (has_one_vocabulary and name in (DRAFT_TO_TARGET, TARGET_TO_DRAFT)):
            continue  # derived from the config; zeros that map nothing
        own_name = name.removeprefix("midlayer.")
        # The mask's state is published with leading dimensions of one.
        tensors[name if own_name == name else f"layers.0.{own_name}"] = (
            tensor[...].flatten() if name == MASK_HIDDEN else tensor
        )
    return tensors


def _own_tensors(config: Eagle3Config, tensors: Collection[str]) -> set[str]:
    """What the head must bring because the target has none that fits, and what it brings all the same."""
    is_other_size = config.arch.hidden_size != config.target_hidden_size
    is_other_vocabulary = config.draft_vocab_size != config.arch.vocab_size
    is_needed = {
        EMBEDDING: is_other_size,
        LM_HEAD: is_other_size or is_other_vocabulary,
        DRAFT_TO_TARGET: is_other_vocabulary,
    }
    return {name for name, needed in is_needed.items() if needed or name in tensors}
