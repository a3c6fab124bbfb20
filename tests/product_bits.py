"""A product's bits are a row's own: whatever other rows share its launch, and however a weight is laid out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu import panels
from kernels.cpu.panels import Weight, can_pack, pack, unpack
from runner.engine import start_check
from runner.engine.layers import DecoderLayer
from runner.engine.paged_shape import PagedShape

FEW = (2, 5, 17, 33, 130)
OF_AN_8B_MODEL = (2, 8, 17, 33, 64, 65, 130, 520, 1088)


def multiply_no_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bfloat16, as CPUs without an instruction for them."""
    from kernels.cpu import linear, number_kinds

    for module in (linear, number_kinds, panels):
        monkeypatch.setattr(module, "multiplies_pairs", lambda: False)


def assert_a_row_keeps_its_bits(
    product: Callable[[Tensor, Any], Tensor], weight: Any, rows: Tensor, counts: Iterable[int]
) -> None:
    """The last of the rows, at the ends and in the middle of launches of so many."""
    alone = product(rows[-1:], weight)[0]
    for count in counts:
        launch, places = rows[:count].clone(), [0, count // 2, count - 1]
        launch[places] = rows[-1]
        assert all(torch.equal(row, alone) for row in product(launch, weight)[places]), count


def assert_panels_of_every_width_agree(weight: Weight, x: Tensor) -> None:
    """So that a number of threads, by which the width is chosen, is no part of a text."""
    from kernels.cpu.linear import linear

    if not can_pack(weight):
        pytest.skip("this machine has no panels")
    results = []
    for width in (16, 32, 64):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(panels, "panel_width", lambda out_features, width=width: width)
            packed = pack(weight)
        assert isinstance(packed, panels.Panels) and packed.width == width
        assert torch.equal(unpack(packed), unpack(weight))
        results.append(linear(x, packed))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def weights_asked_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, layers: Sequence[DecoderLayer], beside: Sequence[Weight]
) -> list[int]:
    """The ids of those whose products a start compares, in order."""
    asked: list[int] = []

    def note(_product: Any, weights: list[Any], *_: Any) -> bool:
        asked.extend(map(id, weights))
        return True

    monkeypatch.setattr(start_check, "_rows_agree", note)
    monkeypatch.setattr(start_check, "_attentions_agree", lambda *_: True)
    shape = PagedShape(rows_per_tile=1, split_keys=None, max_context=64, linear=1)
    shapes = {"decode": shape, "prefill": shape}
    assert start_check._kernels_keep_bits(shapes, layers, beside, None, 16)
    return sorted(asked)
