"""Fills a decoder's weights: from a checkpoint, strictly, or at random.

Strict means that every parameter is filled exactly once and every tensor of the checkpoint has a place.
"""

from __future__ import annotations

from typing import Any

import torch

from runner.engine.architecture import Architecture, gate_up_rows
from runner.engine.checkpoint import ModelSource, read_tensors
from runner.engine.decoder import HEAD, Decoder
from runner.engine.errors import UserError, first_of
from runner.engine.expert_stacks import split_stacks
from runner.engine.family import PRE_NORMS
from runner.engine.fused_tensors import split_fused
from runner.engine.head_order import in_our_order
from runner.engine.idle_bias import is_idle_bias
from runner.engine.linear import WeightTarget
from runner.engine.mtp_layout import is_mtp_tensor
from runner.engine.shard import Shard
from runner.engine.weight_filling import draw_weight, fill_quantized, fill_weight


def fill_from_checkpoint(decoder: Decoder, arch: Architecture, config: Any, source: ModelSource, shard: Shard) -> None:
    targets = decoder.weight_targets()
    names = frozenset(targets)
    tied_head = targets.pop(f"{HEAD}.weight", None) if decoder.is_tied else None
    # A module's block is like one of the layers, or has an MLP where all of these have experts, and both norms.
    block_names = {name for layer in decoder.sample_layers for name in layer.weight_targets("")}
    own = (*gate_up_rows("mlp", arch.intermediate_sizes[0]), "mlp.down_proj", PRE_NORMS.before_mlp)
    block_names |= {f"{name}.weight" for name in own}
    unknown, unread = [], arch.unread

    def is_of_module(name: str) -> bool:
        return is_mtp_tensor(name, config, block_names)

    def is_known(name: str) -> bool:
        return name in names or is_of_module(name)

    whole_matrices = split_fused(split_stacks(read_tensors(source), arch.experts), arch.fused_tensors)
    for name, tensor in in_our_order(whole_matrices, arch.head_orders):
        if name.endswith("rotary_emb.inv_freq") or (arch.tie_word_embeddings and name == "lm_head.weight"):
            continue  # derived from the config; a copy of the embedding
        if name in unread:
            continue
        target = targets.pop(name, None)
        if target is not None:
            _copy(target, tensor, name, source, shard)
        elif not is_of_module(name) and not is_idle_bias(name, tensor, is_known):  # method=mtp reads a module's
            unknown.append(name)
    if unknown or targets:
        lines = [f"unexpected: {first_of(unknown)}"] if unknown else []
        lines += [f"missing: {first_of(list(targets))}"] if targets else []
        raise UserError(
            f"{source.name}={source.model}: the tensors do not match its config ({arch.family}, {arch.num_layers} "
            f"layers); {'; '.join(lines)}; download the checkpoint again or mend its config.json"
        )
    if tied_head is not None:
        fill_quantized(tied_head, decoder.tied_rows)


def fill_randomly(decoder: Decoder) -> None:
    """Random weights of the scale that keeps activations finite, the same in every run with as many ranks."""
    whole = torch.Generator(device=decoder.embed_tokens.device).manual_seed(0)  # of what all ranks have alike
    own = torch.Generator(device=decoder.embed_tokens.device).manual_seed(1 + decoder.shard.rank)
    for name, target in decoder.weight_targets().items():  # the embedding before the head
        generator = whole if decoder.shard.size == 1 or target.shard_dim is None else own
        if name == f"{HEAD}.weight" and decoder.is_tied:
            fill_quantized(target, decoder.tied_rows)
        elif "norm" in name or name.endswith(("scale", "layer_scalar")):
            target.view.fill_(1.0)
        else:
            draw_weight(target, generator)


def _copy(target: WeightTarget, tensor: Any, name: str, source: ModelSource, shard: Shard) -> None:
    shape, dim = list(tensor.get_shape()), target.shard_dim
    expected = list(target.shape)
    if dim is not None:
        expected[dim] *= shard.size
    if shape != expected:
        raise UserError(
            f"{source.name}={source.model}: {name} must have shape {expected} by its config.json, got {shape}; "
            "the checkpoint and its config do not belong together"
        )
    part: Any = ...
    if dim is not None and shard.size > 1:
        rows = target.shape[dim]
        part = (*[slice(None)] * dim, slice(shard.rank * rows, (shard.rank + 1) * rows))
    fill_weight(target, tensor, name, source, part=part, shard=shard)
