"""A quantized checkpoint that cannot be read as the weights that it stands for is refused by what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.edit_tensors import edit_tensors
from tests.quantized_checkpoints import (
    FLOAT8,
    GPTQ,
    INT4,
    LAYOUTS,
    Layout,
    Q,
    compressed,
    fields,
    holds_8_bits,
    in_words,
    quantize_checkpoint,
    refusal,
    save_dense,
    state_config,
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """To be quantized."""
    return save_dense(tmp_path / "checkpoint")


ROTATED = {"config_groups": {"u": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}}


@pytest.mark.parametrize(
    ("config", "got"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "got {'quant_method': 'bitsandbytes'}"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "got {'quant_method': 'gptq', 'bits': 3}"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'version': 'gemv'}"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'fmt': 'e5m2'}"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'quant_algo': 'W4A8_AWQ'}"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "'quant_algo': 'NVFP4'}"),
        (compressed("mixed-precision", num_bits=4, type="float"), "'format': 'mixed-precision'}"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "'format': 'pack-quantized'}"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "x"}, "got {'quant_method': 'gptq', 'bits': 4}"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "got {'quant_method': 'fp8'}"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "got {'quant_method': 'fp8'}"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "got {'quant_method': 'compressed-tensors'}"),
        (
            compressed("pack-quantized", **INT4) | {"transform_config": ROTATED},
            "'transform_config': {'config_groups': {'u':",
        ),
        ({}, "got {}"),
    ],
)
def test_a_quantization_that_is_not_read_is_named_with_the_ways_out(
    config: dict[str, Any], got: str, checkpoint: Path
) -> None:
    state_config(checkpoint, {"note": "stated", **config})
    edit_tensors(checkpoint, lambda tensors: tensors.update({"x.qweight": torch.ones(2, dtype=torch.int32)}))
    message = refusal(checkpoint)
    assert message.startswith(f"quantization_config of model.model={checkpoint} must be one of fp8, compressed-tensors")
    assert got in message and message.endswith("model.quantization=fp8 holds in 8 bits")


def broken(checkpoint: Path, layout: str, change: Callable[[dict[str, torch.Tensor]], object]) -> str:
    quantize_checkpoint(checkpoint, LAYOUTS[layout])
    edit_tensors(checkpoint, change)
    return refusal(checkpoint)


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("ModelOpt's NVFP4", {"weight_scale_2": None}, "lacks its weight_scale_2"),
        (
            "ModelOpt's NVFP4",
            {"weight_scale_2": torch.ones(4)},
            r"must have one scale beside those of groups, got \[4\]",
        ),
        (
            "ModelOpt's NVFP4",
            {"weight_scale": torch.ones(64, 4)},
            r"scales \(F8_E4M3\) of 16 inputs each, got U8 and F32",
        ),
        (
            "ModelOpt's NVFP4",
            {"weight": torch.ones(64, 32).to(torch.int8)},
            r"must hold bytes \(U8\) .*, got I8 and F8",
        ),
        ("nvfp4-pack-quantized", {"weight_scale": torch.ones(64, 2).to(FLOAT8)}, r"must have shape \[64, 4\], .* got"),
        ("nvfp4-pack-quantized", {"weight_global_scale": torch.zeros(1)}, "must have finite scales below 128"),
        (
            "ModelOpt's NVFP4",
            {"weight_scale": torch.full((64, 4), -1.0).to(FLOAT8)},
            "of groups of at least 0, got -1;",
        ),
    ],
)
def test_what_is_no_nvfp4_is_told(
    layout: str, change: dict[str, Tensor | None], message: str, checkpoint: Path
) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for part, tensor in change.items():
            del tensors[f"{Q}.{part}"]
            if tensor is not None:
                tensors[f"{Q}.{part}"] = tensor

    assert re.search(message, broken(checkpoint, layout, edit))


@holds_8_bits
def test_reciprocals_of_scales_are_told(checkpoint: Path) -> None:
    message = broken(checkpoint, "FBGEMM", lambda t: t[f"{Q}.weight_scale"].reciprocal_())
    assert f"{Q} must have finite scales below 128" in message and "reciprocals" in message


@holds_8_bits
def test_numbers_that_are_none_are_told(checkpoint: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q}.weight"].view(torch.uint8)[3, 4] = 0x7F

    assert f"{Q}.weight must hold finite numbers" in broken(checkpoint, "FBGEMM", change)


@pytest.mark.parametrize(
    ("layout", "change", "said"),
    [
        ("GPTQ", lambda t: t.pop(f"{Q}.qzeros"), f"{Q} lacks its qzeros; download the checkpoint again"),
        (
            "GPTQ",
            lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"][:1].clone()}),
            f"{Q}.scales must have shape [2, 64], as its quantization_config says, got [1, 64]",
        ),
        (
            "GPTQ",
            lambda t: t.update({f"{Q}.qzeros": t[f"{Q}.qzeros"][:1].clone()}),
            f"{Q}.qzeros must have shape [2, 8], as its quantization_config says, got [1, 8]",
        ),
        (
            "GPTQ, inputs in any order",
            lambda t: t[f"{Q}.g_idx"].fill_(5),
            f"{Q} must name one of 2 groups for each of 64 inputs, got 64 of up to 5",
        ),
        (
            "pack-quantized, 4 bits",
            lambda t: t.update({f"{Q}.weight_scale": torch.ones(1)}),
            f"{Q}.weight_scale must have shape [64, 2], as its quantization_config says, got [1]",
        ),
        (
            "AWQ",
            lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"].float()}),
            f"{Q}.qweight must hold words (I32), got F32; download the checkpoint again",
        ),
        (
            "AWQ",
            lambda t: t.update({f"{Q}.scales": torch.ones(64)}),
            f"{Q}.scales must have shape [2, 64], as its quantization_config says, got [64]",
        ),
        (
            "FBGEMM",
            lambda t: t.update({f"{Q}.weight_scale": torch.ones(2)}),
            f"{Q}.weight must have a scale per tensor, output, block or group as its quantization_config says, got "
            "scales of shape [2]",
        ),
        (
            "FBGEMM",
            lambda t: [t.pop(name) for name in list(t) if name.endswith("_scale")],
            "_proj.weight must hold weights, got F8_E4M3 without the scales and the quantization_config that would say",
        ),
        (
            "FBGEMM",
            lambda t: t.update({f"{Q}.weight_scale": torch.ones(3, 1)}),
            "got scales of shape [3, 1] for [64, 64]",
        ),
        (
            "int-quantized",
            lambda t: t[f"{Q}.weight_zero_point"].fill_(3),
            f"{Q}.weight must have no zero points; choose a checkpoint quantized symmetrically",
        ),
        (
            "int-quantized",
            lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].float().to(FLOAT8)}),
            f"{Q}.weight must hold torch.int8, got torch.float8_e4m3fn",
        ),
        (
            "FBGEMM",
            lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"][:32].clone(), f"{Q}.weight_scale": torch.ones(1)}),
            f"{Q}.weight must have shape [64, 64] by its config.json, got [32, 64]",
        ),
        ("FBGEMM", lambda t: t.pop("model.layers.1.mlp.down_proj.weight"), "missing: model.layers.1.mlp.down_proj"),
    ],
)
def test_a_broken_checkpoint_is_refused_with_the_tensor(
    layout: str, change: Callable[[dict[str, torch.Tensor]], object], said: str, checkpoint: Path
) -> None:
    assert said in broken(checkpoint, layout, change)


def test_numbers_of_8_bits_with_zero_points_may_not_fit(checkpoint: Path) -> None:
    def pack(weight: torch.Tensor, generator: torch.Generator) -> Any:
        own = fields(weight, generator, bits=8, has_zeros=True)
        zeros = torch.full_like(own.zeros, 200)
        tensors = {
            "qweight": in_words(own.numbers, 8).T.contiguous(),
            "qzeros": in_words(zeros.T - 1, 8),
            "scales": own.scales.T.contiguous(),
        }
        return tensors, weight

    quantize_checkpoint(checkpoint, Layout(pack=pack, config={**GPTQ, "bits": 8}, held=None))
    message = refusal(checkpoint)
    assert "must hold numbers that int8 holds, got -" in message and "symmetrically, or to 4 bits" in message
