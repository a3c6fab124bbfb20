"""Quantized checkpoints, whatever their layout, as numbers of 8 bits or codes of 4 beside scales.

What checkpoints say of activations is left alone: these keep the run's dtype. Of scales of the KV cache see
kv_scales.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kernels.quantized_weight import FP4_GROUP, as_block_scales, block_scales_of, expand, numbers_of
from runner.engine.errors import UserError
from runner.engine.quantization import Storage

# Scales of activations and of the KV cache, and zero points of them.
OF_ATTENTION = (
    *("output_scale", "kv_scale", "prob_output_scale"),
    *(f"{name}_{what}" for name in ("k", "v", "q") for what in ("scale", "zero_point")),
)
LEFT_ALONE = (
    *OF_ATTENTION,
    *("input_scale", "input_scale_ub", "input_zero_point", "act_scale", "activation_scale"),
    *("bias_scale", "input_global_scale"),
)
LARGEST_SCALE = 2.0**7  # of quantized weights: they are hundredths, and what is larger is a scale's reciprocal
SMALLEST_BLOCK_SCALE = 2.0**-24  # float16 holds whole numbers of these
EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "I8", "U8")  # types of quantized weights, as safetensors calls them; and of packed:
WORDS = "I32"
DENSE = ("F64", "F32", "F16", "BF16")  # of weights that are what they seem
AGAIN = "download the checkpoint again"


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Of a weight [out_features, in_features], one to a place, codes too."""

    numbers: Tensor  # [out_features, in_features] int8 or float8_e4m3fn; codes uint8
    scales: Tensor  # [out_features, groups] float32; of an fp4 [out_features, 1]
    zeros: Tensor | None = None  # [out_features, groups] int8, of int4; None: all are the same
    block_scales: Tensor | None = None  # [out_features, in_features / FP4_GROUP] uint8, of fp4

    @classmethod
    def of_fp4(cls, codes: Tensor, block_scales: Tensor, scales: Tensor) -> Numbers:
        """block_scales: as float32, with four bits of significand, below 2; groups with less than 2**-24 become 0."""
        is_zero = block_scales < SMALLEST_BLOCK_SCALE
        return cls(
            numbers=codes.masked_fill(is_zero.repeat_interleave(FP4_GROUP, dim=1), 0),
            scales=scales,
            block_scales=as_block_scales(block_scales.masked_fill(is_zero, 1.0)),
        )

    def rows(self, index: Tensor) -> Numbers:
        zeros, block_scales = (None if part is None else part[index] for part in (self.zeros, self.block_scales))
        return Numbers(numbers=self.numbers[index], scales=self.scales[index], zeros=zeros, block_scales=block_scales)

    def expand(self, storage: Storage) -> Tensor:
        """[out_features, in_features] float32."""
        wide = self.in_8_bits(storage)
        return expand(wide.numbers, wide.scales, storage.group_size or wide.numbers.shape[1])

    def in_8_bits(self, storage: Storage) -> Numbers:
        """The numbers, of codes what they stand for."""
        if not storage.has_codes:
            return self
        numbers = numbers_of(self.numbers, storage.kind, self.zeros, storage.group_size or self.numbers.shape[1])
        scales = self.scales if self.block_scales is None else self.scales * block_scales_of(self.block_scales)
        return Numbers(numbers=numbers, scales=scales)


@dataclass(frozen=True, kw_only=True)
class QuantizedTensor:
    """A weight as a slice of a safetensors file is one: read where it is indexed, and then dense."""

    shape: tuple[int, int]
    storage: Storage
    read: Callable[[], Numbers]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self.read().expand(self.storage)[index]

    def rows(self, index: Tensor) -> QuantizedTensor:
        """Some of its outputs, [num_rows] int64, as a weight of their own."""
        read = self.read
        return replace(self, shape=(len(index), self.shape[1]), read=lambda: read().rows(index))


def require_plain(tensor: Any, name: str, of: str) -> Any:
    """The slice; raises UserError where its numbers cannot be the weights themselves."""
    if name.endswith((".weight", "_proj")) and tensor.get_dtype() not in DENSE:  # _proj: of all experts
        raise UserError(
            f"{of}: {name} must hold weights, got {tensor.get_dtype()} without the scales and the quantization_config "
            f"that would say what they are; {AGAIN}"
        )
    return tensor


def required(parts: Mapping[str, Any], name: str, of: str) -> Any:
    if name not in parts:
        raise UserError(f"{of} lacks its {name}; {AGAIN}")
    return parts[name]


def require_shape(tensor: Any, name: str, shape: tuple[int, ...], of: str) -> None:
    if tuple(tensor.get_shape()) != shape:
        raise UserError(
            f"{of}.{name} must have shape {list(shape)}, as its quantization_config says, got {tensor.get_shape()}; "
            f"{AGAIN}"
        )


def require_scales(scales: Tensor, of: str) -> Tensor:
    """The scales, contiguous.

    Raises:
        UserError: they are none that 8 bits are multiplied by.
    """
    if not scales.isfinite().all() or scales.abs().max() >= LARGEST_SCALE:
        raise UserError(
            f"{of} must have finite scales below {LARGEST_SCALE:.0f}, to multiply its numbers by, got up to "
            f"{scales.abs().max():.4g}; {AGAIN}, or convert it: its scales may be reciprocals"
        )
    return scales.contiguous()
