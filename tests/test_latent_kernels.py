"""Latent attention's own kernels beside the attention: products of heads, and rows on their way into the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import linear_plan
from kernels.reference.heads_linear import linear_of_heads as products_by_torch
from kernels.reference.latent_rows import rotate_latents
from kernels.reference.rope import RopeTable, apply_rope
from tests.product_errors import assert_error_is_torchs
from tests.seeded import randn
from tests.test_linear_kernel import rounding_between_steps, small_integers
from tests.test_rope_kernel import MAX_MODEL_LEN, angles

heads = pytest.importorskip("kernels.heads_linear")
latent_rows = pytest.importorskip("kernels.latent_rows")
linears = pytest.importorskip("kernels.linear")

ROWS = (1, 3, 17, 65, 130)
UNTOUCHED = 7.0


def within_wider(rows: Tensor) -> Tensor:
    """The same [num_rows, num_heads, width], with room between heads and between rows."""
    num_rows, num_heads, width = rows.shape
    wider = rows.new_full((num_rows, num_heads + 1, width + 24), UNTOUCHED)
    wider[:, 1:, 8 : width + 8] = rows
    return wider[:, 1:, 8 : width + 8]


def memory_of(view: Tensor) -> Tensor:
    """All that within_wider has made for it, [num_rows, num_heads + 1, width + 24]."""
    assert view._base is not None
    return view._base


# --- products of heads ----------------------------------------------------------------------------------------------


def product(x: Tensor, weight: Tensor, num_outputs: int) -> Tensor:
    """Of rows and heads that lie apart, into memory whose rest has to stay as it is."""
    out = within_wider(x.new_full((*x.shape[:2], num_outputs), torch.nan))
    heads.linear_of_heads(within_wider(x), weight, out)
    memory = memory_of(out).clone()
    memory[:, 1:, 8 : num_outputs + 8] = UNTOUCHED
    assert bool((memory == UNTOUCHED).all())
    assert out.isfinite().all()
    return out.contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 70, 101), (17, 3, 48, 352), (33, 1, 130, 64)])  # rows, heads, outputs, inputs
def test_the_error_of_a_heads_product_is_that_of_torch(
    kernel_device: torch.device, small_cuts: None, dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    if dtype == torch.bfloat16 and kernel_device.type == "cpu":
        pytest.skip("Triton's interpreter knows no bfloat16")
    num_rows, num_heads, num_outputs, num_inputs = shape
    weight = randn(num_heads * num_outputs, num_inputs, dtype=dtype)
    x = randn(num_rows, num_heads, num_inputs, dtype=dtype, seed=1)
    found = product(x.to(kernel_device), weight.to(kernel_device), num_outputs)
    by_torch = products_by_torch(x, weight.chunk(num_heads), None)
    exact = products_by_torch(x.double(), weight.double().chunk(num_heads), None)
    assert_error_is_torchs(found, by_torch, exact)


@pytest.mark.parametrize(
    ("dtype", "wide_rows"),
    [(torch.float32, 512), (torch.float16, 512), (torch.float16, 100)],
    ids=["float32", "float16", "float16, two tiles of features to a program"],
)
def test_a_rows_products_keep_their_bits_among_any_number_of_rows(
    kernel_device: torch.device, small_cuts: None, dtype: torch.dtype, wide_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that kernels/linear.py gives it for the head's weight; sums are cut in two."""
    monkeypatch.setattr(linear_plan, "LATE_WIDE_ROWS", wide_rows)
    num_inputs = 4 * linear_plan.LINE // dtype.itemsize - 3
    weight = small_integers(2 * 64, num_inputs, dtype=dtype).to(kernel_device)
    rows = rounding_between_steps(max(ROWS), 2, num_inputs, dtype=dtype).to(kernel_device)
    alone = product(rows[-1:], weight, 64)[0]
    assert torch.equal(alone, torch.stack([linears.linear(rows[-1:, h], weight.chunk(2)[h])[0] for h in range(2)]))
    for num_rows in ROWS:
        launch, places = rows[:num_rows].clone(), [0, num_rows // 2, num_rows - 1]
        launch[places] = rows[-1]
        for result in product(launch, weight, 64)[places]:
            assert torch.equal(result, alone), f"another result among {num_rows} rows"
    monkeypatch.setattr(linear_plan, "PROGRAMS", 1)  # one sum from end to end: the data tell orders apart
    assert dtype == torch.float16 or not torch.equal(product(rows[-1:], weight, 64)[0], alone)


def test_stages_are_no_more_than_steps_and_always_some_under_way() -> None:
    for num_rows in (1, 17, 65, 513, 8192):
        for num_outputs, num_inputs in ((512, 64), (512, 128), (512, 192), (128, 512), (256, 2048)):
            plan = linear_plan.plan_linear(
                num_rows, num_outputs, num_inputs, element_size=2, gated=False, of_experts=True
            )
            stages = linear_plan.stages_of_short_sums(plan)
            assert 3 <= stages <= plan.num_stages and stages <= max(num_inputs // plan.block_k, 2) + 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_heads", "num_outputs", "num_inputs"), [(20, 512, 192), (20, 256, 512), (128, 512, 128)])
def test_a_rows_products_of_a_large_model_keep_their_bits(
    num_heads: int, num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> None:
    """The instructions for few and for many tokens agree in every bit; no interpreter can tell."""
    weight = (torch.randn(num_heads * num_outputs, num_inputs, device="cuda") / num_inputs**0.5).to(dtype)
    rows = torch.randn(1088, num_heads, num_inputs, device="cuda").to(dtype)
    alone = product(rows[-1:], weight, num_outputs)[0]
    for num_rows in (*ROWS, 520, 1088):
        launch, places = rows[:num_rows].clone(), [0, num_rows // 2, num_rows - 1]
        launch[places] = rows[-1]
        for result in product(launch, weight, num_outputs)[places]:
            assert torch.equal(result, alone), f"another result among {num_rows} rows"


# --- rows on their way into the cache -------------------------------------------------------------------------------

NUM_BLOCKS, BLOCK_SIZE, EPS = 40, 4, 1e-5
SHAPES = {  # heads, elements of a query that stay, that are turned, rank
    "few heads": (5, 8, 16, 24),
    "heads of two programs": (40, 24, 8, 16),
    "nothing of a query stays": (1, 0, 48, 100),
}
Shape = tuple[int, int, int, int]
POSITIONS = torch.arange(max(ROWS)) * 7 % MAX_MODEL_LEN
SLOTS = BLOCK_SIZE + torch.arange(max(ROWS)) * 11 % ((NUM_BLOCKS - 1) * BLOCK_SIZE)


def inputs(shape: Shape, dtype: torch.dtype, num_rows: int = 5) -> dict[str, Tensor]:
    num_heads, unturned, turned, rank = shape
    return {
        "queries": randn(num_rows, num_heads, unturned + turned, dtype=dtype, seed=1),
        "latents": randn(num_rows, rank + turned, dtype=dtype, seed=2) * 3,
        "norm": (torch.arange(rank) / rank + 0.3).to(dtype),
    }


def rotations(own: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """What the references take: cosines, signed sines and partners of all heads and the key."""
    num_rows, num_heads, _ = own["queries"].shape
    cos, signed_sin = (table.to(dtype) for table in angles(own["latents"].shape[1] - len(own["norm"])))
    table = RopeTable(cos, signed_sin, num_heads + 1, 0)
    return (*table.rows(POSITIONS[:num_rows]), table.partner)


def by_torch(own: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What is turned of the queries, and the cache's rows."""
    queries, latents, norm = own["queries"], own["latents"], own["norm"]
    return rotate_latents(queries, latents, norm, torch.tensor(EPS), *rotations(own, latents.dtype))


def exactly(own: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The same in float64, which the reference's norm does not know."""
    queries, latents, norm = (own[name].double() for name in ("queries", "latents", "norm"))
    latent, key = latents[:, : len(norm)], latents[:, len(norm) :]
    normed = latent * (latent.square().mean(dim=-1, keepdim=True) + EPS).rsqrt() * norm
    apart = torch.cat((queries[:, :, -key.shape[1] :], key[:, None]), dim=1)
    turned = apply_rope(apart.flatten(1), *rotations(own, torch.float64)).view(apart.shape)
    return turned[:, :-1], torch.cat((normed, turned[:, -1]), dim=1)


def run(own: dict[str, Tensor], device: torch.device, slots: Tensor = SLOTS) -> tuple[Tensor, Tensor]:
    """(what is turned, slots of the cache); all lie in wider memory, which is checked to stay as it is."""
    queries, latents, norm = (own[name].to(device) for name in ("queries", "latents", "norm"))
    num_rows, width = latents.shape
    turned_width = width - len(norm)
    cache = torch.full((NUM_BLOCKS, BLOCK_SIZE, width), -5.0, dtype=latents.dtype, device=device)
    turned = within_wider(queries[:, :, :turned_width])
    strided = within_wider(queries), within_wider(latents[:, None])[:, 0]
    rows = (values[:num_rows].to(device) for values in (POSITIONS, slots))
    table = RopeTable(*angles(turned_width), 1, 0).compact.to(device)
    weights: dict[str, Any] = {"norm": norm, "eps": torch.tensor(EPS, device=device)}
    latent_rows.rotate_and_store_latents(*strided, table, *rows, cache, turned, **weights)
    torch.testing.assert_close(strided, (queries, latents), rtol=0, atol=0, equal_nan=True)
    memory = memory_of(turned).clone()
    memory[:, 1:, 8 : turned_width + 8] = UNTOUCHED
    assert bool((memory == UNTOUCHED).all())
    return turned.cpu().contiguous(), cache.flatten(0, 1).cpu()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rotations_in_float32_have_the_bits_of_the_torch_ops(kernel_device: torch.device, shape: Shape) -> None:
    """And nothing is written to other slots."""
    own, rank = inputs(shape, torch.float32), shape[-1]
    turned, held = run(own, kernel_device)
    wanted, cached = by_torch(own)
    assert torch.equal(turned, wanted)
    slots = SLOTS[: len(turned)]
    assert torch.equal(held[slots, rank:], cached[:, rank:])
    held[slots] = -5.0
    assert bool((held == -5.0).all())


@pytest.mark.parametrize("norm_dtype", [None, torch.float32], ids=["weights of their dtype", "of float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rows_are_as_near_as_those_of_the_torch_ops(
    kernel_device: torch.device, shape: Shape, dtype: torch.dtype, norm_dtype: torch.dtype | None
) -> None:
    own = inputs(shape, dtype)
    if norm_dtype is not None:
        own["norm"] = own["norm"].to(norm_dtype)
    turned, held = run(own, kernel_device)
    pairs = zip((turned, held[SLOTS[: len(turned)]]), by_torch(own), exactly(own), strict=True)
    for found, plain, exact in pairs:
        assert_error_is_torchs(found, plain, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_has_the_bits_it_has_alone(kernel_device: torch.device, dtype: torch.dtype) -> None:
    own = inputs(SHAPES["few heads"], dtype, max(ROWS))
    turned, held = run(own, kernel_device)
    for num_rows in ROWS:
        some = {name: values if name == "norm" else values[:num_rows] for name, values in own.items()}
        some_turned, some_held = run(some, kernel_device)
        slots = SLOTS[:num_rows]
        assert torch.equal(some_turned, turned[:num_rows]) and torch.equal(some_held[slots], held[slots])


def test_rows_of_nobody_leave_the_null_block_as_it_is(kernel_device: torch.device) -> None:
    """What they hold comes from memory that nobody wrote: it may be no number."""
    own = inputs(SHAPES["few heads"], torch.float32)
    own["latents"][1:3] = torch.nan
    slots = torch.tensor([5, 0, BLOCK_SIZE - 1, 23, BLOCK_SIZE])
    _, held = run(own, kernel_device, slots)
    assert bool((held[:BLOCK_SIZE] == -5.0).all())
    assert bool((held[[5, 23, BLOCK_SIZE]] != -5.0).any(dim=1).all()) and bool(held.isfinite().all())


def test_launches_of_no_rows_do_nothing(kernel_device: torch.device) -> None:
    own = inputs(SHAPES["few heads"], torch.float32, 0)
    turned, held = run(own, kernel_device)
    assert len(turned) == 0 and bool((held == -5.0).all())
    nothing = torch.ones(0, 2, 8, device=kernel_device)
    heads.linear_of_heads(nothing, torch.ones(12, 8, device=kernel_device), nothing[:, :, :6])
