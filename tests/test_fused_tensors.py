"""Tensors of a checkpoint that hold several matrices: each part is read as a tensor of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from runner.engine.errors import UserError
from runner.engine.fused_tensors import Fused, split_fused
from tests.model_families import make_config
from tests.transformers_reference import load, random_model, save

PARTS = {"self_attn.q_proj": 4, "self_attn.k_proj": 2, "self_attn.v_proj": 2}
FUSED = {"self_attn.qkv_proj": Fused(parts=PARTS)}
NAME = "model.layers.1.self_attn.qkv_proj"


def slices_of(tensors: dict[str, torch.Tensor], path: Path) -> list[tuple[str, Any]]:
    save_file(tensors, path)
    with safe_open(path, framework="pt") as handle:
        return [(name, handle.get_slice(name)) for name in handle.keys()]  # noqa: SIM118 - no dict


def test_parts_are_the_rows_of_the_whole_however_they_are_cut(tmp_path: Path) -> None:
    weight = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    given = slices_of({f"{NAME}.weight": weight, f"{NAME}.bias": weight[:, 0].clone()}, tmp_path / "t.safetensors")
    found = dict(split_fused(given, FUSED))
    expected = dict(zip(PARTS, weight.split([4, 2, 2]), strict=True))
    assert len(found) == 6
    for name, rows in expected.items():
        own = found[f"model.layers.1.{name}.weight"]
        assert own.get_shape() == list(rows.shape) and torch.equal(own[...], rows)
        assert torch.equal(own[1:2], rows[1:2]) and torch.equal(own[:, 2:4], rows[:, 2:4])
        assert torch.equal(own[1:, 2:], rows[1:, 2:])
        bias = found[f"model.layers.1.{name}.bias"]
        assert bias.get_shape() == [len(rows)] and torch.equal(bias[...], rows[:, 0])


def test_parts_that_take_turns_are_put_together(tmp_path: Path) -> None:
    weight = torch.arange(8.0).unsqueeze(1).repeat(1, 3)
    given = slices_of({f"{NAME}.weight": weight}, tmp_path / "t.safetensors")
    found = dict(split_fused(given, {"self_attn.qkv_proj": Fused(parts=PARTS, num_groups=2)}))
    rows = {name: found[f"model.layers.1.{name}.weight"] for name in PARTS}
    assert [own[...][:, 0].tolist() for own in rows.values()] == [[0, 1, 4, 5], [2, 6], [3, 7]]
    assert [own.get_shape() for own in rows.values()] == [[4, 3], [2, 3], [2, 3]]
    assert torch.equal(rows["self_attn.q_proj"][1:3], weight[[1, 4]])


def test_what_is_not_fused_or_has_other_rows_comes_as_it_is(tmp_path: Path) -> None:
    norm, short = torch.ones(8), torch.ones(7, 6)
    given = slices_of({"model.norm.weight": norm, f"{NAME}.weight": short}, tmp_path / "t.safetensors")
    assert sorted(split_fused(given, FUSED)) == sorted(given)


def test_a_fused_tensor_of_another_shape_is_told_of_by_its_own_name(tmp_path: Path) -> None:
    source = save(random_model(make_config("phi3")), tmp_path)
    file = tmp_path / "model.safetensors"
    with safe_open(file, framework="pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - no dict
    name = "model.layers.1.mlp.gate_up_proj.weight"
    save_file({**tensors, name: tensors[name][:-1].clone()}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"unexpected: model\.layers\.1\.mlp\.gate_up_proj\.weight; missing: .*mlp\.g"):
        load(source)


def test_parts_of_a_fused_tensor_may_be_held_in_8_bits(tmp_path: Path) -> None:
    source = save(random_model(make_config("phi3")), tmp_path)
    loaded = load(replace(source, quantization="int8"))
    assert loaded.held is not None and "int8" in loaded.held
