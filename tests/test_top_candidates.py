"""Candidates of draft trees by Triton's kernel and by a CPU's: the reference's, and the same however rows are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.benchmarks.case import check_error
from kernels.cpu import top_candidates as on_cpu
from kernels.reference.philox import Stream
from kernels.reference.top_candidates import top_candidates as reference
from runner.engine.row_sampling import RowSampling

kernel = pytest.importorskip("kernels.top_candidates")
perturb = pytest.importorskip("kernels.perturb")

NUM_ROWS, VOCAB_SIZE, WIDTH = 6, 150, 5
INFINITY = float("inf")


@pytest.fixture
def logits(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Three programs a row, the last one not full; rows with a gap between them, ties, and columns without a chance."""
    monkeypatch.setattr(kernel, "BLOCK", 64)
    logits = torch.randn(NUM_ROWS, VOCAB_SIZE + 7, generator=torch.Generator().manual_seed(0)) * 9
    logits[1, [149, 3, 70, 64]] = 50.0
    logits[2, :64] = -INFINITY  # a program that finds nothing
    logits[3, 3:] = -INFINITY  # fewer tokens than candidates
    logits[4, :] = -INFINITY
    logits[5, 10:60] = float("nan")
    logits[5, 60] = 1e4  # whose exponential is no float64
    return logits.to(kernel_device)[:, :VOCAB_SIZE]


@pytest.mark.parametrize("ops", [kernel, on_cpu])
def test_candidates_are_the_references(ops: Any, logits: torch.Tensor) -> None:
    logits = logits.cpu() if ops is on_cpu else logits
    found, expected = ops.top_candidates(logits, WIDTH), reference(logits, WIDTH)
    sharp, doubled = ops.top_candidates(logits, WIDTH, sharpness=2), ops.top_candidates(2 * logits, WIDTH)
    assert torch.equal(sharp.token_ids, found.token_ids) and torch.equal(sharp.log_probs, doubled.log_probs)
    assert torch.equal(reference(logits, WIDTH, sharpness=2).log_probs, reference(2 * logits, WIDTH).log_probs)
    assert not torch.equal(sharp.log_probs, found.log_probs)
    assert torch.equal(found.token_ids, expected.token_ids)
    assert found.token_ids[1, :4].tolist() == [3, 64, 70, 149] and found.token_ids[3].tolist() == [
        *sorted(range(3), key=lambda token: -float(logits[3, token])), 3, 4,
    ]  # fmt: skip
    assert found.token_ids[4].tolist() == [0, 1, 2, 3, 4] and bool((found.log_probs[4] == -INFINITY).all())
    rows = logits[:3]
    by_torch, exact = (own.log_softmax(dim=-1).gather(1, found.token_ids[:3]) for own in (rows, rows.double()))
    for log_probs in (found.log_probs, expected.log_probs):
        check_error(log_probs[:3], by_torch, exact)
        assert bool((log_probs <= 0).all()) and float(log_probs[5, 0]) == 0.0
        assert bool((log_probs[3, :3] > -INFINITY).all() and (log_probs[3, 3:] == -INFINITY).all())


@pytest.mark.parametrize("width", [1, 7, 64, 999, 1000])
def test_compiled_for_a_cpu_any_number_of_candidates_are_the_references(width: int) -> None:
    """With ties, zeros of both signs, and columns without a chance or a number, in vocabularies of any order."""
    generator = torch.Generator().manual_seed(width)
    logits = (torch.randn(5, 1003, generator=generator)[:, :1000] * 3).round()
    logits[1, 40:900], logits[2, 5:700:3], logits[3] = -INFINITY, float("nan"), logits[3].sort().values
    for token_ids in (None, torch.randperm(1400, generator=generator)[:1000]):
        found, expected = on_cpu.top_candidates(logits, width, token_ids), reference(logits, width, token_ids=token_ids)
        assert torch.equal(found.token_ids, expected.token_ids)
        assert found.log_probs.dtype == torch.float32
        torch.testing.assert_close(found.log_probs, expected.log_probs, atol=1e-6, rtol=1e-6)


def test_compiled_for_a_cpu_a_row_has_its_bits_in_any_company(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 700, generator=torch.Generator().manual_seed(0)) * 9
    alone, before = [on_cpu.top_candidates(row, WIDTH) for row in logits.split(1)], torch.get_num_threads()
    monkeypatch.setattr(on_cpu, "PART_COLUMNS", 1)
    for count in (1, 3):
        torch.set_num_threads(count)
        together = on_cpu.top_candidates(logits, WIDTH)
        torch.set_num_threads(before)
        for own, of_rows in zip(together, zip(*alone, strict=True), strict=True):
            assert torch.equal(own, torch.cat(of_rows)), count


