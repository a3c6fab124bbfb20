"""The ranks' parts of a product, added up: the reference, Triton's kernel and a CPU's against a plain loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.sum_of_ranks import sum_of_ranks as on_cpu
from kernels.reference.sum_of_ranks import sum_of_ranks as reference

triton_ops = pytest.importorskip("kernels.sum_of_ranks")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@settings(max_examples=40)
@given(
    num_ranks=st.integers(1, 8),
    num_rows=st.integers(0, 5),
    width=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_ranks_are_added_in_their_order(
    kernel_device: torch.device, num_ranks: int, num_rows: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    """Numbers of very unlike size, so that another order gives other bits."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-4, 4, (num_ranks, num_rows, width), generator=generator)
    parts = (torch.randn(num_ranks, num_rows, width, generator=generator) * sizes).to(dtype)
    wanted = torch.zeros(num_rows, width)
    for rank in range(num_ranks):
        wanted = wanted + parts[rank].float() if rank else parts[rank].float()
    found = [reference(parts), on_cpu(parts)]
    if dtype != torch.bfloat16 or kernel_device.type == "cuda":  # Triton's interpreter knows no bfloat16
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_ops, "BLOCK", 32)
            found.append(triton_ops.sum_of_ranks(parts.to(kernel_device)).cpu())
    for sums in found:
        assert sums.dtype == dtype and torch.equal(sums, wanted.to(dtype))


def test_another_order_would_have_other_bits() -> None:
    parts = torch.tensor([1.0, 1e8, -1e8]).view(3, 1, 1)
    assert reference(parts).item() == 0.0 != reference(parts.flip(0)).item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_of_a_cpu_share_the_numbers(dtype: torch.dtype) -> None:
    """In several parts, none of which ends where a row does."""
    parts = torch.randn(3, 37, 1111, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(on_cpu(parts), reference(parts))
    finally:
        torch.set_num_threads(before)
