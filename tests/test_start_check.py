"""The question of the start, whether rows keep their bits, sees one bit that depends on a row's company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.cpu.panels import Weight, multiplies_and_adds
from kernels.linear_plan import plan_linear, rows_of_each_kind
from kernels.reference.partial_sums import PartialSums
from runner.engine import attention as own_attention
from runner.engine import launch_shapes, start_check
from runner.engine.asked_products import asked_products
from runner.engine.model_runner import ModelRunner
from runner.engine.paged_shape import PagedAttention, PagedShape
from runner.engine.shard import Shard
from tests.conftest import Engines
from tests.emulated_device import EmulatedDevice
from tests.test_emulated_gpu import GPU

Change = Callable[[PagedAttention, torch.Tensor], None]  # of what a launch of attention computes
TILE = 16  # rows of the tile that is asked about


def agrees(engines: Engines, monkeypatch: pytest.MonkeyPatch, change: Change) -> bool:
    """Whether the check is content with attention that is changed so."""
    if not multiplies_and_adds():
        pytest.skip("this CPU's attention is torch's, in tiles of one shape")
    target: ModelRunner = engines(architecture={"max_position_embeddings": 1024}).engine.target
    shape, attend = target.shapes["decode"], own_attention.paged_attention
    assert isinstance(shape, PagedShape)

    def changed(query: torch.Tensor, cache: torch.Tensor, attention: PagedAttention, **arguments: Any) -> torch.Tensor:
        output = attend(query, cache, attention, **arguments)
        change(attention, output)
        return output

    with monkeypatch.context() as patch:
        patch.setattr(own_attention, "paged_attention", changed)
        return start_check._attentions_agree(
            shape, target.model.layers[0].attention, start_check.Blocks(target.block_size, target.kv_dtype)
        )


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


def in_a_tree(attention: PagedAttention, output: torch.Tensor) -> None:
    if attention.segments.segments_per_table > 1:
        add_one_bit(output[TILE // 2])


def test_attention_that_keeps_bits_is_found_to(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    assert agrees(engines, monkeypatch, lambda *_: None)


@pytest.mark.parametrize(
    "change",
    [in_a_tile(0), in_a_tile(TILE - 1), in_short_contexts, in_a_tree],
    ids=["a tile's first row", "its last row", "a launch that is not split", "a node of a tree"],
)
def test_a_bit_that_depends_on_company_is_found(
    change: Change, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not agrees(engines, monkeypatch, change)


def test_a_product_is_asked_once_whatever_families_launch_it(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and generated tokens have one way to multiply by panels, and the start asked for it twice."""
    target: ModelRunner = engines().engine.target
    model, asked = target.model, list[Weight]()
    if not launch_shapes.can_pack(model.product_weights):
        pytest.skip("this CPU's products are torch's, in tiles of one shape")
    monkeypatch.setattr(start_check, "_panels_keep_bits", lambda weight: asked.append(weight) or True)
    layers, beside = model.sample_layers, model.beside_layers
    assert start_check.row_invariant_shapes(
        target.shapes, layers, beside, max_model_len=256, block_size=16, kv_dtype=torch.float32, shard=Shard()
    )
    assert sorted(map(id, asked)) == sorted(map(id, model.product_weights))


@pytest.mark.parametrize("block_size", [16, 64])
def test_attention_is_asked_over_blocks_of_the_engines_size(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they were, blocks of 16 were asked about: on a GPU that is another program."""
    if not multiplies_and_adds():
        pytest.skip("this CPU's attention is torch's, in tiles of one shape")
    asked, attend = set[int](), own_attention.paged_attention

    def note(query: torch.Tensor, cache: torch.Tensor, *args: Any, **keys: Any) -> torch.Tensor:
        asked.add(cache.shape[1])
        return attend(query, cache, *args, **keys)

    monkeypatch.setattr(own_attention, "paged_attention", note)
    llm = Engines()(block_size=block_size, num_gpu_blocks_override=64)
    assert llm.engine.target.is_row_invariant and asked == {block_size}


@given(
    st.integers(1, 40_000),
    st.integers(1, 20_000),
    st.sampled_from([(2, None, None), (4, None, None), (2, 8, None), (2, 8, 128), (2, 4, 128), (2, 4, None)]),
    st.booleans(),
    st.integers(1, 1_100),
    st.sampled_from([99, 163, 227]),
)
def test_every_kind_of_program_is_asked(
    out_features: int,
    in_features: int,
    numbers: tuple[int, int | None, int | None],
    gated: bool,
    num_rows: int,
    kilobytes: int,  # of an Ada's shared memory, an Ampere's and a Hopper's
) -> None:
    """Tiles of 32 and 64 tokens were not, which most batches have."""
    names = ("element_size", "number_bits", "group_size")
    kind: dict[str, Any] = {**dict(zip(names, numbers, strict=True)), "gated": gated, "capacity": kilobytes * 1024}

    def program(count: int) -> tuple[int, bool, int]:
        plan = plan_linear(count, out_features, in_features, **kind)
        return plan.tokens, plan.is_spread, plan.features

    asked = rows_of_each_kind(out_features, in_features, **kind)
    assert program(num_rows) in {program(count) for count in asked}


def test_a_bit_that_depends_on_who_adds_up_partial_sums_is_found(
    emulated_gpu: EmulatedDevice, small_cuts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm behind a product, as in a step: of few rows it reads parts, of many what the product has added up."""
    norms = pytest.importorskip("kernels.rms_norm")
    monkeypatch.setattr(start_check, "_kernels_keep_bits", lambda *_: True)
    target: ModelRunner = Engines()(None, **{**GPU, "batch_invariant": True}).engine.target
    asked = asked_products(target.model.layers, target.shapes["decode"].linear)
    assert all(start_check._products_agree(asked, torch.float32))
    launch = norms._launch

    def another(x: Any, x_weight: Any, residual: Any, weight: Any, eps: Any, normed: Any, total: Any, *_: Any) -> None:
        launch(x, x_weight, residual, weight, eps, normed, total)
        if isinstance(x, PartialSums):
            add_one_bit(normed)

    monkeypatch.setattr(norms, "_launch", another)
    assert start_check._products_agree(asked, torch.float32).count(False) == 2  # o and down
