"""The gated delta rule over states: kernels against the reference, and every schedule of tokens against one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu.gated_delta import gated_delta as on_cpu
from kernels.recurrent_segments import RecurrentSegments
from kernels.reference.gated_delta import DeltaHeads, DeltaRows, DeltaStates, DeltaWeights
from kernels.reference.gated_delta import gated_delta as reference

triton_ops = pytest.importorskip("kernels.gated_delta")
HEADS = DeltaHeads(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=8, taps=4)
# As no power of two is large, and as keys are smaller than values.
ODD = DeltaHeads(num_key_heads=2, num_value_heads=2, key_dim=12, value_dim=20, taps=4)
FEW = DeltaHeads(num_key_heads=1, num_value_heads=2, key_dim=8, value_dim=4, taps=3)
KINDS: dict[str, dict[str, Any]] = {
    "gated delta": {},
    "state space": {"is_state_space": True},
    "by channel": {"forgets_by_channel": True},
    "bounded": {"forgets_by_channel": True, "most_forgotten": 5.0},
    "twice": {"writes_twice": True},
}


def of_kinds(heads: DeltaHeads, *names: str) -> Any:
    """For each kind, or for those named, such heads."""
    return pytest.mark.parametrize(
        "heads", [replace(heads, **KINDS[name]) for name in names or KINDS], ids=names or KINDS
    )


UNCERTAIN = 4  # tokens of a launch that may be taken back
NUM_SLOTS = 3
Op = Callable[..., Tensor]


def random_weights(heads: DeltaHeads, dtype: torch.dtype, device: torch.device) -> DeltaWeights:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return DeltaWeights(
        convolution=normal(heads.taps, heads.convolved).to(device, dtype),
        a_log=(0.5 * normal(heads.num_value_heads)).to(device),
        dt_bias=normal(heads.num_value_heads * heads.forgotten).to(device),
        **(
            {"bias": normal(heads.convolved).to(device, dtype), "skip": normal(heads.num_value_heads).to(device)}
            if heads.is_state_space
            else {
                "norm": (1 + 0.1 * normal(heads.value_dim)).to(device),
                "eps": torch.tensor(1e-6, device=device),
            }
        ),
    )


def random_rows(length: int, seed: int, dtype: torch.dtype, device: torch.device, heads: DeltaHeads = FEW) -> DeltaRows:
    """What a request's tokens are projected to."""
    generator = torch.Generator().manual_seed(seed)

    def normal(width: int) -> Tensor:
        return torch.randn(length, width, generator=generator).to(device, dtype)

    return DeltaRows(
        mixed=normal(heads.convolved),
        gate=normal(heads.values),
        forgotten=normal(heads.num_value_heads * heads.forgotten),
        written=None if heads.is_state_space else normal(heads.num_value_heads),
    )


def changed(change: Callable[..., Tensor], *rows: DeltaRows) -> DeltaRows:
    """What the change makes of each kind of numbers."""
    names = [own.name for own in fields(DeltaRows) if getattr(rows[0], own.name) is not None]
    return DeltaRows(**{name: change(*(getattr(own, name) for own in rows)) for name in names})


def taken(rows: DeltaRows, start: int, stop: int) -> DeltaRows:
    return changed(lambda own: own[start:stop], rows)


def joined(*rows: DeltaRows) -> DeltaRows:
    return changed(lambda *own: torch.cat(own), *rows)


def launch(
    op: Op,
    states: DeltaStates,
    weights: DeltaWeights,
    *parts: tuple[DeltaRows, int, int, int, int],
    heads: DeltaHeads = FEW,
) -> list[Tensor]:
    """Each (text, start, stop, end of what is certain, slot) -> its rows; one more row is nobody's."""
    device = weights.a_log.device
    rows = [taken(text, start, stop) for text, start, stop, _, _ in parts]
    rows.append(changed(lambda own: torch.ones_like(own[:1]), parts[0][0]))
    counts = [len(own.mixed) for own in rows]

    def numbers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    segments = RecurrentSegments(
        starts=numbers([*(start for _, start, *_ in parts), 0]),
        ends=numbers([*(end for *_, end, _ in parts), 0]),
        slots=numbers([*(slot for *_, slot in parts), 0]),
        first_rows=numbers([sum(counts[:index]) for index in range(len(counts))]),
        counts=numbers(counts),
    )
    # Rows lie apart, as those that a product gives beside others.
    apart = changed(lambda own: torch.cat((own, own[:, :1]), dim=1)[:, :-1], joined(*rows))
    out = op(apart, segments, states, weights, heads)
    assert not out[-1:].any()
    return list(out.split_with_sizes(counts))[:-1]


def empty_states(
    dtype: torch.dtype, device: torch.device, num_uncertain: int = UNCERTAIN, heads: DeltaHeads = FEW
) -> DeltaStates:
    return DeltaStates.empty(heads, NUM_SLOTS, num_uncertain, dtype, device)


