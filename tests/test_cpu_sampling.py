"""What samples on a CPU, compiled: the definitions' words, noise, cuts and tokens, and a row's own bits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu import perturb as perturbing
from kernels.cpu import sampling as drawing
from kernels.cpu import truncation
from kernels.cpu.perturb import perturb
from kernels.cpu.philox import gumbel_of, log, random_words
from kernels.cpu.recording import Pool, recording
from kernels.cpu.sampling import SPLIT, greedy, sample
from kernels.cpu.truncation import truncate
from kernels.reference import sampling as reference
from kernels.reference.philox import gumbel, words_to_gumbel
from kernels.reference.philox import random_words as reference_words

SEEDS = st.integers(-(2**63), 2**63 - 1)


@pytest.fixture(params=["one thread", "three threads"], autouse=True)
def _threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    if request.param == "three threads":
        torch.set_num_threads(3)
        monkeypatch.setattr(drawing, "PART_COLUMNS", 1)
        monkeypatch.setattr(drawing, "GREEDY_PART_COLUMNS", 1)
        monkeypatch.setattr(perturbing, "PART_COLUMNS", 1)
        monkeypatch.setattr(truncation, "PART_COLUMNS", 1)
    yield
    torch.set_num_threads(before)


def random_rows(num_rows: int, vocab_size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, seeds and positions."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    return logits, seeds, torch.randint(0, 2**31, (num_rows,), generator=generator)


@given(st.integers(0, 40_000), st.integers(0, 2**31 - 1), st.integers(0, 4), st.integers(0, 2**31 - 1), SEEDS)
def test_words_are_the_definitions(block: int, position: int, stream: int, draft_step: int, seed: int) -> None:
    lanes = reference_words(torch.tensor([seed]), torch.tensor([position]), stream, draft_step, num_blocks=block + 1)
    numbers = [np.uint64(number % 2**64) for number in (block, position, stream, draft_step, seed)]
    assert [int(word) for word in random_words(*numbers)] == [int(lane[0, block]) for lane in lanes]


@given(st.floats(2.0**-1000, 2.0**1000))
def test_logarithms_are_right_to_two_ulp(x: float) -> None:
    assert abs(float(log(x)) - math.log(x)) <= 2 * math.ulp(math.log(x))


def test_noise_is_finite_and_the_definitions_float32_but_for_ties_of_the_rounding() -> None:
    ends = torch.tensor([0, 1, 2, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1])
    expected = words_to_gumbel(ends).float().tolist()
    assert [float(gumbel_of(np.uint64(word))) for word in ends.tolist()] == expected
    _, seeds, positions = random_rows(8, 1)
    found = perturb(torch.zeros(8, 50_000), seeds, positions, stream=1)
    wanted = gumbel(seeds, positions, 1, vocab_size=50_000)
    assert bool(found.isfinite().all()) and int((found != wanted).sum()) <= 1
    assert torch.allclose(found, wanted, rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("vocab_size", [1, 5, 64, 257, SPLIT, SPLIT + 1])
def test_tokens_are_the_definitions(vocab_size: int) -> None:
    logits, seeds, positions = random_rows(7, vocab_size)
    assert torch.equal(sample(logits, seeds, positions, stream=2), reference.gumbel_argmax(logits, seeds, positions, 2))
    assert torch.equal(greedy(logits, positions), reference.greedy_argmax(logits))
    is_greedy, temperatures = torch.arange(7) % 3 == 0, 0.5 + torch.arange(7.0) / 4
    draft_steps = torch.arange(7) * 11
    drawn = reference.gumbel_argmax(logits / temperatures.unsqueeze(1), seeds, positions, 1, draft_steps)
    expected = torch.where(is_greedy, reference.greedy_argmax(logits), drawn)
    options: dict[str, Any] = {"is_greedy": is_greedy, "temperatures": temperatures, "draft_steps": draft_steps}
    assert torch.equal(sample(logits, seeds, positions, stream=1, **options), expected)
    apart = torch.cat((logits, logits), dim=1)[:, :vocab_size]
    assert torch.equal(sample(apart, seeds, positions, stream=1, **options), expected), "rows any distance apart"
    positions[2] = -1
    assert sample(logits, seeds, positions, stream=1)[2] == greedy(logits, positions)[2] == -1, "padding"


@given(st.lists(st.sampled_from([-1.0, -0.0, 0.0, 2.5, float("-inf")]), min_size=1, max_size=9))
def test_ties_go_to_the_lowest_token(row: list[float]) -> None:
    """Signed zeros are equal; and tokens need not be in the order of their columns."""
    logits, positions = torch.tensor([row]), torch.zeros(1, dtype=torch.int64)
    assert int(greedy(logits, positions)) == int(reference.greedy_argmax(logits))
    tokens = torch.arange(len(row)).flip(0).contiguous() * 7
    best = [int(token) for token, value in zip(tokens, row, strict=True) if value == max(row)]
    assert int(greedy(logits, positions, tokens)) == min(best)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_nan_comes_first_whatever_its_sign(sign: float) -> None:
    """x86 makes negative ones. Steps in parts ask torch's max for the argmax, so whole ones must say the same."""
    logits = torch.tensor([[1.0, 5.0, 2.0, 3.0]]).repeat(2, 1)
    logits[0, 2:] = math.copysign(math.nan, sign)
    positions = torch.zeros(2, dtype=torch.int64)
    assert greedy(logits, positions).tolist() == reference.greedy_argmax(logits).tolist() == [2, 1]


