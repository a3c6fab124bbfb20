"""The order of numbers of 8 bits, and of codes of 4, in the words of a weight that kernels of a GPU read.

A span is what four words hold that lie side by side: four threads take one each to a tensor core. Logic on a whole word
makes operands of it two at a time, from its halves: of 16 bits each, in the order that the instruction wants.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Kind = Literal["int8", "fp8", "int4", "fp4"]  # as QuantizedWeight.kind
INPUTS: Mapping[Kind, int] = {"int8": 16, "fp8": 16, "int4": 32, "fp4": 32}  # of a span
INT8_ZERO = 128  # of the numbers from 0 to 255 that int8 are in words


def num_words(kind: Kind, in_features: int) -> int:
    """Of a row. Behind the last input lie zeros up to the end of the span."""
    return -(-in_features // INPUTS[kind]) * 4


def in_words(spread: Tensor, kind: Kind) -> Tensor:
    """[rows, in_features] as QuantizedWeight.spread gives them -> [rows, words] int32."""
    octets = F.pad(spread.view(torch.uint8), (0, -spread.shape[1] % INPUTS[kind]))
    if kind == "int8":
        found = _int8_in_words(octets ^ INT8_ZERO)
    elif kind == "fp8":
        found = _fp8_in_words(octets)
    else:
        found = _codes_in_words(octets)
    return found.flatten(1).view(torch.int32)


def spread(words: Tensor, kind: Kind, in_features: int) -> Tensor:
    """The other way round."""
    octets = words.view(torch.uint8)
    if kind == "int8":
        return (_int8_of_words(octets)[:, :in_features] ^ INT8_ZERO).view(torch.int8)
    if kind == "fp8":
        return _fp8_of_words(octets)[:, :in_features].contiguous().view(torch.float8_e4m3fn)
    return _codes_of_words(octets)[:, :in_features]


def _int8_in_words(octets: Tensor) -> Tensor:
    """Octet 2 h + v of word w holds input 8 v + 2 w + h of its span."""
    return octets.reshape(len(octets), -1, 2, 4, 2).permute(0, 1, 3, 4, 2)  # v, w, h -> w, h, v


def _int8_of_words(octets: Tensor) -> Tensor:
    return octets.reshape(len(octets), -1, 4, 2, 2).permute(0, 1, 4, 2, 3).flatten(1)


def _fp8_in_words(octets: Tensor) -> Tensor:
    """Half h of word w holds the same two inputs, the bits of v = 0 where a bfloat16 has the like: its sign in bit 15,
    exponent and mantissa from bit 4 up. Of v = 1 the sign is bit 11, the next three bits are those from 12 up, and the
    others the lowest four.
    """
    first, second = octets.reshape(len(octets), -1, 2, 8).unbind(2)
    lower = first << 4 | second & 0x0F
    higher = first & 0x80 | second & 0x70 | (second & 0x80) >> 4 | (first & 0x70) >> 4
    return torch.stack((lower, higher), dim=-1)


def _fp8_of_words(octets: Tensor) -> Tensor:
    lower, higher = octets.reshape(len(octets), -1, 8, 2).unbind(3)
    first = higher & 0x80 | (higher & 0x07) << 4 | lower >> 4
    second = higher & 0x70 | (higher & 0x08) << 4 | lower & 0x0F
    return torch.stack((first, second), dim=2).flatten(1)


def _codes_in_words(codes: Tensor) -> Tensor:
    """Of the four codes in half h of word w the one that lies v above the lowest is of input 8 v + 2 w + h."""
    octets = codes.reshape(len(codes), -1, 2, 2, 4, 2).permute(0, 1, 4, 5, 2, 3)  # spans, words, halves, v in octets
    return octets[..., 0] | octets[..., 1] << 4


def _codes_of_words(octets: Tensor) -> Tensor:
    octets = octets.reshape(len(octets), -1, 4, 2, 2)
    return torch.stack((octets & 15, octets >> 4), dim=-1).permute(0, 1, 4, 5, 2, 3).flatten(1)