def ops(device: torch.device, dtype: torch.dtype) -> list[tuple[Op, torch.device]]:
    cpu = torch.device("cpu")
    found: list[tuple[Op, torch.device]] = [(reference, cpu), (on_cpu, cpu)]
    if dtype != torch.bfloat16 or device.type == "cuda":  # Triton's interpreter knows no bfloat16
        found.append((triton_ops.gated_delta, device))
    return found


@of_kinds(FEW)
@settings(max_examples=12)
@given(data=st.data(), dtype=st.sampled_from((torch.float32, torch.bfloat16)))
def test_rows_are_the_same_however_tokens_come(
    kernel_device: torch.device, heads: DeltaHeads, data: st.DataObject, dtype: torch.dtype
) -> None:
    """Two requests, prompts in chunks, then tokens with drafts behind them, some of them taken back; bit for bit."""
    lengths = [data.draw(st.integers(2, 14)) for _ in range(2)]
    schedules = []
    for length in lengths:
        steps, place = [], 0
        prompt = data.draw(st.integers(1, length))
        while place < prompt:  # all certain
            stop = data.draw(st.integers(place + 1, prompt))
            steps.append((place, stop, stop, 0))
            place = stop
        while place < length:  # one is certain, and drafts behind it, the first ones right
            num_drafts = data.draw(st.integers(0, UNCERTAIN))
            right = data.draw(st.integers(0, min(num_drafts, length - place - 1)))
            steps.append((place, place + 1 + right, place + 1, num_drafts - right))
            place += 1 + right
        schedules.append(steps)
    for op, device in ops(kernel_device, dtype):
        weights = random_weights(heads, dtype, device)
        texts = [random_rows(length, seed, dtype, device, heads) for seed, length in enumerate(lengths)]
        wrong = random_rows(UNCERTAIN, 9, dtype, device, heads)
        one_by_one = []
        for text, length in zip(texts, lengths, strict=True):
            states = empty_states(dtype, device, num_uncertain=0, heads=heads)
            rows = [launch(op, states, weights, (text, at, at + 1, at + 1, 1), heads=heads)[0] for at in range(length)]
            one_by_one.append(torch.cat(rows))
        states, found = empty_states(dtype, device, heads=heads), [[], []]  # type: ignore[var-annotated]
        for turn in range(max(map(len, schedules))):
            parts, whose = [], []
            for index, steps in enumerate(schedules):
                if turn < len(steps):
                    start, stop, end, num_wrong = steps[turn]
                    tokens = joined(taken(texts[index], 0, stop), taken(wrong, 0, num_wrong))
                    parts.append((tokens, start, stop + num_wrong, end, index + 1))
                    whose.append((index, stop - start))
            for (index, count), rows in zip(whose, launch(op, states, weights, *parts, heads=heads), strict=True):
                found[index].append(rows[:count])
        for own, expected in zip(found, one_by_one, strict=True):
            assert torch.equal(torch.cat(own), expected)