def test_a_part_of_the_vocabulary_has_the_noise_of_its_tokens() -> None:
    logits, seeds, positions = random_rows(5, 700)
    tokens = torch.randperm(700, generator=torch.Generator().manual_seed(1))[:300].sort().values
    whole = torch.full_like(logits, float("-inf")).index_copy_(1, tokens, logits[:, tokens])
    part = logits[:, tokens].contiguous()
    assert torch.equal(
        sample(part, seeds, positions, stream=0, token_ids=tokens), sample(whole, seeds, positions, stream=0)
    )
    perturbed = perturb(logits, seeds, positions, torch.zeros_like(seeds), stream=0)
    assert torch.equal(perturb(part, seeds, positions, stream=0, token_ids=tokens), perturbed[:, tokens])
    assert torch.equal(perturbed.argmax(dim=1), sample(logits, seeds, positions, stream=0)), "the noise of the draws"


@pytest.mark.parametrize("vocab_size", [5, 300, SPLIT + 3])
def test_a_row_has_the_same_bits_alone_and_in_any_company(vocab_size: int) -> None:
    logits, seeds, positions = random_rows(9, vocab_size)
    noisy = perturb(logits, seeds, positions, stream=1)
    top_p = torch.full((9,), 0.7, dtype=torch.float64)
    cut = truncate(logits, top_p=top_p)
    for row in range(9):
        own = slice(row, row + 1)
        assert torch.equal(perturb(logits[own], seeds[own], positions[own], stream=1), noisy[own])
        assert torch.equal(truncate(logits[own], top_p=top_p[own]), cut[own])


