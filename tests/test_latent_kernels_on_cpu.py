"""Latent attention's kernels of a CPU, but for the attention: products of heads, and the cache's new rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cpu.experts_linear import PanelsOfExperts
from kernels.cpu.heads_linear import linear_of_heads
from kernels.cpu.latent_rows import rotate_and_store_latents
from kernels.cpu.linear import linear
from kernels.cpu.panels import Panels, can_pack, pack
from kernels.reference.latent_rows import rotate_latents
from kernels.reference.rope import RopeTable
from tests.seeded import randn
from tests.test_latent_kernels import UNTOUCHED, memory_of, within_wider
from tests.test_rope_kernel import MAX_MODEL_LEN, angles

pytestmark = pytest.mark.skipif(not can_pack(torch.zeros(16, 16)), reason="this CPU has no products from panels")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
HEADS, UNTURNED, TURNED, RANK, BLOCK_SIZE = 3, 10, 8, 24, 4


def panels(weight: Tensor) -> Panels:
    packed = pack(weight)
    assert isinstance(packed, Panels)
    return packed


@DTYPES
@pytest.mark.parametrize("num_rows", [0, 1, 7, 40])
def test_a_heads_product_has_the_bits_of_it_alone(dtype: torch.dtype, num_rows: int) -> None:
    """Of rows and heads that lie apart, into memory whose rest stays as it is."""
    weights = [panels(randn(40, 24, dtype=dtype, seed=head)) for head in range(HEADS)]
    x = within_wider(randn(num_rows, HEADS, 24, dtype=dtype, seed=9))
    out = within_wider(x.new_full((num_rows, HEADS, 40), torch.nan))
    linear_of_heads(x, PanelsOfExperts(weights), out)
    for head, weight in enumerate(weights):
        assert torch.equal(out[:, head], linear(x[:, head].contiguous(), weight))
    out.fill_(UNTOUCHED)
    assert bool((memory_of(out) == UNTOUCHED).all())


def moved(rows: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(what is turned of these of 9 rows, the cache, and both by the definition in float32)."""
    cos, signed_sin = angles(TURNED)
    table, rounded = (RopeTable(cos.to(own), signed_sin.to(own), HEADS + 1, 0) for own in (torch.float32, dtype))
    queries = within_wider(randn(9, HEADS, UNTURNED + TURNED, dtype=dtype))[rows]
    latents = within_wider(randn(9, 1, RANK + TURNED, dtype=dtype, seed=1))[rows, 0]
    norm, eps = randn(RANK, dtype=dtype, seed=2), torch.tensor(1e-6)
    positions, slots = (torch.arange(9) * 5 % MAX_MODEL_LEN)[rows], (BLOCK_SIZE + torch.arange(9) * 2)[rows]
    cache = torch.full((6, BLOCK_SIZE, RANK + TURNED), UNTOUCHED, dtype=dtype)
    turned = within_wider(queries.new_zeros(len(queries), HEADS, TURNED))
    rotate_and_store_latents(queries, latents, rounded.compact, positions, slots, cache, turned, norm=norm, eps=eps)
    cos, sin = table.rows(positions)
    exact = rotate_latents(queries.float(), latents.float(), norm.float(), eps, cos, sin, table.partner)
    expected = torch.full_like(cache, UNTOUCHED, dtype=torch.float32)
    expected.flatten(0, 1)[slots] = exact[1]
    return turned.contiguous(), cache, exact[0], expected


@DTYPES
def test_rows_become_what_the_definition_says_and_no_other_slot_is_written(dtype: torch.dtype) -> None:
    turned, cache, exact, expected = moved(slice(None), dtype)
    rounding = 4 * torch.finfo(dtype).eps  # of the angles, and of results
    torch.testing.assert_close(turned.float(), exact, rtol=rounding, atol=rounding)
    torch.testing.assert_close(cache.float(), expected, rtol=rounding, atol=rounding)
    assert torch.equal(cache == UNTOUCHED, expected == UNTOUCHED)


@DTYPES
def test_a_row_has_the_same_bits_alone(dtype: torch.dtype) -> None:
    turned, cache, *_ = moved(slice(None), dtype)
    for row in (0, 4, 8):
        alone, own, *_ = moved(slice(row, row + 1), dtype)
        assert torch.equal(alone[0], turned[row])
        slot = BLOCK_SIZE + 2 * row
        assert torch.equal(own.flatten(0, 1)[slot], cache.flatten(0, 1)[slot])