@pytest.mark.parametrize(
    "heads", [replace(heads, **kind) for heads in (HEADS, ODD) for kind in KINDS.values()], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_agree_with_the_reference(kernel_device: torch.device, dtype: torch.dtype, heads: DeltaHeads) -> None:
    text = random_rows(40, 3, torch.float32, torch.device("cpu"), heads)
    exact, *found = (
        torch.cat(
            [
                *launch(op, states, weights, (own, 0, 30, 30, 2), heads=heads),
                *launch(op, states, weights, (own, 30, 34, 31, 2), heads=heads),
                *launch(op, states, weights, (own, 33, 37, 34, 2), heads=heads),
                *launch(op, states, weights, (own, 37, 40, 38, 2), heads=heads),
            ]
        ).cpu()
        for op, device in ops(kernel_device, dtype)
        for own in [changed(lambda numbers: numbers.to(device, dtype), text)]  # noqa: B023
        for weights in [random_weights(heads, dtype, device)]
        for states in [empty_states(dtype, device, heads=heads)]
    )
    assert found and exact.abs().max() > 0.5
    for rows in found:
        bound = 4 * torch.finfo(dtype).eps if dtype != torch.float32 else 2e-5
        assert (rows.float() - exact.float()).abs().max() <= bound * exact.abs().max()


def test_a_launch_of_equal_segments_is_told_by_two_numbers(kernel_device: torch.device) -> None:
    """As whole steps lay it out: so many rows of each request, absent ones included."""
    for op, device in ops(kernel_device, torch.float32):
        weights, texts = random_weights(FEW, torch.float32, device), []
        told, counted = (empty_states(torch.float32, device) for _ in range(2))
        for slot in (1, 2):
            texts.append(random_rows(9, slot, torch.float32, device))
            for states in (told, counted):
                launch(op, states, weights, (texts[-1], 0, 4 + slot, 4 + slot, slot))
        lengths = torch.tensor([6, 0, 7], device=device)
        segments = RecurrentSegments(
            starts=lengths, ends=lengths, slots=torch.tensor([1, 0, 2], device=device), offset=-1, num_rows=2
        )
        rows = [taken(texts[0], 5, 7), taken(texts[0], 0, 2), taken(texts[1], 6, 8)]
        found = op(joined(*rows), segments, told, weights, FEW)
        expected = launch(op, counted, weights, (texts[0], 5, 7, 6, 1), (texts[1], 6, 8, 7, 2))
        assert torch.equal(found[:2], expected[0]) and torch.equal(found[4:], expected[1])
        assert not found[2:4].any() and torch.equal(told.reached[1:], counted.reached[1:])
        assert told.reached[1:].unique().tolist() == [6, 7]


@of_kinds(FEW)
def test_drafts_may_come_one_by_one_and_committed_tokens_again(kernel_device: torch.device, heads: DeltaHeads) -> None:
    """As a draft model's do: segments begin behind what is certain, with rows that are kept in between."""
    for op, device in ops(kernel_device, torch.float32):
        weights = random_weights(heads, torch.float32, device)
        text, wrong = (random_rows(12, seed, torch.float32, device, heads) for seed in (1, 2))
        once, states = (empty_states(torch.float32, device, num_uncertain=5, heads=heads) for _ in range(2))
        (expected,) = launch(op, once, weights, (text, 0, 12, 12, 1), heads=heads)
        launch(op, states, weights, (text, 0, 6, 4, 1), heads=heads)
        found = {}
        for committed, num_right in ((6, 2), (9, 0), (10, 1)):
            certain = committed - 2
            (rows,) = launch(op, states, weights, (text, certain, committed, certain, 1), heads=heads)
            found |= {certain + at: row for at, row in enumerate(rows)}
            for at in range(committed, committed + 3):
                own = text if at < committed + num_right else wrong
                (row,) = launch(op, states, weights, (own, at, at + 1, certain, 1), heads=heads)
                if own is text:
                    found[at] = row[0]
            assert states.reached[1].unique().tolist() == [certain]
        assert sorted(found) == list(range(4, 11))
        for at, row in found.items():
            assert torch.equal(row, expected[at])


def test_rows_of_a_request_that_a_state_has_not_followed_cost_no_more(kernel_device: torch.device) -> None:
    """Nobody reads them; going over all tokens that the state lacks would take as long as its text is."""
    for op, device in ops(kernel_device, torch.float32):
        states = empty_states(torch.float32, device)
        text = random_rows(2, 1, torch.float32, device)
        far = 1 << 30
        segments = RecurrentSegments(
            starts=torch.tensor([far], device=device),
            ends=torch.tensor([far], device=device),
            slots=torch.tensor([1], device=device),
            num_rows=2,
        )
        op(text, segments, states, random_weights(FEW, torch.float32, device), FEW)
        assert states.reached[1].unique().tolist() == [far]


@of_kinds(FEW)
def test_every_row_is_written_where_a_state_came_further_than_the_launch_begins(
    kernel_device: torch.device, heads: DeltaHeads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot's last owner left it there, or the request has no drafts: nobody reads these rows, and none is garbage."""
    empty = torch.empty

    def filled_with_nan(*args: Any, **kwargs: Any) -> Tensor:
        return empty(*args, **kwargs).fill_(torch.nan)

    monkeypatch.setattr(torch, "empty", filled_with_nan)
    exact, *others = (
        (launch(op, states, weights, (own, 6, 9, 7, 1), heads=heads)[0].cpu(), states)
        for op, device in ops(kernel_device, torch.float32)
        for own in [random_rows(20, 3, torch.float32, device, heads)]
        for weights in [random_weights(heads, torch.float32, device)]
        for states in [empty_states(torch.float32, device, heads=heads)]
        if launch(op, states, weights, (own, 0, 8, 8, 1), heads=heads)
    )
    assert len(others) == 2 and exact[0].any(dim=1).all()
    for rows, states in (exact, *others):
        assert torch.allclose(rows, exact[0], atol=2e-5) and states.reached[1].unique().tolist() == [7]


def test_a_slot_begins_anew_with_its_next_request(kernel_device: torch.device) -> None:
    for op, device in ops(kernel_device, torch.float32):
        weights = random_weights(FEW, torch.float32, device)
        before, text = (random_rows(8, seed, torch.float32, device) for seed in (5, 6))
        used, fresh = (empty_states(torch.float32, device) for _ in range(2))
        launch(op, used, weights, (before, 0, 8, 5, 1))
        assert torch.equal(
            launch(op, used, weights, (text, 0, 8, 8, 1))[0], launch(op, fresh, weights, (text, 0, 8, 8, 1))[0]
        )
