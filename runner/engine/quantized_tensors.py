"""Quantized checkpoints, whatever their layout, as numbers of 8 bits beside scales.

Layouts: FP8 and INT8 with scales per tensor, output or block (`fp8` of DeepSeek, Qwen and AutoFP8, compressed-tensors,
ModelOpt), numbers of 4 or 8 bits in words of compressed-tensors, GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978).
What they say of activations and of the KV cache is left alone: these keep the run's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.quantized_weight import expand, num_groups
from runner.engine.errors import UserError
from runner.engine.quantization import Scheme, Storage

# Scales of activations and of the KV cache, and zero points of them.
LEFT_ALONE = (
    *("input_scale", "input_scale_ub", "input_zero_point", "act_scale", "output_scale", "kv_scale"),
    *(f"{name}_{what}" for name in ("k", "v", "q") for what in ("scale", "zero_point")),
    *("prob_output_scale", "bias_scale"),
)
AWQ_SHIFTS = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of each of a word's columns
LARGEST_SCALE = 2.0**7  # of what 8 bits hold: weights are hundredths, and what is larger is a scale's reciprocal
EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "I8", "U8")  # types of quantized weights, as safetensors calls them; and of packed:
WORDS = "I32"

Numbers = tuple[Tensor, Tensor]  # [out_features, in_features] of 8 bits, scales [out_features, groups] float32


@dataclass(frozen=True, kw_only=True)
class QuantizedTensor:
    """A weight as a slice of a safetensors file is one: read where it is indexed, and then dense."""

    shape: tuple[int, int]
    storage: Storage
    read: Callable[[], Numbers]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        numbers, scales = self.read()
        return expand(numbers, scales, self.storage.group_size or self.shape[1])[index]


def unpack_tensors(slices: Mapping[str, Any], scheme: Scheme, of: str) -> Iterator[tuple[str, Any]]:
    """(name, slice) of every tensor: a quantized weight under the name that it would have dense, the rest as it is."""
    make, main, beside = {
        "scaled": (_scaled, "weight", ("weight_scale", "weight_scale_inv", "weight_zero_point")),
        "int32": (_int32, "weight_packed", ("weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")),
        "gptq": (_gptq, "qweight", ("scales", "qzeros", "g_idx")),
        "awq": (_awq, "qweight", ("scales", "qzeros")),
    }[scheme.packing]
    for name, tensor in slices.items():
        module, _, kind = name.rpartition(".")
        if kind in LEFT_ALONE:
            continue
        if kind in beside and f"{module}.{main}" in slices:
            continue  # read with the weight
        parts = {other: slices[f"{module}.{other}"] for other in beside if f"{module}.{other}" in slices}
        if kind == main and (parts or main != "weight"):
            yield f"{module}.weight", make(tensor, parts, scheme, f"{of}: {module}")
        else:
            yield name, require_plain(tensor, name, of)


def require_plain(tensor: Any, name: str, of: str) -> Any:
    """The slice; raises UserError where its numbers cannot be the weights themselves."""
    if name.endswith((".weight", "_proj")) and tensor.get_dtype() in EIGHT_BITS:  # the latter of all experts
        raise UserError(
            f"{of}: {name} must hold weights, got {tensor.get_dtype()} without the scales and the quantization_config "
            f"that would say what they are; {AGAIN}"
        )
    return tensor


def _scaled(weight: Any, parts: Mapping[str, Any], scheme: Scheme, of: str) -> QuantizedTensor:
    shape = (out_features, in_features) = tuple(weight.get_shape())
    scale = parts.get("weight_scale") or _required(parts, "weight_scale_inv", of)
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
        if numbers.dtype != scheme.storage.dtype:
            raise UserError(f"{of}.weight must hold {scheme.storage.dtype}, got {numbers.dtype}; {AGAIN}")
        if not is_whole:
            scales = scales.repeat_interleave(rows, dim=0)[:out_features]
        return numbers, require_scales(scales.expand(out_features, -1), of)

    group_size = None if is_whole or groups == 1 else columns
    return QuantizedTensor(shape=shape, storage=Storage(dtype=scheme.storage.dtype, group_size=group_size), read=read)


def _int32(packed: Any, parts: Mapping[str, Any], scheme: Scheme, of: str) -> QuantizedTensor:
    scale, (out_features, num_words) = _required(parts, "weight_scale", of), packed.get_shape()
    in_features = num_words * 32 // scheme.bits
    if "weight_shape" in parts:  # the last words may be padded
        in_features = min(in_features, int(parts["weight_shape"][...].tolist()[-1]))
    owners, ordered = _owners(parts.get("weight_g_idx"), in_features, scheme, of)
    groups, half = int(owners.max()) + 1, 1 << scheme.bits - 1
    _require_shape(scale, "weight_scale", (out_features, groups), of)
    if "weight_zero_point" in parts:
        words = -(-out_features * scheme.bits // 32)
        _require_shape(parts["weight_zero_point"], "weight_zero_point", (words, groups), of)

    def read() -> Numbers:
        numbers = _fields(packed[...], scheme.bits)[:, :in_features] - half
        if "weight_zero_point" in parts:
            zeros = _fields(parts["weight_zero_point"][...].T, scheme.bits).T[:out_features]
            numbers -= (zeros - half)[:, owners]
        scales = scale[...].float()
        return _as_int8(numbers, of), require_scales(scales[:, owners] if ordered else scales, of)

    return _of_groups((out_features, in_features), scheme, read, ordered=ordered)


def _gptq(packed: Any, parts: Mapping[str, Any], scheme: Scheme, of: str) -> QuantizedTensor:
    scale, zero = _required(parts, "scales", of), _required(parts, "qzeros", of)
    num_words, out_features = packed.get_shape()
    shape = (out_features, num_words * 32 // scheme.bits)
    owners, ordered = _owners(parts.get("g_idx"), shape[1], scheme, of)
    groups = int(owners.max()) + 1
    _require_shape(scale, "scales", (groups, out_features), of)
    _require_shape(zero, "qzeros", (groups, -(-out_features * scheme.bits // 32)), of)

    def read() -> Numbers:
        numbers = _fields(packed[...].T, scheme.bits)
        zeros = (_fields(zero[...], scheme.bits) + scheme.zero_offset & (1 << scheme.bits) - 1).T[:out_features]
        scales = scale[...].float().T
        return _as_int8(numbers - zeros[:, owners], of), require_scales(scales[:, owners] if ordered else scales, of)

    return _of_groups(shape, scheme, read, ordered=ordered)


def _awq(packed: Any, parts: Mapping[str, Any], scheme: Scheme, of: str) -> QuantizedTensor:
    scale, zero = _required(parts, "scales", of), _required(parts, "qzeros", of)
    in_features, num_words = packed.get_shape()
    owners, _ = _owners(None, in_features, scheme, of)
    shape, groups = (num_words * 8, in_features), int(owners.max()) + 1
    _require_shape(scale, "scales", (groups, shape[0]), of)
    _require_shape(zero, "qzeros", (groups, num_words), of)

    def read() -> Numbers:
        numbers, zeros = (_fields(words[...], 4, AWQ_SHIFTS).T for words in (packed, zero))
        return _as_int8(numbers - zeros[:, owners], of), require_scales(scale[...].float().T, of)

    return _of_groups(shape, scheme, read)


AGAIN = "download the checkpoint again"


def _required(parts: Mapping[str, Any], name: str, of: str) -> Any:
    if name not in parts:
        raise UserError(f"{of} lacks its {name}; {AGAIN}")
    return parts[name]


def _require_shape(tensor: Any, name: str, shape: tuple[int, ...], of: str) -> None:
    if tuple(tensor.get_shape()) != shape:
        raise UserError(
            f"{of}.{name} must have shape {list(shape)}, as its quantization_config says, got {tensor.get_shape()}; "
            f"{AGAIN}"
        )


def _owners(stated: Any, in_features: int, scheme: Scheme, of: str) -> tuple[Tensor, bool]:
    """[in_features], the group of each input, and whether they belong to groups in another order than their own.

    stated: what the checkpoint says of them; below zero it says nothing.
    """
    size = scheme.storage.group_size or in_features
    plain = torch.arange(in_features) // size
    if stated is None or (owners := stated[...].long()).min() < 0:
        return plain, False
    if owners.shape != plain.shape or owners.max() > plain.max():
        raise UserError(
            f"{of} must name one of {int(plain.max()) + 1} groups for each of {in_features} inputs, got "
            f"{len(owners)} of up to {int(owners.max())}; {AGAIN}"
        )
    return owners, not torch.equal(owners, plain)


def _of_groups(
    shape: tuple[int, int], scheme: Scheme, read: Callable[[], Numbers], *, ordered: bool = False
) -> QuantizedTensor:
    """ordered: inputs belong to groups in any order; as groups of one input they come with a scale each."""
    size = scheme.storage.group_size
    group_size = 1 if ordered else None if size is None or size >= shape[1] else size
    return QuantizedTensor(shape=shape, storage=Storage(dtype=torch.int8, group_size=group_size), read=read)


def _fields(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[rows, columns] int32 -> [rows, columns * 32 / bits] int32, the numbers in each word from its lowest bits up."""
    shifts = torch.tensor(order or range(32 // bits), dtype=torch.int32) * bits
    return (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(1)


def _as_int8(numbers: Tensor, of: str) -> Tensor:
    if numbers.min() < -128 or numbers.max() > 127:
        raise UserError(
            f"{of} must hold numbers that int8 holds, got {numbers.min()} to {numbers.max()}; choose a checkpoint "
            "that is quantized symmetrically, or to 4 bits"
        )
    return numbers.to(torch.int8)


def require_scales(scales: Tensor, of: str) -> Tensor:
    """The scales, contiguous.

    Raises:
        UserError: they are none that 8 bits are multiplied by.
    """
    if not scales.isfinite().all() or scales.abs().max() >= LARGEST_SCALE:
        raise UserError(
            f"{of} must have finite scales below {LARGEST_SCALE:.0f}, to multiply numbers of 8 bits by, got up to "
            f"{scales.abs().max():.4g}; {AGAIN}, or convert it: its scales may be reciprocals"
        )
    return scales.contiguous()