@st.composite
def cut_rows(draw: st.DrawFn) -> tuple[Tensor, dict[str, Tensor]]:
    """Rows of ties, of close values, of masked tokens; any mixture of cuts, off values among them."""
    num_rows, vocab_size = draw(st.integers(1, 4)), draw(st.integers(1, 24))
    values = [
        st.integers(-12, 12).map(lambda x: x / 2),
        st.floats(-30, 30, width=32),
        st.one_of(st.just(float("-inf")), st.integers(-3, 3).map(float), st.just(-0.0)),
    ]
    row = st.lists(draw(st.sampled_from(values)), min_size=vocab_size, max_size=vocab_size)
    logits = torch.tensor(draw(st.lists(row, min_size=num_rows, max_size=num_rows)), dtype=torch.float32)
    logits[:, draw(st.integers(0, vocab_size - 1))] = draw(st.floats(-3, 3, width=32))  # something is allowed

    def column(strategy: st.SearchStrategy[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(draw(st.lists(strategy, min_size=num_rows, max_size=num_rows)), dtype=dtype)

    return logits, {
        "temperatures": column(st.floats(0.25, 4, width=32), torch.float32),
        "min_p": column(st.one_of(st.just(0.0), st.floats(2.0**-10, 1, width=32)), torch.float32),
        "top_k": column(st.integers(-1, vocab_size + 3), torch.int64),
        "top_p": column(st.one_of(st.sampled_from([1e-9, 1 - 1e-6, 1.0]), st.floats(0.01, 1)), torch.float64),
    }


def truncated_by_reference(logits: Tensor, values: dict[str, Tensor]) -> Tensor:
    logits = reference.apply_min_p(logits / values["temperatures"].unsqueeze(1), values["min_p"])
    logits = reference.apply_top_k(logits, values["top_k"], max_top_k=logits.shape[1])
    return reference.apply_top_p(logits, values["top_p"])


@given(cut_rows())
def test_cuts_keep_what_the_definition_keeps(case: tuple[Tensor, dict[str, Tensor]]) -> None:
    logits, values = case
    assert torch.equal(truncate(logits, **values), truncated_by_reference(logits, values))
    is_greedy = torch.ones(len(logits), dtype=torch.bool)
    assert torch.equal(truncate(logits, is_greedy=is_greedy, **values), logits), "greedy rows stay as they are"


def test_cuts_of_long_rows_and_rows_made_to_mislead_are_the_definitions() -> None:
    """Every magnitude, neighbours in float32, signed zeros, and tails that a sum in float32 would cut elsewhere."""
    width = 9001
    octaves = 2.0 ** -torch.arange(0.0, 75)
    neighbours = (torch.tensor(1.0).view(torch.int32) + torch.arange(width, dtype=torch.int32)).view(torch.float32)
    tail = math.log(1e-9) - torch.arange(width - 1) * 2.0**-18
    rows = torch.stack(
        [
            torch.cat([octaves, -octaves, octaves * 1e30, torch.full((width - 225,), -3.0)]),
            neighbours,
            neighbours * 8,
            torch.cat([torch.tensor([math.log(0.9)]), tail]),
            torch.tensor([-0.0, 0.0, 1.0]).repeat(3001)[:width],
        ]
    )
    for top_p in (1e-12, 0.37, 1 - 5e-6, 1.0):
        for top_k in (0, 1, 40, 8999):
            values = {
                "temperatures": torch.ones(5),
                "min_p": torch.tensor([0.0, 0.5, 0.0, 0.0, 0.3]),
                "top_k": torch.full((5,), top_k),
                "top_p": torch.full((5,), top_p, dtype=torch.float64),
            }
            assert torch.equal(truncate(rows, **values), truncated_by_reference(rows, values)), (top_p, top_k)


def test_nobody_has_no_tokens_and_a_recording_draws_what_a_call_draws() -> None:
    nobody, nothing = torch.empty(0, dtype=torch.int64), torch.empty(0, 7)
    assert sample(nothing, nobody, nobody, stream=0).shape == greedy(nothing, nobody).shape == (0,)
    assert truncate(nothing).shape == perturb(nothing, nobody, nobody, stream=0).shape == (0, 7)
    logits, seeds, positions = random_rows(5, 500)
    top_k = torch.full((5,), 9)
    with recording(Pool()) as recorded:
        drawn = sample(truncate(logits, top_k=top_k), seeds, positions, stream=0)
    program = recorded.program()
    for seed in range(3):
        logits.copy_(random_rows(5, 500, seed)[0])
        program()
        assert torch.equal(drawn, sample(truncate(logits, top_k=top_k), seeds, positions, stream=0))


def test_rows_that_are_all_one_are_drawn_from_as_copies_of_it() -> None:
    """Which lie no distance apart."""
    row, seeds, positions = random_rows(3, 2 * SPLIT + 5)
    shared, copies = row[:1].expand(3, -1), row[:1].repeat(3, 1)
    assert torch.equal(greedy(shared, positions), greedy(copies, positions))
    for draw in (sample, perturb):
        assert torch.equal(draw(shared, seeds, positions, stream=1), draw(copies, seeds, positions, stream=1))
