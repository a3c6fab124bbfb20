"""A table's rows written anew: the reference, Triton's kernel and a CPU's against rows written one after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.remember_candidates import remember_candidates as on_cpu
from kernels.reference.remember_candidates import remember_candidates as reference

triton_ops = pytest.importorskip("kernels.remember_candidates")
VOCAB_SIZE = 7


@settings(max_examples=60)
@given(
    told=st.lists(st.integers(-1, VOCAB_SIZE - 1), max_size=12),
    width=st.integers(1, 5),
    chunk=st.sampled_from([2, 16]),
)
def test_each_token_has_what_the_surest_row_told_of_it(
    kernel_device: torch.device, told: list[int], width: int, chunk: int
) -> None:
    """Tokens come several times, nobody's rows between them, in several chunks; some are equally sure."""
    generator = torch.Generator().manual_seed(len(told))
    shape = VOCAB_SIZE + 1, width
    table = torch.randint(0, 99, shape, generator=generator), torch.randn(shape, generator=generator)
    candidates = torch.randint(0, 99, (len(told), width), generator=generator)
    log_probs = -torch.randint(0, 3, (len(told), width), generator=generator).float().cumsum(dim=1)
    log_probs[log_probs == -1.0] = torch.nan
    wanted = [own.clone()[:-1] for own in table]
    sureness = torch.nan_to_num(log_probs[:, 0], nan=-torch.inf)
    for row in sorted(range(len(told)), key=lambda row: (float(sureness[row]), -row)):
        if (token_id := told[row]) >= 0:
            wanted[0][token_id], wanted[1][token_id] = candidates[row], log_probs[row]
    rows = torch.tensor(told, dtype=torch.int64), candidates, log_probs

    def found(remember: Any, device: torch.device) -> tuple[torch.Tensor, ...]:
        held = tuple(own.clone().to(device) for own in table)
        remember(*held, *(own.to(device) for own in rows))
        return tuple(own[:-1].cpu() for own in held)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_ops, "CHUNK", chunk)
        by_kernel = found(triton_ops.remember_candidates, kernel_device)
    cpu = torch.device("cpu")
    for held in (by_kernel, found(reference, cpu), found(on_cpu, cpu)):
        assert torch.equal(held[0], wanted[0])
        torch.testing.assert_close(held[1], wanted[1], rtol=0, atol=0, equal_nan=True)


def test_threads_of_a_cpu_share_no_token() -> None:
    """Many rows of few tokens, in several parts."""
    told = torch.arange(4000) * 5 % VOCAB_SIZE
    candidates, log_probs = torch.arange(8000).view(4000, 2), torch.arange(8000.0).view(4000, 2)
    held = torch.zeros(VOCAB_SIZE + 1, 2, dtype=torch.int64), torch.zeros(VOCAB_SIZE + 1, 2)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    on_cpu(*held, told, candidates, log_probs)
    torch.set_num_threads(before)
    last = {int(token): row for row, token in enumerate(told)}  # which is the surest
    assert held[0][:-1].tolist() == [[2 * last[token], 2 * last[token] + 1] for token in range(VOCAB_SIZE)]
