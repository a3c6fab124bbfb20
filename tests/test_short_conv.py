"""Short convolutions over states: kernels against the reference, and every schedule of tokens against one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu.short_conv import short_conv as on_cpu
from kernels.recurrent_segments import RecurrentSegments
from kernels.reference.short_conv import ConvStates, ConvWeights
from kernels.reference.short_conv import short_conv as reference

triton_ops = pytest.importorskip("kernels.short_conv")
UNCERTAIN = 4  # tokens of a launch that may be taken back
NUM_SLOTS = 3
Op = Callable[..., Tensor]
Part = tuple[Tensor, int, int, int]  # (a text [length, 3 * width], start, stop, slot)


def random_weights(
    width: int, taps: int, dtype: torch.dtype, device: torch.device, *, has_bias: bool = True
) -> ConvWeights:
    generator = torch.Generator().manual_seed(1)
    convolution, bias = torch.randn(taps, width, generator=generator), torch.randn(width, generator=generator)
    return ConvWeights(convolution=convolution.to(device, dtype), bias=bias.to(device, dtype) if has_bias else None)


def random_text(length: int, width: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(length, 3 * width, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def empty_states(weights: ConvWeights, num_uncertain: int = UNCERTAIN) -> ConvStates:
    (taps, width), own = weights.convolution.shape, weights.convolution
    return ConvStates.empty(width, taps, NUM_SLOTS, num_uncertain, own.dtype, own.device)


def launch(op: Op, states: ConvStates, weights: ConvWeights, *parts: Part) -> list[Tensor]:
    """The rows of each part; one more row is nobody's."""
    device = weights.convolution.device
    rows = [text[start:stop] for text, start, stop, _ in parts]
    rows.append(torch.ones(1, rows[0].shape[1], dtype=rows[0].dtype, device=device))
    counts = [len(own) for own in rows]

    def numbers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    starts = numbers([*(start for _, start, *_ in parts), 0])
    segments = RecurrentSegments(
        starts=starts,
        ends=starts,  # which no ring of products asks for
        slots=numbers([*(slot for *_, slot in parts), 0]),
        first_rows=numbers([sum(counts[:index]) for index in range(len(counts))]),
        counts=numbers(counts),
    )
    out = op(torch.cat(rows), segments, states, weights)
    assert not out[-1:].any()
    return list(out.split_with_sizes(counts))[:-1]


def ops(device: torch.device, dtype: torch.dtype) -> list[tuple[Op, torch.device]]:
    cpu = torch.device("cpu")
    found: list[tuple[Op, torch.device]] = [(reference, cpu), (on_cpu, cpu)]
    if dtype != torch.bfloat16 or device.type == "cuda":  # Triton's interpreter knows no bfloat16
        found.append((triton_ops.short_conv, device))
    return found


@pytest.mark.parametrize("taps", [1, 2, 3])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_definition_is_a_convolution_between_two_gates(taps: int, has_bias: bool) -> None:
    width, dtype = 10, torch.float64
    weights = random_weights(width, taps, dtype, torch.device("cpu"), has_bias=has_bias)
    text = random_text(23, width, 0, dtype, torch.device("cpu"))
    gate, result_gate, values = text.chunk(3, dim=1)
    kernel = weights.convolution.t().unsqueeze(1)
    seen = F.pad((gate * values).t(), (taps - 1, 0))
    expected = F.conv1d(seen, kernel, weights.bias, groups=width).t() * result_gate
    states = empty_states(weights)
    found = [
        launch(reference, states, weights, (text, start, stop, 1))[0] for start, stop in ((0, 9), (9, 10), (10, 23))
    ]
    torch.testing.assert_close(torch.cat(found), expected)


