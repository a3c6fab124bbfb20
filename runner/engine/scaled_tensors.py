"""Weights of 8 bits with scales per tensor, output, block or group: `fp8` of DeepSeek, Qwen and AutoFP8, FBGEMM,
compressed-tensors, ModelOpt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernels.quantized_weight import DTYPES, num_groups
from runner.engine.errors import UserError
from runner.engine.quantization import Scheme, Storage
from runner.engine.quantized_tensors import AGAIN, Numbers, QuantizedTensor, require_scales, required


def scaled_tensor(weight: Any, parts: Mapping[str, Any], scheme: Scheme, of: str) -> QuantizedTensor:
    """Numbers of 8 bits [out_features, in_features] beside their scales, by these' kinds in checkpoints."""
    shape = (out_features, in_features) = tuple(weight.get_shape())
    scale = parts.get("weight_scale") or required(parts, "weight_scale_inv", of)
    scale_shape, (rows, columns) = tuple(scale.get_shape()), scheme.block or (1, scheme.storage.group_size)
    groups = num_groups(in_features, columns or in_features)
    is_whole = scale_shape in ((), (1,), (1, 1), (out_features,), (out_features, 1))
    if not is_whole and scale_shape != (-(-out_features // rows), groups):
        raise UserError(
            f"{of}.weight must have a scale per tensor, output, block or group as its quantization_config says, got "
            f"scales of shape {list(scale_shape)} for {list(shape)}; {AGAIN}"
        )

    def read() -> Numbers:
        numbers, scales = weight[...], scale[...].float().reshape(-1, 1 if is_whole else groups)
        if "weight_zero_point" in parts and parts["weight_zero_point"][...].float().any():
            raise UserError(f"{of}.weight must have no zero points; choose a checkpoint quantized symmetrically")
        if numbers.dtype != DTYPES[scheme.storage.kind]:
            raise UserError(f"{of}.weight must hold {DTYPES[scheme.storage.kind]}, got {numbers.dtype}; {AGAIN}")
        if not is_whole:
            scales = scales.repeat_interleave(rows, dim=0)[:out_features]
        return Numbers(numbers=numbers, scales=require_scales(scales.expand(out_features, -1), of))

    group_size = None if is_whole or groups == 1 else columns
    return QuantizedTensor(shape=shape, storage=Storage(kind=scheme.storage.kind, group_size=group_size), read=read)
