"""The Triton launch between projection and attention: against the torch ops it joins, and against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.reference.partial_sums import PartialSums
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rope import RopeTable, apply_rope

triton_ops = pytest.importorskip("kernels.rope")

MAX_MODEL_LEN, NUM_BLOCKS, BLOCK_SIZE, EPS = 50, 6, 4, 1e-5
POSITIONS, SLOTS = torch.tensor([49, 0, 7, 8, 31]), torch.tensor([5, 21, 6, 23, 4])


@dataclass(frozen=True, kw_only=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def queries(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def width(self) -> int:
        return self.queries + 2 * self.num_kv_heads * self.head_dim

    def sizes(self) -> dict[str, int]:
        return {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}


SHAPES = [
    Shape(num_heads=4, num_kv_heads=2, head_dim=16),  # one program's heads
    Shape(
        num_heads=9, num_kv_heads=3, head_dim=96
    ),  # a border of programs in the queries, a head that is no power of 2
    Shape(num_heads=0, num_kv_heads=5, head_dim=32),  # DFlash's context
    # Gemma 4's wide heads, of several programs, and those of layers that read another's keys and values.
    Shape(num_heads=15, num_kv_heads=1, head_dim=256),
    Shape(num_heads=5, num_kv_heads=2, head_dim=512),
    Shape(num_heads=17, num_kv_heads=0, head_dim=256),
    Shape(num_heads=6, num_kv_heads=0, head_dim=512),
]
STORING = [shape for shape in SHAPES if shape.num_kv_heads]


def angles(head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and signed_sin [MAX_MODEL_LEN, head_dim] float32."""
    frequencies = 1e4 ** -(torch.arange(0, head_dim, 2) / head_dim)
    turned = torch.arange(MAX_MODEL_LEN)[:, None] * frequencies
    return torch.cat((turned.cos(), turned.cos()), dim=1), torch.cat((-turned.sin(), turned.sin()), dim=1)


def norms(shape: Shape, dtype: torch.dtype, *, norms_values: bool = False) -> dict[str, Tensor]:
    """Weights that differ between queries, keys and values, and from column to column."""
    columns = torch.arange(shape.head_dim) / shape.head_dim
    weights = {"q_norm": 1.5 - columns} if shape.num_heads else {}
    if shape.num_kv_heads:
        weights |= {"k_norm": 0.3 + columns} | ({"v_norm": 0.7 + columns.square()} if norms_values else {})
    return {name: weight.to(dtype) for name, weight in weights.items()} | {"eps": torch.tensor(EPS)}


def joined(
    qkv: Tensor, shape: Shape, weights: dict[str, Tensor], dtype: torch.dtype, *, turns_first: bool = False
) -> Tensor:
    """Rows [num_rows, width] after norms and rotation by the torch ops, in `dtype`."""
    qkv = qkv.to(dtype)
    if turns_first:
        return normed_heads(joined(qkv, shape, {}, dtype), shape, weights)
    qkv = normed_heads(qkv, shape, weights)
    cos, signed_sin = (table.to(dtype) for table in angles(shape.head_dim))
    num_value_columns = shape.num_kv_heads * shape.head_dim
    table = RopeTable(cos, signed_sin, shape.num_heads + shape.num_kv_heads, num_value_columns)
    return apply_rope(qkv, *table.rows(POSITIONS), table.partner)


