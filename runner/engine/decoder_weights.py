"""Fills a decoder's weights: from a checkpoint, strictly, or at random.

Strict means that every parameter is filled exactly once and every tensor of the checkpoint has a place.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.quantized_weight import ZERO, QuantizedWeight, codes_side_by_side, num_groups, quantize
from runner.engine.architecture import Architecture, gate_up_rows
from runner.engine.checkpoint import ModelSource, read_tensors, require_finite
from runner.engine.decoder import HEAD, Decoder
from runner.engine.errors import UserError, first_of
from runner.engine.expert_stacks import split_stacks
from runner.engine.family import PRE_NORMS
from runner.engine.fused_tensors import split_fused
from runner.engine.head_order import in_our_order
from runner.engine.linear import WeightTarget
from runner.engine.mtp_layout import is_mtp_tensor
from runner.engine.quantization import Storage
from runner.engine.quantized_tensors import Numbers, QuantizedTensor, require_scales
from runner.engine.shard import Shard

STD = 0.02  # of random weights
SOME_BLOCK_SCALES = (168, 184)  # of random weights: octets below 184, which stand for 2**-9 up to almost 2**-7


def fill_from_checkpoint(decoder: Decoder, arch: Architecture, config: Any, source: ModelSource, shard: Shard) -> None:
    targets = decoder.weight_targets()
    names = frozenset(targets)
    tied_head = targets.pop(f"{HEAD}.weight", None) if decoder.is_tied else None
    # A module's block is like one of the layers, or has an MLP where all of these have experts, and both norms.
    block_names = {name for layer in decoder.sample_layers for name in layer.weight_targets("")}
    own = (*gate_up_rows("mlp", arch.intermediate_sizes[0]), "mlp.down_proj", PRE_NORMS.before_mlp)
    block_names |= {f"{name}.weight" for name in own}
    unknown, unread = [], arch.unread
    whole_matrices = split_fused(split_stacks(read_tensors(source), arch.experts), arch.fused_tensors)
    for name, tensor in in_our_order(whole_matrices, arch.head_orders):
        if name.endswith("rotary_emb.inv_freq") or (arch.tie_word_embeddings and name == "lm_head.weight"):
            continue  # derived from the config; a copy of the embedding
        if name in unread:
            continue
        target = targets.pop(name, None)
        of_product = name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in names
        if target is None and of_product and not tensor[...].any():
            continue  # AutoGPTQ gives a bias to every product
        if target is None and is_mtp_tensor(name, config, block_names):
            continue  # method=mtp reads them
        if target is None:
            unknown.append(name)
        else:
            _copy(target, tensor, name, source, shard)
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
        elif target.quantized is None:
            target.view.normal_(std=STD, generator=generator)
        elif target.quantized.has_codes:
            _draw_codes(target.quantized, generator)
        else:
            dense = torch.empty(target.shape, device=target.view.device)
            fill_quantized(target, dense.normal_(std=STD, generator=generator))


def _draw_codes(weight: QuantizedWeight, generator: torch.Generator) -> None:
    """All are as likely. Scales are of 16 bits, as published ones."""
    octets = weight.numbers
    if weight.is_in_words:
        octets = torch.empty(weight.shape[0], weight.shape[1] // 2, dtype=torch.uint8, device=weight.device)
    octets.random_(0, 256, generator=generator)
    if weight.is_in_words:
        weight.hold(codes_side_by_side(octets))
    if weight.block_scales is not None:
        weight.block_scales.random_(*SOME_BLOCK_SCALES, generator=generator)
    if weight.zeros is not None:
        weight.zeros.fill_(ZERO)
    weight.scales.fill_(1.0)
    weight.scales.copy_((STD / weight.rows(slice(64)).exact().std()).bfloat16())


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
        own = slice(shard.rank * rows, (shard.rank + 1) * rows)
        part = own if dim == 0 else (slice(None), own)
    if target.quantized is None:
        target.fill(tensor[part])
        require_finite(target.view, name, source)
    elif isinstance(tensor, QuantizedTensor) and tensor.storage.is_multiplied:
        found = tensor.read() if target.quantized.has_codes else tensor.read().in_8_bits(tensor.storage)
        require_finite(found.numbers[part], name, source)
        _copy_numbers(target.quantized, found, tensor.storage, part, dim, shard)
    else:
        weight = tensor[part].to(target.view.device)
        require_finite(weight, name, source)
        fill_quantized(target, weight)
        require_scales(target.quantized.scales, f"{source.name}={source.model}: {name}")


def _copy_numbers(
    target: QuantizedWeight, found: Numbers, storage: Storage, part: Any, dim: int | None, shard: Shard
) -> None:
    """A rank's part of a quantized matrix, which is cut along dim, as the target holds it."""
    target.hold(found.numbers[part])

    def own(groups: torch.Tensor) -> torch.Tensor:
        """[out_features, groups]"""
        if dim != 1 or shard.size == 1:
            return groups[part]
        if groups.shape[1] == 1:
            return groups
        held = num_groups(target.shape[1], target.group_size)
        repeats = (storage.group_size or 1) // target.group_size  # of groups that ranks halve
        first = shard.rank * held
        return groups.repeat_interleave(repeats, dim=1)[:, first : first + held]

    target.scales.copy_(own(found.scales))
    if target.zeros is not None:  # which matrices that are multiplied with this one may have alone
        target.zeros.copy_(torch.tensor(ZERO) if found.zeros is None else own(found.zeros))
    if found.block_scales is not None and target.block_scales is not None:
        block_scales = own(found.block_scales)
        target.block_scales[:, : block_scales.shape[1]].copy_(block_scales)


def fill_quantized(target: WeightTarget, weight: torch.Tensor) -> None:
    """Of a dense weight [out_features, in_features], quantized output by output."""
    assert target.quantized is not None
    found = quantize(weight, target.quantized.kind)
    target.quantized.hold(found.numbers)
    target.quantized.scales.copy_(found.scales)
