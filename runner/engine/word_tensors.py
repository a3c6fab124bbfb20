"""Weights of 4 or 8 bits in words: compressed-tensors', GPTQ's (arXiv 2210.17323) and AWQ's (arXiv 2306.00978)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.quantized_weight import codes_side_by_side
from runner.engine.errors import UserError
from runner.engine.quantization import Scheme, Storage, storage_of_bits
from runner.engine.quantized_tensors import (
    AGAIN,
    WORDS,
    Numbers,
    QuantizedTensor,
    require_scales,
    require_shape,
    required,
)


def int32_tensor(packed: Any, parts: Mapping[str, Any], scheme: Scheme, of: str) -> QuantizedTensor:
    scale, (out_features, num_words) = required(parts, "weight_scale", of), packed.get_shape()
    zero = parts.get("weight_zero_point")
    _require_words({"weight_packed": packed, "weight_zero_point": packed if zero is None else zero}, of)
    in_features = num_words * 32 // scheme.bits
    if "weight_shape" in parts:  # the last words may be padded
        in_features = int(parts["weight_shape"][...].tolist()[-1])
        scheme = _with_bits(scheme, in_features, num_words, of)
    bits = scheme.bits
    owners = _owners(parts.get("weight_g_idx"), in_features, scheme, of)
    require_shape(scale, "weight_scale", (out_features, owners.groups), of)
    if zero is not None:
        require_shape(zero, "weight_zero_point", (-(-out_features * bits // 32), owners.groups), of)

    def read() -> Fields:
        zeros = None if zero is None else _fields(zero[...].T, bits).T[:out_features]
        return Fields(_fields(packed[...], bits)[:, :in_features], zeros, scale[...])

    return _of_fields((out_features, in_features), scheme, owners, read, of, has_zeros=bits == 4 and zero is not None)


def _with_bits(scheme: Scheme, in_features: int, num_words: int, of: str) -> Scheme:
    """As many bits to a number as the words of a row have room for: modules may differ, and a Scheme is of some."""
    choices = sorted((4, 8), key=lambda bits: bits != scheme.bits)
    bits = next((bits for bits in choices if num_words == -(-in_features * bits // 32)), None)
    if bits is None:
        raise UserError(
            f"{of}.weight_packed must hold {in_features} numbers of 4 or 8 bits in each row, as its weight_shape says, "
            f"got {num_words} words of 32; {AGAIN}"
        )
    return replace(scheme, bits=bits, storage=storage_of_bits(bits, scheme.storage.group_size))


def gptq_tensor(packed: Any, parts: Mapping[str, Any], scheme: Scheme, of: str) -> QuantizedTensor:
    scale, zero = required(parts, "scales", of), required(parts, "qzeros", of)
    _require_words({"qweight": packed, "qzeros": zero}, of)
    (num_words, out_features), bits = packed.get_shape(), scheme.bits
    in_features = num_words * 32 // bits
    owners = _owners(parts.get("g_idx"), in_features, scheme, of)
    require_shape(scale, "scales", (owners.groups, out_features), of)
    require_shape(zero, "qzeros", (owners.groups, -(-out_features * bits // 32)), of)

    def read_zeros() -> Tensor:
        return (_fields(zero[...], bits) + scheme.zero_offset & (1 << bits) - 1).T[:out_features]

    def read() -> Fields:
        return Fields(_fields(packed[...].T, bits), read_zeros(), scale[...].T)

    # Not all that say of themselves to be symmetric are; of 8 bits it does not matter.
    has_zeros = bits == 4 and (scheme.storage.has_zeros or bool((read_zeros() != 1 << bits - 1).any()))
    return _of_fields((out_features, in_features), scheme, owners, read, of, has_zeros=has_zeros)


def awq_tensor(packed: Any, parts: Mapping[str, Any], scheme: Scheme, of: str) -> QuantizedTensor:
    scale, zero = required(parts, "scales", of), required(parts, "qzeros", of)
    _require_words({"qweight": packed, "qzeros": zero}, of)
    in_features, num_words = packed.get_shape()
    owners = _owners(None, in_features, scheme, of)
    require_shape(scale, "scales", (owners.groups, num_words * 8), of)
    require_shape(zero, "qzeros", (owners.groups, num_words), of)

    def read() -> Fields:
        numbers, zeros = (_awq_fields(words[...]).T for words in (packed, zero))
        return Fields(numbers, zeros, scale[...].T)

    return _of_fields((num_words * 8, in_features), scheme, owners, read, of, has_zeros=True)


def _require_words(tensors: Mapping[str, Any], of: str) -> None:
    for name, tensor in tensors.items():
        if tensor.get_dtype() != WORDS:
            raise UserError(f"{of}.{name} must hold words ({WORDS}), got {tensor.get_dtype()}; {AGAIN}")


class Owners(NamedTuple):
    """The groups that inputs belong to."""

    of_inputs: Tensor  # [in_features]
    groups: int
    are_ordered: bool  # not one behind another, but each input to its own


def _owners(stated: Any, in_features: int, scheme: Scheme, of: str) -> Owners:
    """stated: what the checkpoint says of them; below zero it says nothing."""
    size = scheme.storage.group_size or in_features
    plain = torch.arange(in_features) // size
    if stated is None or (owners := stated[...].long()).min() < 0:
        return Owners(plain, int(plain.max()) + 1, are_ordered=False)
    if owners.shape != plain.shape or owners.max() > plain.max():
        raise UserError(
            f"{of} must name one of {int(plain.max()) + 1} groups for each of {in_features} inputs, got "
            f"{len(owners)} of up to {int(owners.max())}; {AGAIN}"
        )
    return Owners(owners, int(owners.max()) + 1, are_ordered=not torch.equal(owners, plain))


class Fields(NamedTuple):
    """What the words of a weight hold, unsigned."""

    numbers: Tensor  # [out_features, in_features] uint8
    zeros: Tensor | None  # [out_features, groups] uint8; None: half of what the bits hold
    scales: Tensor  # [out_features, groups]


def _of_fields(
    shape: tuple[int, int],
    scheme: Scheme,
    owners: Owners,
    read: Callable[[], Fields],
    of: str,
    *,
    has_zeros: bool,
) -> QuantizedTensor:
    """Inputs of groups in any order come as groups of one input, with a scale each."""
    size = scheme.storage.group_size
    group_size = None if size is None or size >= shape[1] else size
    storage = replace(scheme.storage, group_size=group_size, has_zeros=has_zeros)
    if owners.are_ordered:
        storage = Storage(kind="int8", group_size=1)
    storage = storage.of_inputs(shape[1])

    def read_numbers() -> Numbers:
        numbers, zeros, scales = read()
        scales = require_scales((scales[:, owners.of_inputs] if owners.are_ordered else scales).float(), of)
        if storage.has_codes:
            held = zeros.to(torch.int8) if zeros is not None and storage.has_zeros else None
            return Numbers(numbers=numbers, scales=scales, zeros=held)
        offsets = 1 << scheme.bits - 1 if zeros is None else zeros[:, owners.of_inputs].short()
        return Numbers(numbers=_as_int8(numbers.short() - offsets, of), scales=scales)

    return QuantizedTensor(shape=shape, storage=storage, read=read_numbers)


def _fields(words: Tensor, bits: int) -> Tensor:
    """[rows, columns] int32 -> [rows, columns * 32 / bits] uint8, the numbers in each word from its lowest bits up."""
    octets = torch.empty(words.shape, dtype=words.dtype).copy_(words).view(torch.uint8)  # with a row's side by side
    return octets if bits == 8 else codes_side_by_side(octets)


def _awq_fields(words: Tensor) -> Tensor:
    """[rows, columns] int32 -> [rows, 8 * columns] uint8: of each word its nibbles 0, 4, 1, 5, 2, 6, 3 and 7."""
    octets_0213 = words & ~0xFFFF00 | words >> 8 & 0xFF00 | (words & 0xFF00) << 8
    pairs = octets_0213.view(torch.int16)
    return torch.stack((pairs & 0x0F0F, pairs >> 4 & 0x0F0F), dim=2).view(torch.uint8).flatten(1)


def _as_int8(numbers: Tensor, of: str) -> Tensor:
    if numbers.min() < -128 or numbers.max() > 127:
        raise UserError(
            f"{of} must hold numbers that int8 holds, got {numbers.min()} to {numbers.max()}; choose a checkpoint "
            "that is quantized symmetrically, or to 4 bits"
        )
    return numbers.to(torch.int8)
