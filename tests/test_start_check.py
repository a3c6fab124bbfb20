"""The question of the start, whether rows keep their bits, sees one bit that depends on a row's company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.cpu.panels import multiplies_and_adds
from runner.engine import launch_shapes
from runner.engine.model_runner import ModelRunner
from runner.engine.paged_shape import PagedAttention, PagedShape
from tests.conftest import Engines

Change = Callable[[PagedAttention, torch.Tensor], None]  # of what a launch of attention computes
TILE = 16  # rows of the tile that is asked about


def agrees(engines: Engines, monkeypatch: pytest.MonkeyPatch, change: Change) -> bool:
    """Whether the check is content with attention that is changed so."""
    if not multiplies_and_adds():
        pytest.skip("this CPU's attention is torch's, in tiles of one shape")
    target: ModelRunner = engines(architecture={"max_position_embeddings": 1024}).engine.target
    shape, attend = target.shapes["decode"], launch_shapes.paged_attention
    assert isinstance(shape, PagedShape)

    def changed(query: torch.Tensor, cache: torch.Tensor, attention: PagedAttention, **arguments: Any) -> torch.Tensor:
        output = attend(query, cache, attention, **arguments)
        change(attention, output)
        return output

    with monkeypatch.context() as patch:
        patch.setattr(launch_shapes, "paged_attention", changed)
        return launch_shapes._attentions_agree(shape, target.model.layers[0].attention)


def add_one_bit(rows: torch.Tensor) -> None:
    rows.view(torch.int32).bitwise_xor_(1)


def in_a_tile(row: int) -> Change:
    def change(attention: PagedAttention, output: torch.Tensor) -> None:
        if len(output) >= TILE:
            add_one_bit(output[row])

    return change


def in_short_contexts(attention: PagedAttention, output: torch.Tensor) -> None:
    if attention.segments.max_context <= 512:
        add_one_bit(output)


def test_attention_that_keeps_bits_is_found_to(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    assert agrees(engines, monkeypatch, lambda *_: None)


@pytest.mark.parametrize(
    "change",
    [in_a_tile(0), in_a_tile(TILE - 1), in_short_contexts],
    ids=["a tile's first row", "its last row", "a launch that is not split"],
)
def test_a_bit_that_depends_on_company_is_found(
    change: Change, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not agrees(engines, monkeypatch, change)
