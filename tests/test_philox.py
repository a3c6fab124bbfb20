"""The noise is the published Philox4x32-10, laid out as the design says, finite, and blind to the batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.reference.philox import (
    Stream,
    fold_seeds,
    gumbel,
    philox4x32,
    random_words,
    seed_to_int64,
    seeds_of,
    uniform,
    words_to_gumbel,
    words_to_uniform,
)

MASK = 0xFFFFFFFF
uint32 = st.integers(0, MASK)


def words_of(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(value, dtype=torch.int64) for value in values)


def philox_in_integers(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """The algorithm as the paper writes it, on Python's unbounded integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123's kat_vectors, philox4x32 10
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert tuple(int(word) for word in philox4x32(*words_of(*counter, *key))) == expected


@given(st.tuples(*[uint32] * 6), st.integers(0, 5))
@settings(max_examples=40)
def test_philox_equals_plain_integers_whichever_word_varies(words: tuple[int, ...], varying: int) -> None:
    """Words may differ in shape: the result has the broadcast shape, whichever of the six inputs carries it."""
    values = [words[varying], 0, MASK, 1 << 31]
    tensors = list(words_of(*words))
    tensors[varying] = torch.tensor(values, dtype=torch.int64)
    result = torch.stack(philox4x32(*tensors), dim=-1)
    for value, row in zip(values, result.tolist(), strict=True):
        inputs = [*words[:varying], value, *words[varying + 1 :]]
        assert tuple(row) == philox_in_integers(tuple(inputs[:4]), tuple(inputs[4:]))


