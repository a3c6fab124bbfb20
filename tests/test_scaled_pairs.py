"""Where a CPU multiplies pairs of bfloat16, products with quantized weights are sums of those, which are scaled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernels.cpu.panels import multiplies_and_adds, multiplies_pairs, pack, unpack
from kernels.quantized_weight import QuantizedWeight
from tests.product_bits import assert_panels_of_every_width_agree
from tests.product_errors import roundings_of
from tests.seeded import randn
from tests.test_quantized_weight import random_weight
from tests.test_weights_in_4_bits import random_codes

pytestmark = pytest.mark.skipif(
    not (multiplies_and_adds() and multiplies_pairs()), reason="this CPU has no instruction for pairs"
)

MAKE: dict[str, Callable[..., QuantizedWeight]] = {
    "int8": lambda *shape, **kind: random_weight(*shape, "int8", **kind),
    "fp8": lambda *shape, **kind: random_weight(*shape, "fp8", **kind),
    "int4": lambda *shape, **kind: random_codes(*shape, "int4", **kind),
    "int4 with zero points": lambda *shape, **kind: random_codes(*shape, "int4", has_zeros=True, **kind),
    "fp4": lambda *shape, **kind: random_codes(*shape, "fp4", **kind),
}
of_every_kind = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


@of_every_kind
def test_a_row_has_the_bits_of_any_company_and_no_width_of_panels_moves_them(make: Callable[..., Any]) -> None:
    from kernels.cpu.linear import linear

    shapes = [(130, 96, None), (64, 192, 64), (33, 1056, None), (48, 320, 128), (40, 352, 32), (200, 3072, 1024)]
    for out_features, in_features, group_size in shapes:
        weight = make(out_features, in_features, group_size=group_size, dtype=torch.bfloat16)
        packed, bias = pack(weight), randn(out_features, dtype=torch.bfloat16)
        assert torch.equal(unpack(packed), weight.dense())
        x = randn(70, in_features, dtype=torch.bfloat16, seed=2)
        together = linear(x, packed, bias, out_dtype=torch.float32)
        exact = F.linear(x.double(), weight.exact().double(), bias.double())
        assert (together - exact).abs().max() <= roundings_of(in_features) * exact.abs().max()
        assert torch.equal(linear(x, packed, bias), together.bfloat16())
        for count in (1, 2, 5, 6, 7, 11, 18, 19, 33):
            assert torch.equal(linear(x[-count:], packed, bias, out_dtype=torch.float32), together[-count:]), count
    assert_panels_of_every_width_agree(weight, x)


@of_every_kind
def test_every_number_is_exact(make: Callable[..., Any]) -> None:
    """Of rows that look at one input each."""
    from kernels.cpu.linear import linear

    weight = make(64, 256, group_size=32, dtype=torch.bfloat16)
    for rows in torch.eye(256, dtype=torch.bfloat16).split([1, 4, 12, 239]):
        found = linear(rows, pack(weight), out_dtype=torch.float32)
        assert torch.equal(found, rows.float() @ weight.exact().T)


@pytest.mark.parametrize("in_features", [97, 98])
def test_an_odd_number_of_inputs_has_a_product_too(in_features: int) -> None:
    from kernels.cpu.linear import linear

    weight = random_weight(40, in_features, "int8", dtype=torch.bfloat16)
    x = randn(20, in_features, dtype=torch.bfloat16)
    exact = F.linear(x.double(), weight.exact().double())
    found = linear(x, pack(weight), out_dtype=torch.float32)
    assert (found - exact).abs().max() <= roundings_of(in_features) * exact.abs().max()