def sampled(device: torch.device) -> dict[str, Any]:
    """Of three requests with two rows each, the second one greedy."""
    return {
        "seeds": torch.tensor([3, -5, 2**62], device=device),
        "positions": torch.tensor([0, 9, 70_000], device=device),
        "stream": Stream.TARGET,
        "is_greedy": torch.tensor([False, True, False], device=device),
        "temperatures": torch.tensor([0.7, 1.0, 1.3], device=device),
        "cuts": torch.tensor([-4.0, -5.0, -INFINITY, -INFINITY, -INFINITY, 0.0], device=device),
    }


def test_drawn_candidates_are_the_highest_of_the_perturbed_logits(logits: torch.Tensor) -> None:
    arguments = sampled(logits.device)
    found = kernel.top_candidates(logits, WIDTH, **arguments)
    of_rows = {name: arguments[name].repeat_interleave(2) for name in ("seeds", "positions", "is_greedy")}
    processed = logits / arguments["temperatures"].repeat_interleave(2).unsqueeze(1)
    processed[processed < arguments["cuts"].unsqueeze(1)] = -INFINITY
    noisy = perturb.perturb(
        processed, of_rows["seeds"], of_rows["positions"], torch.zeros_like(of_rows["seeds"]), stream=Stream.TARGET
    )
    noisy = torch.where(of_rows["is_greedy"].unsqueeze(1), logits, noisy)
    expected = kernel.top_candidates(noisy, WIDTH)
    for name in expected._fields:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert torch.equal(found.token_ids, reference(logits, WIDTH, **arguments).token_ids)


def test_a_part_of_the_vocabulary_and_a_row_alone_have_the_same_candidates(
    logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the columns are cut, and in any order; beside them the other tokens have no chance. Bit for bit."""
    logits = logits[:4].contiguous()
    arguments = {name: values for name, values in sampled(logits.device).items() if name not in ("cuts", "stream")}
    arguments = {**{name: values[:2] for name, values in arguments.items()}, "stream": Stream.DRAFT}
    token_ids = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:VOCAB_SIZE].to(logits.device)
    everything = torch.full((4, 200), -1000.0, device=logits.device).index_copy_(1, token_ids, logits)
    everything[3, everything[3] == -1000.0] = -INFINITY
    found = kernel.top_candidates(logits, WIDTH, token_ids=token_ids, **arguments)
    expected = kernel.top_candidates(everything, WIDTH, **arguments)
    assert torch.equal(found.token_ids[:3], expected.token_ids[:3])
    assert torch.equal(found.log_probs, expected.log_probs)
    assert torch.equal(found.token_ids, reference(logits, WIDTH, token_ids=token_ids, **arguments).token_ids)
    monkeypatch.setattr(kernel, "BLOCK", 256)
    own = {name: values[1:] for name, values in arguments.items() if isinstance(values, torch.Tensor)}
    alone = kernel.top_candidates(logits[2:], WIDTH, token_ids=token_ids, stream=Stream.DRAFT, **own)
    for name in alone._fields:
        assert torch.equal(getattr(alone, name), getattr(found, name)[2:]), name


def test_what_a_request_cuts_off_has_no_chance_in_any_of_its_rows(kernel_device: torch.device) -> None:
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(0)).to(kernel_device)
    rows = RowSampling(
        seeds=torch.tensor([1, 2], device=kernel_device),
        positions=torch.tensor([3, 4], device=kernel_device),
        all_greedy=False,
        min_p=torch.tensor([0.0, 0.6], device=kernel_device),
    )
    found = rows.candidates(logits, 20, None)
    kept = (logits - logits.amax(dim=1, keepdim=True)).exp() > torch.tensor(
        [[0.0], [0.0], [0.6], [0.6]], device=kernel_device
    )
    assert torch.equal(found.token_ids, reference(logits.masked_fill(~kept, -INFINITY), 20).token_ids)
    assert torch.equal((found.log_probs > -INFINITY).sum(dim=1), kept.sum(dim=1))


def test_a_greedy_rows_doubts_are_halved_alone_and_beside_sampled_ones_alike(kernel_device: torch.device) -> None:
    """Trees of greedy requests grow by them, so that who shares the batch has no part in a draft."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).to(kernel_device)
    seeds, positions = (torch.tensor(values, device=kernel_device) for values in ([3, 4], [9, 12]))
    is_greedy = torch.tensor([True, False], device=kernel_device)
    alone = RowSampling(seeds=seeds[:1], positions=positions[:1], all_greedy=True)
    beside = RowSampling(seeds=seeds, positions=positions, all_greedy=False, is_greedy=is_greedy)
    sampled = RowSampling(seeds=seeds[1:], positions=positions[1:], all_greedy=False)
    for stream in (None, Stream.TARGET):
        greedy, random = alone.candidates(logits[:2], WIDTH, stream), sampled.candidates(logits[2:], WIDTH, stream)
        together = beside.candidates(logits, WIDTH, stream)
        for name in together._fields:
            assert torch.equal(getattr(together, name), torch.cat((getattr(greedy, name), getattr(random, name)))), name
        exact = (2 * logits[:2].double()).log_softmax(dim=-1).gather(1, greedy.token_ids)
        torch.testing.assert_close(greedy.log_probs.double(), exact, atol=1e-6, rtol=1e-6)
