"""Logits with noise: by a Triton kernel the reference's, and the very noise that tokens are drawn with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.cpu.perturb import perturb as on_cpu
from kernels.cpu.truncation import truncate
from kernels.reference.perturb import perturb as perturb_in_torch
from kernels.reference.philox import Stream

kernel = pytest.importorskip("kernels.perturb")
sampling = pytest.importorskip("kernels.sampling")


def test_noise_is_the_references_and_that_of_the_draws(kernel_device: torch.device) -> None:
    """Two programs a row, the last one not full; rows with a gap between them; masked tokens stay masked."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 1100, generator=generator).to(kernel_device)[:, :1030]
    logits[1, :600] = float("-inf")
    seeds = torch.randint(-(2**63), 2**63 - 1, (4,), generator=generator).to(kernel_device)
    positions = torch.tensor([0, 5, 9, 70_000], device=kernel_device)
    draft_steps = torch.tensor([0, 0, 3, 1], device=kernel_device)
    found = kernel.perturb(logits, seeds, positions, draft_steps, stream=Stream.DRAFT)
    expected = perturb_in_torch(logits.double(), seeds, positions, draft_steps, stream=Stream.DRAFT)
    assert found.dtype == torch.float32 and found.is_contiguous()
    assert bool((found[1, :600] == float("-inf")).all())
    assert torch.allclose(found.double(), expected, rtol=0, atol=1e-5)
    drawn = sampling.sample(logits, seeds, positions, stream=Stream.DRAFT, draft_steps=draft_steps)
    assert torch.equal(found.argmax(dim=1), drawn)
    alone = kernel.perturb(logits[2:3], seeds[2:3], positions[2:3], draft_steps[2:3], stream=Stream.DRAFT)
    assert torch.equal(alone[0], found[2])


def test_no_rows_have_no_noise(kernel_device: torch.device) -> None:
    nobody = torch.empty(0, dtype=torch.int64, device=kernel_device)
    logits = torch.empty(0, 7, device=kernel_device)
    assert kernel.perturb(logits, nobody, nobody, nobody, stream=0).shape == (0, 7)


def test_compiled_for_a_cpu_rows_of_one_owner_share_its_parameters() -> None:
    """Bit for bit what each row has alone; greedy owners' rows stay as they are."""
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    noise = {
        "seeds": torch.tensor([3, -5, 2**62]),
        "positions": torch.tensor([0, 9, 70_000]),
        "draft_steps": torch.tensor([0, 2, 1]),
        "is_greedy": torch.tensor([False, True, False]),
    }
    cuts = {
        "is_greedy": noise["is_greedy"],
        "temperatures": torch.tensor([0.5, 1.0, 2.0]),
        "min_p": torch.tensor([0.1, 0.9, 0.0]),
        "top_k": torch.tensor([50, 1, 0]),
        "top_p": torch.tensor([1.0, 0.1, 0.7], dtype=torch.float64),
    }
    for found, alone in (
        (on_cpu(logits, **noise, stream=1), on_cpu(logits, **_of_rows(noise), stream=1)),
        (truncate(logits, **cuts), truncate(logits, **_of_rows(cuts))),
    ):
        assert torch.equal(found, alone) and torch.equal(found[2:4], logits[2:4])
        assert not any(torch.equal(found[row], logits[row]) for row in (0, 1, 4, 5))


def _of_rows(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.repeat_interleave(2) for name, value in values.items()}
