"""Fills one weight of a model or a draft head: with a checkpoint's tensor, dense or quantized, or at random."""

from __future__ import annotations

from typing import Any

import torch

from kernels.quantized_weight import ZERO, QuantizedWeight, codes_side_by_side, num_groups, quantize
from runner.engine.checkpoint import ModelSource, require_finite
from runner.engine.linear import WeightTarget
from runner.engine.quantization import Storage
from runner.engine.quantized_tensors import Numbers, QuantizedTensor, require_scales
from runner.engine.shard import Shard

STD = 0.02  # of random weights
SOME_BLOCK_SCALES = (168, 184)  # of random weights: octets from 168 to 183, for 2**-9 up to almost 2**-7


def fill_weight(
    target: WeightTarget,
    tensor: Any,  # a safetensors slice, a QuantizedTensor or a tensor
    name: str,
    source: ModelSource,
    *,
    part: Any = ...,  # of the tensor, which has the target's shape
    shard: Shard | None = None,  # whose part it is; None: it is the whole
) -> None:
    """
    Raises:
        UserError: numbers or scales that are not finite, or scales that no kernel multiplies by.
    """
    if target.quantized is None:
        target.fill(tensor[part])
        require_finite(target.view, name, source)
    elif isinstance(tensor, QuantizedTensor) and tensor.storage.is_multiplied:
        found = tensor.read() if target.quantized.has_codes else tensor.read().in_8_bits(tensor.storage)
        require_finite(found.numbers[part], name, source)
        _copy_numbers(target.quantized, found, tensor.storage, part, target.shard_dim, shard or Shard())
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
        repeats = (storage.group_size or 1) // target.group_size  # split_inputs may have halved groups
        first = shard.rank * held
        return groups.repeat_interleave(repeats, dim=1)[:, first : first + held]

    target.scales.copy_(own(found.scales))
    if target.zeros is not None:  # this matrix may have none, where one that is multiplied with it has some
        target.zeros.copy_(torch.tensor(ZERO) if found.zeros is None else own(found.zeros))
    if found.block_scales is not None and target.block_scales is not None:
        block_scales = own(found.block_scales)
        target.block_scales[:, : block_scales.shape[1]].copy_(block_scales)


def fill_quantized(target: WeightTarget, weight: torch.Tensor) -> None:
    """With a dense weight [out_features, in_features], which is quantized output by output."""
    assert target.quantized is not None
    _hold(target.quantized, weight)


def _hold(target: QuantizedWeight, weight: torch.Tensor) -> None:
    found = quantize(weight, target.kind)
    target.hold(found.numbers)
    target.scales.copy_(found.scales)


def draw_weight(target: WeightTarget, generator: torch.Generator) -> None:
    """Random numbers with a standard deviation of STD: normal ones, or codes that are all as likely."""
    weight = target.quantized
    if weight is None:
        target.view.normal_(std=STD, generator=generator)
    elif weight.has_codes:
        _draw_codes(weight, generator)
    else:
        dense = torch.empty(weight.shape, device=weight.device)
        _hold(weight, dense.normal_(std=STD, generator=generator))


def _draw_codes(weight: QuantizedWeight, generator: torch.Generator) -> None:
    """Scales are of 16 bits, as published ones."""
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