def test_philox_leaves_its_inputs_alone() -> None:
    inputs = [torch.arange(5) + i for i in range(6)]
    copies = [tensor.clone() for tensor in inputs]
    philox4x32(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_entry_v_takes_lane_v_mod_4_of_block_v_div_4_under_the_requests_key(seed: int) -> None:
    position, stream, draft_step = 70_000, Stream.RESIDUAL, 3
    seeds, positions = torch.tensor([seed_to_int64(seed)]), torch.tensor([position])
    lanes = random_words(seeds, positions, stream, draft_step, num_blocks=3)
    noise = gumbel(seeds, positions, stream, draft_step, vocab_size=11)
    for v in range(11):
        words = philox_in_integers((v // 4, position, stream, draft_step), (seed & MASK, seed >> 32))
        assert int(lanes[v % 4][0, v // 4]) == words[v % 4]
        assert noise[0, v] == words_to_gumbel(torch.tensor(words[v % 4])).to(torch.float32)
    words = philox_in_integers((0, position, stream, draft_step), (seed & MASK, seed >> 32))
    assert float(uniform(seeds, positions, stream, draft_step)) == (words[0] + 0.5) / 2**32


def test_stream_ids_are_fixed() -> None:
    """They are part of every result: another number is another text for the same seed."""
    assert {stream.name: int(stream) for stream in Stream} == {
        "TARGET": 0,
        "DRAFT": 1,
        "ACCEPT": 2,
        "RESIDUAL": 3,
        "FOLD": 4,
    }


def test_noise_is_finite_at_both_ends_of_the_words() -> None:
    ends = torch.tensor([0, MASK])
    assert words_to_uniform(ends).tolist() == [0.5 / 2**32, 1.0 - 0.5 / 2**32]
    noise = words_to_gumbel(ends).to(torch.float32)
    assert torch.isfinite(noise).all()
    assert noise.tolist() == pytest.approx([33 * math.log(2), -math.log(33 * math.log(2))], rel=1e-7)


@given(st.lists(uint32, min_size=1, max_size=40))
@settings(max_examples=50)
def test_gumbel_is_the_formula_within_one_float64_ulp(words: list[int]) -> None:
    noise = words_to_gumbel(torch.tensor(words))
    for word, value in zip(words, noise.tolist(), strict=True):
        exact = -math.log(-math.log1p(-(word + 0.5) * 2.0**-32))
        # 2 ulp of the inner logarithm move the outer one by 2 eps in absolute terms.
        assert abs(value - exact) <= 2 * math.ulp(exact) + 4 * math.ulp(1.0)


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 5, 17, 33, 255, 4099])
def test_a_rows_noise_has_the_same_bits_alone_and_anywhere_in_a_batch(vocab_size: int) -> None:
    """A vectorised loop and its scalar tail must round alike (torch's CPU sigmoid, for one, does not)."""
    generator = torch.Generator().manual_seed(vocab_size)
    seeds = torch.randint(-(2**63), 2**63 - 1, (64,), generator=generator)
    positions = torch.randint(0, 2**20, (64,), generator=generator)
    batch = gumbel(seeds, positions, Stream.TARGET, vocab_size=vocab_size)
    for row in range(0, 64, 7):
        one = slice(row, row + 1)
        assert torch.equal(gumbel(seeds[one], positions[one], Stream.TARGET, vocab_size=vocab_size)[0], batch[row])
        assert torch.equal(uniform(seeds[one], positions[one], Stream.ACCEPT)[0], uniform(seeds, positions, 2)[row])
    shuffled = torch.randperm(64, generator=generator)[:37]
    assert torch.equal(gumbel(seeds[shuffled], positions[shuffled], 0, vocab_size=vocab_size), batch[shuffled])
    # A larger vocabulary gives the entries they share the same noise.
    assert torch.equal(gumbel(seeds, positions, 0, vocab_size=vocab_size + 6)[:, :vocab_size], batch)


def test_streams_and_draft_steps_may_differ_by_row() -> None:
    seeds, positions = torch.arange(3), torch.full((3,), 9)
    mixed = gumbel(seeds, positions, torch.tensor([0, 3, 0]), torch.tensor([0, 0, 2]), vocab_size=7)
    for row, (stream, draft_step) in enumerate([(0, 0), (3, 0), (0, 2)]):
        one = slice(row, row + 1)
        assert torch.equal(mixed[one], gumbel(seeds[one], positions[one], stream, draft_step, vocab_size=7))


def test_no_two_keys_share_noise() -> None:
    """Seeds, positions, streams and draft steps that differ in one place, high words included."""
    base = (5, 100, 0, 0)
    keys = [base, (5 + 2**32, 100, 0, 0), (100, 5, 0, 0), (6, 100, 0, 0), (5, 101, 0, 0), (-5, 100, 0, 0)]
    keys += [(5, 100, stream, 0) for stream in (1, 2, 3, 4)] + [(5, 100, 0, step) for step in (1, 2, 100)]
    rows = [
        tuple(torch.cat(random_words(torch.tensor([s]), torch.tensor([p]), t, d, num_blocks=2), dim=1)[0].tolist())
        for s, p, t, d in keys
    ]
    assert len({word for row in rows for word in row}) == 8 * len(keys)


def test_seeds_of_a_run_and_of_siblings_are_all_different() -> None:
    low, high, _, _ = philox_in_integers((7, 0, Stream.FOLD, 0), (3, 0))
    assert seeds_of(3, 8)[7] == high << 32 | low and seeds_of(3, 2) == seeds_of(3, 8)[:2] and seeds_of(3, 0) == []
    batch = fold_seeds(torch.tensor([[3], [-1]]), torch.arange(5))
    assert batch.tolist() == [[seed_to_int64(own) for own in seeds_of(seed, 5)] for seed in (3, 2**64 - 1)]
    runs = {seed: seeds_of(seed, 12) for seed in (0, 1, 2**64 - 1)}
    found = [own for seeds in runs.values() for own in seeds]
    found += [own for seeds in runs.values() for seed in seeds for own in seeds_of(seed, 12)]
    far = fold_seeds(torch.tensor([0, 1, -1])[:, None], torch.tensor([2**32, 2**40])) % 2**62  # of their own, too
    assert len(set(found)) == len(found) == 3 * 12 + 3 * 144 and len(set(far.flatten().tolist())) == 6
    assert all(0 <= seed < 2**64 for seed in found)
