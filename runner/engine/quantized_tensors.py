"""Quantized checkpoints, whatever their layout, as numbers of 8 bits or codes of 4 beside scales.

Layouts: FP8 and INT8 with scales per tensor, output or block (`fp8` of DeepSeek, Qwen and AutoFP8, compressed-tensors,
ModelOpt), numbers of 4 or 8 bits in words of compressed-tensors, GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978).
What they say of activations and of the KV cache is left alone: these keep the run's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.quantized_weight import codes_side_by_side, expand, num_groups, numbers_of
from runner.engine.errors import UserError
from runner.engine.quantization import Scheme, Storage, storage_of_bits

# Scales of activations and of the KV cache, and zero points of them.
LEFT_ALONE = (
    *("input_scale", "input_scale_ub", "input_zero_point", "act_scale", "activation_scale", "output_scale", "kv_scale"),
    *(f"{name}_{what}" for name in ("k", "v", "q") for what in ("scale", "zero_point")),
    *("prob_output_scale", "bias_scale"),
)
LARGEST_SCALE = 2.0**7  # of quantized weights: they are hundredths, and what is larger is a scale's reciprocal
EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "I8", "U8")  # types of quantized weights, as safetensors calls them; and of packed:
WORDS = "I32"


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Of a weight [out_features, in_features], one to a place, codes too."""

    numbers: Tensor  # [out_features, in_features] int8 or float8_e4m3fn; codes uint8
    scales: Tensor  # [out_features, groups] float32
    zeros: Tensor | None = None  # [out_features, groups] int8, of int4; None: all are the same

    def rows(self, index: Tensor) -> Numbers:
        zeros = None if self.zeros is None else self.zeros[index]
        return Numbers(numbers=self.numbers[index], scales=self.scales[index], zeros=zeros)

    def expand(self, storage: Storage) -> Tensor:
        """[out_features, in_features] float32."""
        in_features = self.numbers.shape[1]
        return expand(self.in_8_bits(storage), self.scales, storage.group_size or in_features)

    def in_8_bits(self, storage: Storage) -> Tensor:
        """The numbers, of codes what they stand for."""
        if storage.code is None:
            return self.numbers
        return numbers_of(self.numbers, storage.code, self.zeros, storage.group_size or self.numbers.shape[1])


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


def unpack_tensors(slices: Mapping[str, Any], scheme: Scheme, of: str) -> Iterator[tuple[str, Any]]:
    """(name, slice) of every tensor: a quantized weight under the name that it would have dense, the rest as it is."""
    make, main, beside = {
        "scaled": (scaled_tensor, "weight", ("weight_scale", "weight_scale_inv", "weight_zero_point")),
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


def scaled_tensor(weight: Any, parts: Mapping[str, Any], scheme: Scheme, of: str) -> QuantizedTensor:
    """Numbers of 8 bits [out_features, in_features] beside their scales, by these' kinds in checkpoints."""
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
        return Numbers(numbers=numbers, scales=require_scales(scales.expand(out_features, -1), of))

    group_size = None if is_whole or groups == 1 else columns
    return QuantizedTensor(shape=shape, storage=Storage(dtype=scheme.storage.dtype, group_size=group_size), read=read)


def _int32(packed: Any, parts: Mapping[str, Any], scheme: Scheme, of: str) -> QuantizedTensor:
    scale, (out_features, num_words) = _required(parts, "weight_scale", of), packed.get_shape()
    zero = parts.get("weight_zero_point")
    _require_words({"weight_packed": packed, "weight_zero_point": packed if zero is None else zero}, of)
    in_features = num_words * 32 // scheme.bits
    if "weight_shape" in parts:  # the last words may be padded
        in_features = int(parts["weight_shape"][...].tolist()[-1])
        scheme = _with_bits(scheme, in_features, num_words, of)
    bits = scheme.bits
    owners = _owners(parts.get("weight_g_idx"), in_features, scheme, of)
    _require_shape(scale, "weight_scale", (out_features, owners.groups), of)
    if zero is not None:
        _require_shape(zero, "weight_zero_point", (-(-out_features * bits // 32), owners.groups), of)

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


def _gptq(packed: Any, parts: Mapping[str, Any], scheme: Scheme, of: str) -> QuantizedTensor:
    scale, zero = _required(parts, "scales", of), _required(parts, "qzeros", of)
    _require_words({"qweight": packed, "qzeros": zero}, of)
    (num_words, out_features), bits = packed.get_shape(), scheme.bits
    in_features = num_words * 32 // bits
    owners = _owners(parts.get("g_idx"), in_features, scheme, of)
    _require_shape(scale, "scales", (owners.groups, out_features), of)
    _require_shape(zero, "qzeros", (owners.groups, -(-out_features * bits // 32)), of)

    def read_zeros() -> Tensor:
        return (_fields(zero[...], bits) + scheme.zero_offset & (1 << bits) - 1).T[:out_features]

    def read() -> Fields:
        return Fields(_fields(packed[...].T, bits), read_zeros(), scale[...].T)

    # Not all that say of themselves to be symmetric are; of 8 bits it does not matter.
    has_zeros = bits == 4 and (scheme.storage.has_zeros or bool((read_zeros() != 1 << bits - 1).any()))
    return _of_fields((out_features, in_features), scheme, owners, read, of, has_zeros=has_zeros)


def _awq(packed: Any, parts: Mapping[str, Any], scheme: Scheme, of: str) -> QuantizedTensor:
    scale, zero = _required(parts, "scales", of), _required(parts, "qzeros", of)
    _require_words({"qweight": packed, "qzeros": zero}, of)
    in_features, num_words = packed.get_shape()
    owners = _owners(None, in_features, scheme, of)
    _require_shape(scale, "scales", (owners.groups, num_words * 8), of)
    _require_shape(zero, "qzeros", (owners.groups, num_words), of)

    def read() -> Fields:
        numbers, zeros = (_awq_fields(words[...]).T for words in (packed, zero))
        return Fields(numbers, zeros, scale[...].T)

    return _of_fields((num_words * 8, in_features), scheme, owners, read, of, has_zeros=True)


AGAIN = "download the checkpoint again"


def _required(parts: Mapping[str, Any], name: str, of: str) -> Any:
    if name not in parts:
        raise UserError(f"{of} lacks its {name}; {AGAIN}")
    return parts[name]


def _require_words(tensors: Mapping[str, Any], of: str) -> None:
    for name, tensor in tensors.items():
        if tensor.get_dtype() != WORDS:
            raise UserError(f"{of}.{name} must hold words ({WORDS}), got {tensor.get_dtype()}; {AGAIN}")


def _require_shape(tensor: Any, name: str, shape: tuple[int, ...], of: str) -> None:
    if tuple(tensor.get_shape()) != shape:
        raise UserError(
            f"{of}.{name} must have shape {list(shape)}, as its quantization_config says, got {tensor.get_shape()}; "
            f"{AGAIN}"
        )


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
        storage = Storage(dtype=torch.int8, group_size=1)
    storage = storage.of_inputs(shape[1])

    def read_numbers() -> Numbers:
        numbers, zeros, scales = read()
        scales = require_scales((scales[:, owners.of_inputs] if owners.are_ordered else scales).float(), of)
        if storage.code is not None:
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