def normed_heads(qkv: Tensor, shape: Shape, weights: dict[str, Tensor]) -> Tensor:
    heads = qkv.view(len(qkv), -1, shape.head_dim)
    parts = list(heads.split_with_sizes((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1))
    for index, name in enumerate(("q_norm", "k_norm", "v_norm")):
        if name in weights:
            weight = weights[name].to(torch.promote_types(qkv.dtype, weights[name].dtype))
            parts[index] = normed(parts[index], weight)
    return torch.cat(parts, dim=1).flatten(1)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    if x.dtype != torch.float64:
        return rms_norm(x, weight, torch.tensor(EPS))
    return x * (x.square().mean(dim=-1, keepdim=True) + torch.tensor(EPS).double()).rsqrt() * weight


def rows_of(shape: Shape, dtype: torch.dtype) -> Tensor:
    return torch.randn(len(POSITIONS), shape.width, generator=torch.Generator().manual_seed(1)).to(dtype)


def turn(
    qkv: Tensor | PartialSums,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    shape: Shape,
    weights: dict[str, Any],
) -> Tensor:
    """The queries, of the operation for rows with or without keys."""
    if shape.num_kv_heads:
        queries = triton_ops.rope_and_write(qkv, table, positions, slots, cache, **shape.sizes(), **weights)
    else:
        heads = {"num_heads": shape.num_heads, "head_dim": shape.head_dim}
        queries = triton_ops.rotate(qkv, table, positions, **heads, **weights)
    assert isinstance(queries, Tensor) and queries.shape == (len(positions), shape.queries)
    return queries


def run(
    qkv: Tensor,
    shape: Shape,
    weights: dict[str, Tensor],
    device: torch.device,
    rows: slice = slice(None),
    **order: bool,
) -> tuple[Tensor, Tensor]:
    """(rows, slots of the cache) after the kernel; a row lies in a wider one, which is checked to stay as it is."""
    wide = torch.full((len(qkv), shape.width + 24), 7.0, dtype=qkv.dtype)
    wide[:, : shape.width] = qkv
    wide = wide.to(device)
    cache = torch.full((NUM_BLOCKS, BLOCK_SIZE, shape.width - shape.queries), -5.0, dtype=qkv.dtype, device=device)
    on_device = {name: weight.to(device) for name, weight in weights.items()} | order
    table = RopeTable(*angles(shape.head_dim), 1, 0).compact.to(device)
    positions, slots = POSITIONS[rows].to(device), SLOTS[rows].to(device)
    turn(wide[rows, : shape.width], table, positions, slots, cache, shape, on_device)
    assert bool((wide[:, shape.width :] == 7.0).all())
    return wide[:, : shape.width].cpu(), cache.flatten(0, 1).cpu()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_without_norms_has_the_bits_of_the_torch_ops(kernel_device: torch.device, shape: Shape) -> None:
    """And nothing else is written: other slots, and the row's own keys and values."""
    qkv = rows_of(shape, torch.float32)
    turned, held = run(qkv, shape, {}, kernel_device)
    expected = joined(qkv, shape, {}, torch.float32)
    assert torch.equal(turned, torch.cat((expected[:, : shape.queries], qkv[:, shape.queries :]), dim=1))
    wanted = torch.full_like(held, -5.0)
    wanted[SLOTS] = expected[:, shape.queries :]
    assert torch.equal(held, wanted)


@pytest.mark.parametrize("has_norms", [False, True, torch.float32], ids=["no norms", "norms", "norms of float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rounding_is_no_worse_than_that_of_the_torch_ops(
    kernel_device: torch.device, shape: Shape, dtype: torch.dtype, has_norms: bool | torch.dtype
) -> None:
    norm_dtype = dtype if has_norms is True else has_norms
    qkv, weights = rows_of(shape, dtype), norms(shape, norm_dtype) if norm_dtype else {}
    turned, held = run(qkv, shape, weights, kernel_device)
    found = torch.cat((turned[:, : shape.queries], held[SLOTS]), dim=1)
    exact, plain = (joined(qkv, shape, weights, kind).double() for kind in (torch.float64, dtype))
    limit = 2 * (plain - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
    assert (found.double() - exact).abs().max() <= limit
    values = shape.width - shape.num_kv_heads * shape.head_dim
    assert torch.equal(found[:, values:], qkv[:, values:])


@pytest.mark.parametrize("norm_dtype", [None, torch.float32], ids=["", "norms of float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", STORING, ids=str)
def test_norms_may_be_of_what_is_turned(
    kernel_device: torch.device, shape: Shape, dtype: torch.dtype, norm_dtype: torch.dtype | None
) -> None:
    """Rows before it are longer than one, and their weights are not alike: either order has other results."""
    qkv, weights = rows_of(shape, dtype) * 3, norms(shape, norm_dtype or dtype)
    turned, held = run(qkv, shape, weights, kernel_device, turns_first=True)
    found = torch.cat((turned[:, : shape.queries], held[SLOTS]), dim=1).double()
    exact, plain = (joined(qkv, shape, weights, kind, turns_first=True).double() for kind in (torch.float64, dtype))
    limit = 2 * (plain - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
    assert (found - exact).abs().max() <= limit
    assert (found - joined(qkv, shape, weights, torch.float64)).abs().max() > 50 * limit, "the other order is another"


@pytest.mark.parametrize("norm_dtype", [None, torch.float32], ids=["", "norms of float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", STORING, ids=str)
def test_values_are_normed_and_not_turned(
    kernel_device: torch.device, shape: Shape, dtype: torch.dtype, norm_dtype: torch.dtype | None
) -> None:
    """Beside queries and keys that have the bits they have without it."""
    qkv, weights = rows_of(shape, dtype), norms(shape, norm_dtype or dtype, norms_values=True)
    turned, held = run(qkv, shape, weights, kernel_device)
    plain_turned, plain_held = run(qkv, shape, norms(shape, norm_dtype or dtype), kernel_device)
    keys = shape.num_kv_heads * shape.head_dim
    assert torch.equal(turned, plain_turned) and torch.equal(held[:, :keys], plain_held[:, :keys])
    heads = qkv[:, shape.queries + keys :].unflatten(1, (-1, shape.head_dim))
    plain = normed(heads, weights["v_norm"]).flatten(1).double()
    exact = normed(heads.double(), weights["v_norm"].double()).flatten(1)
    limit = 2 * (plain - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
    assert (held[SLOTS, keys:].double() - exact).abs().max() <= limit


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if not shape.num_kv_heads], ids=str)
def test_queries_alone_have_the_bits_they_have_beside_keys(kernel_device: torch.device, shape: Shape) -> None:
    beside = Shape(num_heads=shape.num_heads, num_kv_heads=2, head_dim=shape.head_dim)
    qkv = rows_of(beside, torch.float32)
    turned, _ = run(qkv, beside, norms(beside, torch.float32), kernel_device)
    alone, _ = run(qkv[:, : shape.width], shape, norms(shape, torch.float32), kernel_device)
    assert torch.equal(alone, turned[:, : shape.width])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [SHAPES[1], *SHAPES[4:]], ids=str)
def test_a_row_has_the_bits_it_has_alone(kernel_device: torch.device, shape: Shape, dtype: torch.dtype) -> None:
    qkv, weights = rows_of(shape, dtype), norms(shape, dtype, norms_values=True)
    turned, held = run(qkv, shape, weights, kernel_device)
    for row in (0, 3):
        one_turned, one_held = run(qkv, shape, weights, kernel_device, slice(row, row + 1))
        assert torch.equal(one_turned[row], turned[row]) and torch.equal(one_held[SLOTS[row]], held[SLOTS[row]])


def test_keys_and_values_alone_have_the_bits_they_have_beside_queries(kernel_device: torch.device) -> None:
    with_queries = Shape(num_heads=3, num_kv_heads=2, head_dim=32)
    alone = Shape(num_heads=0, num_kv_heads=2, head_dim=32)
    qkv = rows_of(with_queries, torch.float32)
    _, held = run(qkv, with_queries, norms(with_queries, torch.float32), kernel_device)
    kv = qkv[:, with_queries.queries :]
    _, held_alone = run(kv, alone, norms(alone, torch.float32), kernel_device)
    assert torch.equal(held, held_alone)


def test_rows_of_nobody_leave_the_null_block_as_it_is(kernel_device: torch.device) -> None:
    """What they hold comes from memory that nobody wrote. Once it was no number, the null block passed it on.

    Drafts of PARD have scratch rows behind the blocks of their request, in one tile with rows that count: their keys
    are masked, and their values, found in the null block, were multiplied by 0.
    """
    shape = SHAPES[0]
    qkv = rows_of(shape, torch.float32)
    qkv[1:3] = torch.nan
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "SLOTS", torch.tensor([5, 0, BLOCK_SIZE - 1, 23, BLOCK_SIZE]))
        _, held = run(qkv, shape, {}, kernel_device)
    assert bool((held[:BLOCK_SIZE] == -5.0).all())
    assert bool((held[[5, 23, BLOCK_SIZE]] != -5.0).any(dim=1).all()) and bool(held.isfinite().all())


def test_a_launch_of_no_rows_does_nothing(kernel_device: torch.device) -> None:
    qkv = rows_of(SHAPES[0], torch.float32)
    turned, held = run(qkv, SHAPES[0], {}, kernel_device, slice(0, 0))
    assert torch.equal(turned, qkv) and bool((held == -5.0).all())
