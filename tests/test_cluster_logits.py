"""Logits of the tokens of chosen clusters: kernels against the definition in float64, and rows on their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.cpu.cluster_logits import cluster_logits as on_cpu
from kernels.reference.cluster_logits import OUTSIDE
from kernels.reference.cluster_logits import cluster_logits as reference
from tests.seeded import randn
from tests.test_rms_norm_kernel import assert_error_is_the_definitions

triton_ops = pytest.importorskip("kernels.cluster_logits")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
Op = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(params=["reference", "on a CPU", "Triton"])
def op_and_device(request: pytest.FixtureRequest, kernel_device: torch.device) -> tuple[Op, torch.device]:
    if request.param == "Triton":
        return triton_ops.cluster_logits, kernel_device
    return (reference if request.param == "reference" else on_cpu), torch.device("cpu")


@pytest.mark.parametrize(("size", "hidden"), [(40, 300), (1, 16), (32, 128)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_of_chosen_clusters_have_their_logits_and_others_none(
    op_and_device: tuple[Op, torch.device], dtype: torch.dtype, size: int, hidden: int
) -> None:
    op, device = op_and_device
    if dtype == torch.bfloat16 and op is triton_ops.cluster_logits and device.type == "cpu":
        pytest.skip("Triton's interpreter knows no bfloat16")
    generator = torch.Generator().manual_seed(2)
    states = randn(5, hidden + 9, dtype=dtype, seed=0)[:, 9:]  # rows that lie further apart
    table = randn(7 * size, hidden, dtype=dtype, seed=1).view(7, size, hidden)
    token_ids = torch.randperm(7 * size, generator=generator).view(7, size)
    chosen = torch.stack([torch.randperm(7, generator=generator)[:3] for _ in range(5)])
    arguments = [own.to(device) for own in (states, table, token_ids, chosen)]
    found = op(*arguments)
    ids = token_ids[chosen].flatten(1)
    exact = torch.einsum("rh,rcth->rct", states.double(), table[chosen].double()).flatten(1)
    by_reference = reference(states, table, token_ids, chosen)
    assert_error_is_the_definitions(found.cpu().gather(1, ids), by_reference.gather(1, ids), exact)
    assert found.dtype == torch.float32 and found.is_contiguous()
    assert torch.equal(found.cpu().scatter(1, ids, OUTSIDE), torch.full((5, 7 * size), OUTSIDE))
    if op is not reference:
        for row in range(5):
            own = slice(row, row + 1)
            assert torch.equal(op(arguments[0][own], *arguments[1:3], arguments[3][own])[0], found[row])


def test_no_rows_give_no_rows(op_and_device: tuple[Op, torch.device]) -> None:
    op, device = op_and_device
    states, table = torch.ones(0, 8, device=device), torch.ones(3, 2, 8, device=device)
    token_ids, chosen = torch.arange(6, device=device).view(3, 2), torch.zeros(0, 2, dtype=torch.int64, device=device)
    assert op(states, table, token_ids, chosen).shape == (0, 6)