@settings(max_examples=15)
@given(data=st.data(), dtype=st.sampled_from((torch.float32, torch.bfloat16)), taps=st.integers(1, 4))
def test_rows_are_the_same_however_tokens_come(
    kernel_device: torch.device, data: st.DataObject, dtype: torch.dtype, taps: int
) -> None:
    """Two requests, prompts in chunks, then tokens with drafts behind them, some of them taken back; bit for bit."""
    width, lengths = 7, [data.draw(st.integers(2, 30)) for _ in range(2)]
    schedules = []
    for length in lengths:
        steps, place = [], 0
        prompt = data.draw(st.integers(1, length))
        while place < prompt:
            stop = data.draw(st.integers(place + 1, prompt))
            steps.append((place, stop, 0))
            place = stop
        while place < length:  # one is certain, and drafts behind it, the first ones right
            num_drafts = data.draw(st.integers(0, UNCERTAIN))
            right = data.draw(st.integers(0, min(num_drafts, length - place - 1)))
            steps.append((place, place + 1 + right, num_drafts - right))
            place += 1 + right
        schedules.append(steps)
    for op, device in ops(kernel_device, dtype):
        weights = random_weights(width, taps, dtype, device)
        texts = [random_text(length, width, seed, dtype, device) for seed, length in enumerate(lengths)]
        wrong = random_text(UNCERTAIN, width, 9, dtype, device)
        one_by_one = []
        for text, length in zip(texts, lengths, strict=True):
            states = empty_states(weights, num_uncertain=0)
            rows = [launch(op, states, weights, (text, at, at + 1, 1))[0] for at in range(length)]
            one_by_one.append(torch.cat(rows))
        states, found = empty_states(weights), [[], []]  # type: ignore[var-annotated]
        for turn in range(max(map(len, schedules))):
            parts, whose = [], []
            for index, steps in enumerate(schedules):
                if turn < len(steps):
                    start, stop, num_wrong = steps[turn]
                    tokens = torch.cat((texts[index][:stop], wrong[:num_wrong]))
                    parts.append((tokens, start, stop + num_wrong, index + 1))
                    whose.append((index, stop - start))
            for (index, count), rows in zip(whose, launch(op, states, weights, *parts), strict=True):
                found[index].append(rows[:count])
        for own, expected in zip(found, one_by_one, strict=True):
            assert torch.equal(torch.cat(own), expected)


@pytest.mark.parametrize("width", [40, 600])  # columns of one program and thread, and of several
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_agree_with_the_reference(kernel_device: torch.device, dtype: torch.dtype, width: int) -> None:
    text = random_text(60, width, 3, torch.float32, torch.device("cpu"))
    exact, *found = (
        torch.cat(
            [
                launch(op, states, weights, (own, start, stop, 2))[0]
                for start, stop in ((0, 50), (50, 54), (53, 57), (57, 60))
            ]
        ).cpu()
        for op, device in ops(kernel_device, dtype)
        for own in [text.to(device, dtype)]
        for weights in [random_weights(width, 3, dtype, device)]
        for states in [empty_states(weights)]
    )
    assert found and exact.abs().max() > 0.5
    for rows in found:
        bound = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-6
        assert (rows.float() - exact.float()).abs().max() <= bound * exact.abs().max()


def test_a_launch_of_equal_segments_is_told_by_two_numbers(kernel_device: torch.device) -> None:
    """As whole steps lay it out: so many rows of each request, absent ones included."""
    width = 7
    for op, device in ops(kernel_device, torch.float32):
        weights, texts = random_weights(width, 3, torch.float32, device), []
        told, counted = (empty_states(weights) for _ in range(2))
        for slot in (1, 2):
            texts.append(random_text(9, width, slot, torch.float32, device))
            for states in (told, counted):
                launch(op, states, weights, (texts[-1], 0, 4 + slot, slot))
        lengths = torch.tensor([6, 0, 7], device=device)
        segments = RecurrentSegments(
            starts=lengths, ends=lengths, slots=torch.tensor([1, 0, 2], device=device), offset=-1, num_rows=2
        )
        rows = [texts[0][5:7], torch.ones_like(texts[0][:2]), texts[1][6:8]]
        found = op(torch.cat(rows), segments, told, weights)
        expected = launch(op, counted, weights, (texts[0], 5, 7, 1), (texts[1], 6, 8, 2))
        assert torch.equal(found[:2], expected[0]) and torch.equal(found[4:], expected[1])
        assert not found[2:4].any() and torch.equal(told.recent[1:], counted.recent[1:])


def test_a_slot_begins_anew_with_its_next_request(kernel_device: torch.device) -> None:
    width = 7
    for op, device in ops(kernel_device, torch.float32):
        weights = random_weights(width, 3, torch.float32, device)
        before, text = (random_text(8, width, seed, torch.float32, device) for seed in (5, 6))
        used, fresh = (empty_states(weights) for _ in range(2))
        launch(op, used, weights, (before, 0, 8, 1))
        assert torch.equal(
            launch(op, used, weights, (text, 0, 8, 1))[0], launch(op, fresh, weights, (text, 0, 8, 1))[0]
        )
