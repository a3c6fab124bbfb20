"""The noise inside Triton kernels is the reference's: words to the bit, variates to the stated bound."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import pytest
import torch

from kernels.cpu.uniforms import uniforms as on_cpu
from kernels.reference.philox import Stream, gumbel, random_words, uniforms, words_to_gumbel, words_to_uniform

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
ops = pytest.importorskip("kernels.philox")
by_kernel = pytest.importorskip("kernels.uniforms").uniforms

MASK = 0xFFFFFFFF
BOUND = 2.0**-22


@triton.jit
def store_words(words_ptr, seeds_ptr, positions_ptr, draft_steps_ptr, blocks_ptr, streams_ptr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    seed, position, stream = tl.load(seeds_ptr + row), tl.load(positions_ptr + row), tl.load(streams_ptr + row)
    entries = tl.arange(0, BLOCK)
    blocks = tl.load(blocks_ptr + entries).to(tl.int32)
    a, b, c, d = ops.random_words(seed, position, stream, tl.load(draft_steps_ptr + row), blocks)
    tl.store(words_ptr + (row * 4 + 0) * BLOCK + entries, a.to(tl.int64))
    tl.store(words_ptr + (row * 4 + 1) * BLOCK + entries, b.to(tl.int64))
    tl.store(words_ptr + (row * 4 + 2) * BLOCK + entries, c.to(tl.int64))
    tl.store(words_ptr + (row * 4 + 3) * BLOCK + entries, d.to(tl.int64))


@triton.jit
def store_variates(words_ptr, uniforms_ptr, gumbels_ptr, BLOCK: tl.constexpr):
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(words_ptr + entries).to(tl.uint32)
    tl.store(uniforms_ptr + entries, ops.words_to_uniform(words))
    tl.store(gumbels_ptr + entries, ops.words_to_gumbel(words))


@triton.jit
def store_gumbel_block(noise_ptr, seeds_ptr, positions_ptr, stream, start, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    noise = ops.gumbel_block(seed, position, stream, position - 2, start, BLOCK)
    tl.store(noise_ptr + row * BLOCK + tl.arange(0, BLOCK), noise)


@triton.jit
def store_logs(values_ptr, logs_ptr, BLOCK: tl.constexpr):
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(logs_ptr + entries, ops.log(tl.load(values_ptr + entries)))


def test_words_are_the_references_words(kernel_device: torch.device) -> None:
    """Random keys and extreme ones in every place: seeds of both signs, the largest words, all streams."""
    generator = torch.Generator().manual_seed(0)
    extremes = [0, 1, -1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63)]
    seeds = torch.cat([torch.tensor(extremes), torch.randint(-(2**63), 2**63 - 1, (8,), generator=generator)])
    positions = torch.cat([torch.tensor([0, 1, 2**31 - 1, 2**31, MASK]), torch.randint(0, 2**20, (11,))])
    draft_steps = torch.cat([torch.tensor([0, MASK, 2**31]), torch.randint(0, 2**20, (13,), generator=generator)])
    blocks = torch.arange(32)
    streams = torch.tensor([*Stream] * 4)[: len(seeds)]
    words = torch.empty(len(seeds), 4, 32, dtype=torch.int64, device=kernel_device)
    arguments = [tensor.to(kernel_device) for tensor in (seeds, positions, draft_steps, blocks, streams)]
    store_words[(len(seeds),)](words, *arguments, BLOCK=32)
    wanted = random_words(seeds, positions, streams, draft_steps, num_blocks=32)
    assert torch.equal(words.cpu(), torch.stack(wanted, dim=1))


def variates(words: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    uniforms = torch.empty(len(words), dtype=torch.float64, device=device)
    gumbels = torch.empty(len(words), dtype=torch.float32, device=device)
    block = 1 << 14
    assert len(words) % block == 0
    store_variates[(len(words) // block,)](words.to(device), uniforms, gumbels, BLOCK=block, enable_fp_fusion=False)
    return uniforms.cpu(), gumbels.cpu()


def test_variates_are_finite_and_within_their_bound_of_the_float64_definition(kernel_device: torch.device) -> None:
    """At both ends, around every power of two from either end, where the two forms of the logarithm meet, at random."""
    powers = 2 ** torch.arange(32)
    near = torch.arange(-64, 65)
    special = torch.cat([(base + near).flatten() for base in (powers[:, None], MASK - powers[:, None], 0x4AFB0CCC)])
    random = torch.randint(0, 2**32, (2**18,), generator=torch.Generator().manual_seed(1))
    # Words for which the variate is next to 0, where an error of 2**-22 is many of its ulp.
    at_zero = int((1 - torch.exp(torch.tensor(-1.0, dtype=torch.float64))) * 2**32) + torch.arange(-4096, 4096)
    words = torch.cat([torch.tensor([0, MASK]), special.clamp(0, MASK), at_zero, random])
    words = words[: len(words) // 2**14 * 2**14]
    uniforms, gumbels = variates(words, kernel_device)
    assert torch.equal(uniforms, words_to_uniform(words))
    wanted = words_to_gumbel(words)
    assert torch.isfinite(gumbels).all()
    error = (gumbels.double() - wanted).abs() / wanted.abs().clamp(min=1.0)
    assert float(error.max()) <= BOUND
    assert float((gumbels.double() - wanted).mean().abs()) < 2.0**-28  # errors are no drift


def test_a_block_of_noise_gives_entry_v_its_lane(kernel_device: torch.device) -> None:
    seeds, positions = torch.tensor([3, -5]), torch.tensor([2, 70_000])
    for start, block in ((0, 8), (64, 16), (4, 4)):
        noise = torch.empty(2, block, device=kernel_device)
        arguments = (seeds.to(kernel_device), positions.to(kernel_device))
        store_gumbel_block[(2,)](noise, *arguments, 3, start, BLOCK=block, enable_fp_fusion=False)
        wanted = gumbel(seeds, positions, 3, positions - 2, vocab_size=start + block)[:, start:]
        assert torch.allclose(noise.cpu(), wanted, rtol=BOUND, atol=BOUND)


def test_the_logarithm_is_good_to_two_ulp(kernel_device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    mantissas = 1.0 + torch.rand(2**14, generator=generator)
    values = torch.ldexp(mantissas, torch.randint(-126, 127, (2**14,), generator=generator))
    values[: 2**13] = 1.0 + torch.linspace(-0.3, 0.42, 2**13)  # around 1, where the result is small
    logs = torch.empty_like(values, device=kernel_device)
    store_logs[(1,)](values.to(kernel_device), logs, BLOCK=2**14, enable_fp_fusion=False)
    wanted = values.double().log()
    error = (logs.cpu().double() - wanted).abs()
    assert bool((error <= 2.0**-22 * wanted.abs()).all())


@pytest.mark.parametrize("num_entries", [1, 3, 4, 9])
def test_uniforms_are_the_references_to_the_bit(kernel_device: torch.device, num_entries: int) -> None:
    """By the kernel and compiled for a CPU, with the step's key and without."""
    generator = torch.Generator().manual_seed(2)
    seeds = torch.randint(-(2**63), 2**63 - 1, (5,), generator=generator).to(kernel_device)
    positions = torch.tensor([0, 7, -1, 2**31, MASK], device=kernel_device)  # -1 is padding: drawn, and not read
    for draft_steps in (None, torch.tensor([3, 0, 1, 2**20, 5], device=kernel_device)):
        steps = 0 if draft_steps is None else draft_steps
        expected = uniforms(seeds, positions, Stream.ACCEPT, steps, num_entries=num_entries)
        for draw, device in ((by_kernel, kernel_device), (on_cpu, torch.device("cpu"))):
            keys = [own if own is None else own.to(device) for own in (seeds, positions, draft_steps)]
            found = draw(*keys, stream=int(Stream.ACCEPT), num_entries=num_entries)
            assert torch.equal(found, expected.to(device)), draw
