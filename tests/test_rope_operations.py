"""What lies between projection and attention, in torch, compiled for a CPU and as kernels: the same, whoever asks."""

from __future__ import annotations

import pytest
import torch

from kernels.reference.rms_norm import rms_norm
from kernels.reference.rope import RopeTable, apply_rope
from runner.engine import backend, operations
from runner.engine.kv_cache import PagedKVCache
from runner.engine.operations import rotate, rotate_and_store
from runner.engine.rope import RopeRows
from tests.seeded import randn
from tests.test_rope_kernel import EPS, POSITIONS, SLOTS, Shape, angles

SHAPE = Shape(num_heads=3, num_kv_heads=2, head_dim=16)
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(params=["torch", "compiled", "kernels"], autouse=True)
def computed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kernel_device: torch.device) -> None:
    if request.param == "kernels" and kernel_device.type != "cpu":
        pytest.skip("kernels are compiled here")
    monkeypatch.setattr(backend, "interprets_kernels", request.param == "kernels")
    if request.param == "torch":
        monkeypatch.setattr(operations, "is_compiled", lambda where: False)


def rope_rows(num_kv_heads: int) -> RopeRows:
    """Of layers with so many heads of keys."""
    table = RopeTable(*angles(SHAPE.head_dim), SHAPE.num_heads + num_kv_heads, num_kv_heads * SHAPE.head_dim)
    return RopeRows(table=table, positions=POSITIONS)


def empty_cache() -> PagedKVCache:
    return PagedKVCache([SHAPE.width - SHAPE.queries], 6, 4, torch.float32, torch.device("cpu"))


def test_norms_of_all_heads_come_before_rotation_and_cache() -> None:
    qkv, weights, eps = randn(len(POSITIONS), SHAPE.width), randn(3, SHAPE.head_dim), torch.tensor(EPS)
    rope, cache = rope_rows(SHAPE.num_kv_heads), empty_cache()
    kinds = (SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.num_kv_heads)
    heads = qkv.unflatten(1, (-1, SHAPE.head_dim)).split(kinds, dim=1)
    normed = torch.cat([rms_norm(own, weight, eps) for own, weight in zip(heads, weights, strict=True)], dim=1)
    expected = apply_rope(normed.flatten(1), *rope.whole_rows)
    q_norm, k_norm, v_norm = ((weight, eps) for weight in weights)
    queries = rotate_and_store(qkv, rope, SLOTS, cache, 0, **SHAPE.sizes(), q_norm=q_norm, k_norm=k_norm, v_norm=v_norm)
    assert queries.shape == (len(POSITIONS), SHAPE.num_heads, SHAPE.head_dim)
    torch.testing.assert_close(queries.flatten(1), expected[:, : SHAPE.queries], **TOLERANCE)
    torch.testing.assert_close(cache.layers[0].flatten(0, 1)[SLOTS], expected[:, SHAPE.queries :], **TOLERANCE)


def test_norms_of_queries_and_keys_may_come_behind_rotation() -> None:
    qkv, weights, eps = randn(len(POSITIONS), SHAPE.width), randn(2, SHAPE.head_dim), torch.tensor(EPS)
    rope, cache = rope_rows(SHAPE.num_kv_heads), empty_cache()
    kinds = (SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.num_kv_heads)
    queries, keys, values = apply_rope(qkv, *rope.whole_rows).unflatten(1, (-1, SHAPE.head_dim)).split(kinds, dim=1)
    expected = torch.cat((rms_norm(queries, weights[0], eps), rms_norm(keys, weights[1], eps), values), dim=1).flatten(
        1
    )
    q_norm, k_norm = ((weight, eps) for weight in weights)
    found = rotate_and_store(
        qkv, rope, SLOTS, cache, 0, **SHAPE.sizes(), q_norm=q_norm, k_norm=k_norm, turns_first=True
    )
    torch.testing.assert_close(found.flatten(1), expected[:, : SHAPE.queries], **TOLERANCE)
    torch.testing.assert_close(cache.layers[0].flatten(0, 1)[SLOTS], expected[:, SHAPE.queries :], **TOLERANCE)


@pytest.mark.parametrize("is_normed", [False, True], ids=["", "normed"])
@pytest.mark.parametrize("num_kv_heads", [0, SHAPE.num_kv_heads], ids=["of its own", "of layers with keys"])
def test_queries_alone_turn_by_rotations_of_layers_with_and_without_keys(num_kv_heads: int, is_normed: bool) -> None:
    rows, weight, eps = randn(len(POSITIONS), SHAPE.queries), randn(SHAPE.head_dim), torch.tensor(EPS)
    heads = rows.view(-1, SHAPE.num_heads, SHAPE.head_dim)
    normed = rms_norm(heads, weight, eps) if is_normed else heads
    expected = apply_rope(normed.flatten(1), *rope_rows(0).whole_rows)
    found = rotate(
        rows,
        rope_rows(num_kv_heads),
        num_heads=SHAPE.num_heads,
        head_dim=SHAPE.head_dim,
        q_norm=(weight, eps) if is_normed else None,
    )
    assert found.shape == heads.shape
    torch.testing.assert_close(found.flatten(1), expected, **TOLERANCE)
