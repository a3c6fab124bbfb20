"""Weights in NVIDIA's FP4, of ModelOpt and compressed-tensors: a float8 scale for 16 inputs, and one more of them all.

Each input is one of 16 numbers (OCP's E2M1), of which kernels take twice as much: whole numbers, so that scales are
halved, and 4 bits hold what was published exactly. What activations were to be rounded to is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernels.quantized_weight import codes_side_by_side
from runner.engine.errors import UserError
from runner.engine.quantization import Scheme
from runner.engine.quantized_tensors import AGAIN, Numbers, QuantizedTensor, require_scales, require_shape, required

UNIT = 2.0**-9  # the smallest float8 above 0, and more than the reciprocal of the largest
OF_ALL, INVERSE_OF_ALL = "weight_scale_2", "weight_global_scale"  # ModelOpt's factor, compressed-tensors' divisor


def nvfp4_tensor(packed: Any, parts: Mapping[str, Any], scheme: Scheme, of: str) -> QuantizedTensor:
    """packed: slice [out_features, in_features / 2] uint8, two codes each, the one in the lower bits first."""
    out_features, in_features = packed.get_shape()[0], 2 * packed.get_shape()[1]
    size, scale = scheme.storage.group_size, required(parts, "weight_scale", of)
    assert size is not None, "of the format"
    if packed.get_dtype() != "U8" or scale.get_dtype() != "F8_E4M3" or in_features % size:
        raise UserError(
            f"{of} must hold bytes (U8) beside float8 scales (F8_E4M3) of {size} inputs each, got "
            f"{packed.get_dtype()} and {scale.get_dtype()} for {in_features} inputs; {AGAIN}"
        )
    require_shape(scale, "weight_scale", (out_features, in_features // size), of)
    whole = parts.get(INVERSE_OF_ALL) or required(parts, OF_ALL, of)

    def read() -> Numbers:
        factor = whole[...].float()
        if factor.numel() != 1:
            raise UserError(f"{of} must have one scale beside those of groups, got {list(factor.shape)}; {AGAIN}")
        factor, block_scales = factor.reshape(()), scale[...].float()
        factor = 1.0 / factor if INVERSE_OF_ALL in parts else factor  # as vLLM takes it
        require_scales(block_scales * factor / 2, of)
        if (block_scales < 0).any():
            raise UserError(f"{of} must have scales of groups of at least 0, got {block_scales.min():.4g}; {AGAIN}")
        factor = factor / 2 / UNIT if block_scales.any() else torch.zeros(())
        scales = factor.expand(len(block_scales), 1).contiguous()
        found = Numbers.of_fp4(codes_side_by_side(packed[...]), block_scales * UNIT, scales)
        return found if storage.has_codes else found.in_8_bits(scheme.storage)

    storage = scheme.storage.of_inputs(in_features)
    return QuantizedTensor(shape=(out_features, in_features), storage=storage, read=read)
