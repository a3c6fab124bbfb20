"""Logits of candidates behind the token before them: kernels against the definition in float64, rows on their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.cpu.candidate_logits import candidate_logits as on_cpu
from kernels.reference.candidate_logits import candidate_logits as reference
from kernels.reference.cluster_logits import OUTSIDE
from tests.seeded import randn
from tests.test_rms_norm_kernel import assert_error_is_the_definitions

triton_ops = pytest.importorskip("kernels.candidate_logits")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
VOCAB_SIZE = 50
Op = Callable[..., Tensor]


@pytest.fixture(params=["reference", "on a CPU", "Triton"])
def op_and_device(request: pytest.FixtureRequest, kernel_device: torch.device) -> tuple[Op, torch.device]:
    if request.param == "Triton":
        return triton_ops.candidate_logits, kernel_device
    return (reference if request.param == "reference" else on_cpu), torch.device("cpu")


@pytest.mark.parametrize(("num_candidates", "rank", "num_each"), [(6, 300, 1), (1, 5, 3), (16, 128, 2)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_candidates_have_their_logits_and_other_tokens_none(
    op_and_device: tuple[Op, torch.device], dtype: torch.dtype, num_candidates: int, rank: int, num_each: int
) -> None:
    op, device = op_and_device
    if dtype == torch.bfloat16 and op is triton_ops.candidate_logits and device.type == "cpu":
        pytest.skip("Triton's interpreter knows no bfloat16")
    generator = torch.Generator().manual_seed(5)
    # Of a block's places each second one: rows that lie further apart.
    unary = randn(8, num_candidates, dtype=torch.float32, seed=0)[::2]
    hidden = randn(8, rank, dtype=dtype, seed=1)[1::2]
    chosen = [torch.randperm(VOCAB_SIZE, generator=generator)[:num_candidates] for _ in range(8)]
    candidates = torch.stack(chosen)[::2]
    predecessors, successors = (randn(VOCAB_SIZE, rank, dtype=dtype, seed=seed) for seed in (2, 3))
    token_ids = torch.randint(0, VOCAB_SIZE, (4 * num_each,), generator=generator)
    arguments = unary, candidates, hidden, predecessors, successors, token_ids
    there = [own.to(device) for own in arguments]
    there[5] = torch.stack((there[5], there[5] * 0), dim=1)[:, 0]
    there[:3] = [torch.stack((own, own), dim=1).flatten(0, 1)[::2] for own in there[:3]]
    found, by_reference = op(*there).cpu(), reference(*arguments)
    of_rows = torch.arange(4).repeat_interleave(num_each)
    ids = candidates[of_rows]
    pairs = (predecessors[token_ids].double() * hidden[of_rows].double()).unsqueeze(1) * successors[ids].double()
    exact = unary[of_rows].double() + pairs.sum(dim=2)
    assert_error_is_the_definitions(found.gather(1, ids), by_reference.gather(1, ids), exact)
    assert torch.equal(found.scatter(1, ids, OUTSIDE), torch.full((4 * num_each, VOCAB_SIZE), OUTSIDE))
    if op is not reference:
        for row, owner in enumerate(of_rows.tolist()):
            own = slice(owner, owner + 1)
            alone = op(*(part[own] for part in there[:3]), *there[3:5], there[5][row : row + 1])
            assert torch.equal(alone[0].cpu(), found[row])


def test_no_rows_give_no_rows(op_and_device: tuple[Op, torch.device]) -> None:
    op, device = op_and_device
    table = torch.ones(9, 4, device=device)
    unary, candidates = torch.ones(0, 2, device=device), torch.ones(0, 2, dtype=torch.int64, device=device)
    token_ids = torch.ones(0, dtype=torch.int64, device=device)
    assert op(unary, candidates, table[:0], table, table, token_ids).shape == (0, 9)
