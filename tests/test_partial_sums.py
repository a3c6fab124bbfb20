"""A product left in partial sums is the product, bit for bit, for whatever launch adds them up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import linear_plan
from kernels.quantized_weight import QuantizedWeight, num_groups, quantize
from kernels.reference.partial_sums import PartialSums
from tests.product_errors import assert_error_is_torchs
from tests.seeded import randn
from tests.test_linear_kernel import rounding_between_steps, small_integers
from tests.test_rope_kernel import BLOCK_SIZE, NUM_BLOCKS, POSITIONS, SHAPES, SLOTS, angles, norms, turn

kernel = pytest.importorskip("kernels.linear")
add_up = pytest.importorskip("kernels.partial_sums").add_up
norm_kernels = pytest.importorskip("kernels.rms_norm")
rope = pytest.importorskip("kernels.rope")

DTYPES = [torch.float32, torch.float16]
WIDTHS = (40, 64)  # of one tile, whose sums small_cuts cuts in two
EPS = torch.tensor(1e-5)


def columns(dtype: torch.dtype) -> int:
    """In_features of two partial sums."""
    return 4 * linear_plan.LINE // dtype.itemsize


def both(
    device: torch.device, num_rows: int, width: int, dtype: torch.dtype, *, has_bias: bool = True, held: Any = None
) -> tuple[PartialSums, Tensor]:
    """A product left in parts, and the same one whole."""
    x, weight = (randn(count, columns(dtype), dtype=dtype, seed=count).to(device) for count in (num_rows, width))
    bias = randn(width, dtype=dtype, seed=2).to(device) if has_bias else None
    weight = weight if held is None else held(weight)
    left = kernel.linear_in_parts(x, weight, bias)
    assert isinstance(left, PartialSums) and left.shape == (num_rows, width) and len(left.parts) == 2
    return left, kernel.linear(x, weight, bias)


def in_groups(weight: QuantizedWeight, group_size: int) -> QuantizedWeight:
    groups = num_groups(weight.shape[1], group_size)
    return replace(weight, scales=weight.scales.expand(-1, groups).contiguous(), group_size=group_size)


HELD: dict[str, Callable[[Tensor], Any] | None] = {
    "dense": None,
    "a scale an output": lambda weight: quantize(weight, "int8").in_words(),
    "scales along the sum": lambda weight: in_groups(quantize(weight, "int8").in_words(), 32),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "with a bias"])
def test_added_up_parts_are_the_product(
    kernel_device: torch.device, small_cuts: None, dtype: torch.dtype, held: str, has_bias: bool
) -> None:
    """And as near as its definition says, which fuses no scale with a bias; and so is their sum with a residual."""
    for num_rows, width in ((1, WIDTHS[0]), (5, WIDTHS[1]), (50, WIDTHS[0])):
        left, whole = both(kernel_device, num_rows, width, dtype, has_bias=has_bias, held=HELD[held])
        assert torch.equal(add_up(left), whole)
        residual = randn(num_rows, 2 * width, dtype=dtype, seed=3).to(kernel_device)[:, width:]
        assert torch.equal(add_up(left, residual), (whole.float() + residual.float()).to(dtype))
        exact = left.parts.double().sum(0)
        exact = exact if left.scales is None else exact * left.scales.double().squeeze(1)
        exact = exact if left.bias is None else exact + left.bias.double()
        assert_error_is_torchs(whole, left.total().cpu(), exact.cpu())
        assert (left.scales is not None) == (held == "a scale an output")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize(("num_rows", "width"), [(1, WIDTHS[0]), (5, WIDTHS[1])])
def test_norms_of_parts_are_norms_of_the_product(
    kernel_device: torch.device, small_cuts: None, dtype: torch.dtype, num_rows: int, width: int, held: str
) -> None:
    left, whole = both(kernel_device, num_rows, width, dtype, has_bias=num_rows > 1, held=HELD[held])
    residual = randn(num_rows, width, dtype=dtype, seed=3).to(kernel_device)
    weight, x_weight = (randn(width, dtype=dtype, seed=seed).to(kernel_device) for seed in (4, 5))
    norm = (residual, weight, EPS.to(kernel_device))
    for own in ((), (x_weight,)):
        found, expected = (norm_kernels.add_rms_norm(x, *norm, *own) for x in (left, whole))
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    for add in (norm_kernels.add_normed, norm_kernels.sum_beside_rms_norm):
        assert torch.equal(add(left, *norm), add(whole, *norm))


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_rotated_and_cached_of_parts_is_that_of_the_product(
    kernel_device: torch.device, dtype: torch.dtype, has_norms: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_plan, "MIN_STEPS", 1)
    for shape in SHAPES:
        weights = norms(shape, dtype, norms_values=shape.head_dim > 128) if has_norms else {}
        cos, signed_sin = angles(shape.head_dim)
        half = shape.head_dim // 2
        table = torch.cat((cos[:, :half], signed_sin[:, half:]), dim=1)
        there: dict[str, Tensor] = {name: value.to(kernel_device) for name, value in weights.items()}
        x = randn(len(POSITIONS), columns(dtype), dtype=dtype).to(kernel_device)
        weight = randn(shape.width, columns(dtype), dtype=dtype, seed=1).to(kernel_device)
        found = []
        for qkv in (kernel.linear_in_parts(x, weight), kernel.linear(x, weight)):
            cache = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 2 * shape.num_kv_heads * shape.head_dim, dtype=dtype)
            cache = cache.to(kernel_device)
            places = (tensor.to(kernel_device) for tensor in (table, POSITIONS, SLOTS))
            queries = turn(qkv, *places, cache, shape, there)
            found.append((queries, cache))
            assert cache.any() == (shape.num_kv_heads > 0)
            assert isinstance(qkv, PartialSums) == (len(found) == 1)
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_a_row_keeps_its_bits_whoever_adds_up_its_parts(kernel_device: torch.device, small_cuts: None) -> None:
    """The launch behind the product, several programs of the product, or one that finds all parts."""
    dtype, width = torch.float16, 64
    weight = small_integers(width, columns(dtype), dtype=dtype).to(kernel_device)
    rows = rounding_between_steps(300, columns(dtype), dtype=dtype).to(kernel_device)

    def product(count: int) -> tuple[Tensor, bool]:
        left = kernel.linear_in_parts(rows[-count:], weight)
        return (add_up(left), True) if isinstance(left, PartialSums) else (left, False)

    alone, _ = product(1)
    kinds = set()
    for count in (2, 17, 64, 130, 300):
        found, is_left = product(count)
        assert torch.equal(found[-1:], alone) and torch.equal(kernel.linear(rows[-count:], weight)[-1:], alone), count
        kinds.add(is_left)
    assert kinds == {True, False}


def test_no_rows_are_left_whole(kernel_device: torch.device, small_cuts: None) -> None:
    weight = torch.ones(64, columns(torch.float32), device=kernel_device)
    found = kernel.linear_in_parts(weight[:0], weight)
    assert isinstance(found, Tensor) and found.shape == (0, 64)
    nothing = PartialSums(parts=weight.new_empty(2, 0, 64), scales=None, bias=None, dtype=torch.float32)
    assert add_up(nothing).shape == (0, 64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("is_quantized", [False, True], ids=["", "quantized"])
def test_rows_of_an_8b_model_keep_their_bits_between_products(dtype: torch.dtype, is_quantized: bool) -> None:
    """No interpreter can tell: a norm's sum, too, is added in one order, whatever it reads the rows from."""
    hidden, inner, count = 4096, 14336, 1088 if dtype == torch.bfloat16 else 130

    def there(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device="cuda") * scale).to(dtype)

    weights = there(hidden, inner, scale=inner**-0.5), there(hidden, hidden, scale=0.02), there(6144, hidden)
    down, o, qkv = (quantize(weight, "int8").in_words() if is_quantized else weight for weight in weights)
    norm, eps, head_norm, bias = there(hidden), EPS.cuda(), there(128), there(hidden)
    x, residual, table = there(count, inner), there(count, hidden, scale=20.0), torch.randn(count, 128, device="cuda")
    kinds = set()

    def layer(num: int) -> tuple[Tensor, ...]:
        left = kernel.linear_in_parts(x[-num:], down, bias)
        kinds.add(isinstance(left, PartialSums))
        normed, total = norm_kernels.add_rms_norm(left, residual[-num:], norm, eps)
        positions = torch.arange(count - num, count, device="cuda")
        cache = torch.zeros(count // 16 + 2, 16, 2 * 1024, dtype=dtype, device="cuda")
        queries = rope.rope_and_write(
            kernel.linear_in_parts(normed, qkv),
            table,
            positions,
            positions + 16,
            cache,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            q_norm=head_norm,
            k_norm=head_norm,
            eps=eps,
        )
        attended, total = norm_kernels.add_rms_norm(kernel.linear_in_parts(queries, o), total, norm, eps)
        return normed[-1], total[-1], queries[-1], attended[-1], cache.flatten(0, 1)[count + 15]

    alone = layer(1)
    for num in (2, 8, 17, 33, 64, 65, 129, 130, 257, 520, 1088):
        if num <= count:
            assert all(torch.equal(*pair) for pair in zip(layer(num), alone, strict=True)), num
    assert True in kinds and (False in kinds or dtype == torch.float32)
