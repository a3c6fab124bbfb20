"""Words hold every number where kernels of a GPU look for it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels import words
from kernels.quantized_weight import DTYPES
from kernels.words import INPUTS, Kind

KINDS: list[Kind] = ["int8", "fp8", "int4", "fp4"]


def random_octets(kind: Kind, *shape: int, seed: int = 0) -> Tensor:
    """As QuantizedWeight.spread gives them, whatever they stand for."""
    generator = torch.Generator().manual_seed(seed)
    largest = 16 if DTYPES[kind] == torch.uint8 else 256
    return torch.randint(0, largest, shape, generator=generator, dtype=torch.uint8).view(DTYPES[kind])


@given(kind=st.sampled_from(KINDS), num_rows=st.integers(1, 3), in_features=st.integers(1, 100), seed=st.integers(0, 9))
def test_words_give_back_what_they_hold(kind: Kind, num_rows: int, in_features: int, seed: int) -> None:
    spread = random_octets(kind, num_rows, in_features, seed=seed)
    packed = words.in_words(spread, kind)
    assert packed.dtype == torch.int32 and packed.shape == (num_rows, words.num_words(kind, in_features))
    found = words.spread(packed, kind, in_features)
    assert found.dtype == spread.dtype and torch.equal(found.view(torch.uint8), spread.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_a_span_is_packed_by_itself_and_zeros_lie_behind_the_last_input(kind: Kind) -> None:
    inputs = INPUTS[kind]
    spread = random_octets(kind, 3, 4 * inputs)
    packed = words.in_words(spread, kind)
    assert torch.equal(words.in_words(spread[:, inputs : 2 * inputs], kind), packed[:, 4:8])
    padded = words.spread(words.in_words(spread[:, : inputs + 1], kind), kind, 2 * inputs)
    assert not padded[:, inputs + 1 :].view(torch.uint8).any()


def test_a_word_holds_neighbours_codes_in_its_halves() -> None:
    codes = random_octets("fp4", 3, 96)
    for word, value in enumerate(words.in_words(codes, "fp4")[2].tolist()):
        span, own = codes[2, word // 4 * 32 :], 2 * (word % 4)
        for v in range(4):
            assert value >> 4 * v & 0x000F000F == span[8 * v + own] + (span[8 * v + own + 1].int() << 16)


def pairs_of_spans(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """[16 n] -> what the halves of the n * 4 words hold first, and second, both [4 n, 2]."""
    spans = numbers.float().view(-1, 2, 4, 2)
    return spans[:, 0].reshape(-1, 2), spans[:, 1].reshape(-1, 2)


def halves(values: Tensor) -> Tensor:
    """[n] int32 -> [n, 2] bfloat16 of their bits, the lower half first."""
    return values.view(torch.int16).view(torch.bfloat16).view(-1, 2)


def test_a_half_counts_an_int8_in_units_of_the_smallest_bfloat16() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.int8)
    packed = words.in_words(numbers[None], "int8")[0]
    for values, expected in zip((packed, packed >> 8), pairs_of_spans(numbers), strict=True):
        units = halves(values & 0x00FF00FF).float() / 2.0**-133
        assert torch.equal(units - words.INT8_ZERO, expected)


def test_a_half_has_the_bits_of_an_fp8_where_a_bfloat16_has_them() -> None:
    octets = torch.arange(256, dtype=torch.uint8)
    octets[octets & 0x7F == 0x7F] = 0  # which is no number
    numbers = octets.view(torch.float8_e4m3fn)
    packed = words.in_words(numbers[None], "fp8")[0]
    mask = -0x780F7810  # 0x87F087F0: a sign, four bits of exponent and three of mantissa
    second = (packed << 4) & -0x7F0F7F10 | (packed >> 4) & 0x07000700
    for values, expected in zip((packed & mask, second), pairs_of_spans(numbers), strict=True):
        assert torch.equal(halves(values) * 2.0**120, expected.bfloat16())
