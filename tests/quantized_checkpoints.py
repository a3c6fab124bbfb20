"""Checkpoints in the published quantized layouts, made from dense ones, and the weights that they stand for.

Every layout packs numbers, zero points and scales by its own arithmetic here, word by word, and says the dense weight
without unpacking anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from kernels.cpu.panels import multiplies_and_adds
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from tests.transformers_reference import load, random_model, save, save_tokenizer

holds_8_bits = pytest.mark.skipif(not multiplies_and_adds(), reason="this machine has no kernels for 8 bits")

FLOAT8 = torch.float8_e4m3fn
GROUP = 32
SMALLEST_SCALE = 2.0**-23  # of a row that is 0
Packed = tuple[dict[str, Tensor], Tensor]  # what a module's tensors are called and hold, and its dense weight


@dataclass(frozen=True, kw_only=True)
class Layout:
    pack: Callable[[Tensor, torch.Generator], Packed]  # of a dense weight [out_features, in_features]
    config: dict[str, Any]  # its quantization_config
    held: str | None  # what an engine says that it holds; None: it expands all of it
    pack_mlp: Callable[[Tensor, torch.Generator], Packed] | None = None  # where MLPs are packed otherwise


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


def float8(weight: Tensor, scales: Tensor) -> Tensor:
    return (weight / scales).clamp(-448, 448).to(FLOAT8)


def per_tensor(
    weight: Tensor, _generator: torch.Generator, *, name: str = "weight_scale", of_inputs: str = "input_scale"
) -> Packed:
    scale = weight.abs().max() / 448
    numbers = float8(weight, scale)
    tensors = {"weight": numbers, name: scale.clone(), of_inputs: torch.tensor(0.5)}
    return tensors, numbers.float() * scale


def per_output(weight: Tensor, _generator: torch.Generator) -> Packed:
    """bfloat16 scales, as llm-compressor writes them, which are never 0."""
    scales = (weight.abs().amax(dim=1, keepdim=True) / 448).clamp(min=SMALLEST_SCALE).bfloat16()
    numbers = float8(weight, scales.float())
    return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales.float()


def in_blocks(weight: Tensor, _generator: torch.Generator, *, name: str = "weight_scale_inv", rows: int = 32) -> Packed:
    """32 inputs wide; the last block of either dimension may be smaller."""
    out_features, in_features = weight.shape
    scales = torch.empty(-(-out_features // rows), -(-in_features // GROUP))
    numbers, dense = torch.empty(weight.shape, dtype=FLOAT8), torch.empty(weight.shape)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            own = (slice(row * rows, (row + 1) * rows), slice(column * GROUP, (column + 1) * GROUP))
            scales[row, column] = weight[own].abs().max() / 448
            numbers[own] = float8(weight[own], scales[row, column])
            dense[own] = numbers[own].float() * scales[row, column]
    return {"weight": numbers, name: scales}, dense


def int8(weight: Tensor, _generator: torch.Generator) -> Packed:
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    numbers = (weight / scales).round().to(torch.int8)
    zeros = torch.zeros_like(scales, dtype=torch.int8)  # older releases write them
    return {"weight": numbers, "weight_scale": scales, "weight_zero_point": zeros}, numbers.float() * scales


def in_words(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unsigned numbers [rows, columns] as int32 words [rows, columns * bits / 32]; order: column of each field."""
    count = 32 // bits
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // count, dtype=torch.int64)
    for field, column in enumerate(order or range(count)):
        words += numbers[:, column::count].long() << (bits * field)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Unsigned numbers and zero points of a weight, whose inputs belong to groups."""

    numbers: Tensor  # [out_features, in_features]
    zeros: Tensor  # [out_features, groups]
    scales: Tensor  # [out_features, groups]
    owners: Tensor  # [in_features], the group of each input

    @property
    def dense(self) -> Tensor:
        offsets = (self.numbers - self.zeros[:, self.owners]).float()
        return offsets * self.scales[:, self.owners].float()


def fields(
    weight: Tensor, generator: torch.Generator, *, bits: int, has_zeros: bool, in_order: bool = True, group: int = GROUP
) -> Fields:
    (out_features, in_features), largest = weight.shape, 2**bits - 1
    owners = torch.arange(in_features) // group
    if not in_order:
        owners = owners[torch.randperm(in_features, generator=generator)]
    groups = int(owners.max()) + 1
    half = 2 ** (bits - 1)
    zeros = torch.full((out_features, groups), half)
    if has_zeros:
        zeros = torch.randint(half - 2, half + 3, (out_features, groups), generator=generator)
    scales = torch.stack([weight[:, owners == index].abs().amax(dim=1) / (half - 3) for index in range(groups)], dim=1)
    scales = scales.half()
    numbers = (weight / scales[:, owners].float()).round().long() + zeros[:, owners]
    return Fields(numbers=numbers.clamp(0, largest), zeros=zeros, scales=scales, owners=owners)


def padded(numbers: Tensor, bits: int) -> Tensor:
    """To whole words, with numbers that mean nothing."""
    return torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % (32 // bits)), value=3)


def int32(
    weight: Tensor,
    generator: torch.Generator,
    *,
    bits: int = 4,
    has_zeros: bool = False,
    in_order: bool = True,
    group: int = GROUP,
) -> Packed:
    """Of compressed-tensors."""
    own = fields(weight, generator, bits=bits, has_zeros=has_zeros, in_order=in_order, group=group)
    tensors = {
        "weight_packed": in_words(padded(own.numbers, bits), bits),
        "weight_scale": own.scales.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if has_zeros:
        tensors["weight_zero_point"] = in_words(padded(own.zeros.T, bits), bits).T.contiguous()
    if not in_order:
        tensors["weight_g_idx"] = own.owners.to(torch.int32)
    return tensors, Fields(**{**vars(own), "scales": own.scales.bfloat16()}).dense


def gptq(
    weight: Tensor, generator: torch.Generator, *, bits: int = 4, in_order: bool = True, stored: int = 1
) -> Packed:
    """stored: what zero points are stored less by; one that is 0 becomes the largest number then."""
    own = fields(weight, generator, bits=bits, has_zeros=bits == 4, in_order=in_order)
    if bits == 4:
        own.zeros[0] = 0
    tensors = {
        "qweight": in_words(own.numbers, bits).T.contiguous(),
        "qzeros": in_words((own.zeros.T - stored) % 2**bits, bits),
        "scales": own.scales.T.contiguous(),
        "g_idx": own.owners.to(torch.int32),
    }
    return tensors, own.dense


def awq(weight: Tensor, generator: torch.Generator) -> Packed:
    own = fields(weight, generator, bits=4, has_zeros=True)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": in_words(own.numbers.T, 4, order),
        "qzeros": in_words(own.zeros.T, 4, order),
        "scales": own.scales.T.contiguous(),
    }
    return tensors, own.dense


def nvfp4(weight: Tensor, _generator: torch.Generator, *, is_modelopts: bool = True) -> Packed:
    """A float8 scale of 16 inputs, times or by one of them all; the largest numbers are 6 and 448."""
    groups = weight.unflatten(1, (-1, 16))
    factor = weight.abs().max() / (6 * 448)
    scales = (groups.abs().amax(dim=2) / 6 / factor).to(FLOAT8)
    exact = scales.float() * (factor if is_modelopts else 1 / (1 / factor))
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = (groups.abs().unsqueeze(3) / exact[:, :, None, None] - sizes).abs().argmin(dim=3)
    codes = (nearest + 8 * (groups < 0)).to(torch.uint8).flatten(1)
    dense = torch.where(groups < 0, -1.0, 1.0) * (2 * sizes[nearest]) * (exact / 2).unsqueeze(2)
    octets = codes[:, ::2] | codes[:, 1::2] << 4
    if is_modelopts:
        beside = {"weight_scale": scales, "weight_scale_2": factor.clone(), "input_scale": torch.tensor(0.5)}
        return {"weight": octets, **beside}, dense.flatten(1)
    beside = {"weight_scale": scales, "weight_global_scale": (1 / factor).reshape(1)}
    return {"weight_packed": octets, **beside, "input_global_scale": torch.ones(1)}, dense.flatten(1)


SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 80,  # two blocks and a half
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
Q = "model.layers.0.self_attn.q_proj"
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
GROUPED = f"int8 in groups of {GROUP}"
PACKED = f"int4 in groups of {GROUP}, {GROUPED}"  # those of 80 inputs, whose last are no whole span, in 8 bits
SIXTEENS = "fp4, int8 in groups of 16"  # as PACKED
LAYOUTS = {
    "AutoFP8": Layout(
        pack=per_tensor,
        config={"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        held="fp8",
    ),
    "Ministral 3's FP8": Layout(
        pack=lambda weight, generator: per_tensor(
            weight, generator, name="weight_scale_inv", of_inputs="activation_scale"
        ),
        config={"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        held="fp8",
    ),
    "ModelOpt": Layout(pack=per_tensor, config={"quant_method": "modelopt", "quant_algo": "FP8"}, held="fp8"),
    "FBGEMM": Layout(pack=per_output, config={"quant_method": "fbgemm_fp8"}, held="fp8"),
    "DeepSeek's and Qwen's FP8": Layout(
        pack=in_blocks,
        config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [GROUP, GROUP]},
        held=f"fp8 in groups of {GROUP}",
    ),
    "blocks that are not square, as MiniMax spells it": Layout(
        pack=lambda weight, generator: in_blocks(weight, generator, rows=16),
        config={"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [16, GROUP]},
        held=f"fp8 in groups of {GROUP}",
    ),
    "float-quantized, outputs": Layout(
        pack=per_output, config=compressed("float-quantized", num_bits=8, type="float", strategy="channel"), held="fp8"
    ),
    "float-quantized, tensors": Layout(
        pack=per_tensor, config=compressed("float-quantized", num_bits=8, type="float", strategy="tensor"), held="fp8"
    ),
    "float-quantized, blocks": Layout(
        pack=lambda weight, generator: in_blocks(weight, generator, name="weight_scale"),
        config=compressed(
            "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[GROUP, GROUP]
        ),
        held=f"fp8 in groups of {GROUP}",
    ),
    "int-quantized": Layout(
        pack=int8, config=compressed("int-quantized", num_bits=8, type="int", strategy="channel"), held="int8"
    ),
    "pack-quantized, 4 bits": Layout(pack=int32, config=compressed("pack-quantized", **INT4), held=PACKED),
    "pack-quantized, 8 bits": Layout(
        pack=lambda weight, generator: int32(weight, generator, bits=8),
        config=compressed("pack-quantized", **{**INT4, "num_bits": 8}),
        held=GROUPED,
    ),
    "pack-quantized, zero points": Layout(
        pack=lambda weight, generator: int32(weight, generator, has_zeros=True),
        config=compressed("pack-quantized", **INT4, symmetric=False),
        held=PACKED,
    ),
    "pack-quantized, groups that no kernel takes": Layout(
        pack=lambda weight, generator: int32(weight, generator, has_zeros=True, group=24),
        config=compressed("pack-quantized", **{**INT4, "group_size": 24}),
        held=None,
    ),
    "pack-quantized, small groups": Layout(
        pack=lambda weight, generator: int32(weight, generator, group=8),
        config=compressed("pack-quantized", **{**INT4, "group_size": 8}),
        held=None,
    ),
    "pack-quantized, inputs in any order": Layout(
        pack=lambda weight, generator: int32(weight, generator, has_zeros=True, in_order=False),
        config=compressed("pack-quantized", **INT4, symmetric=False, actorder="group"),
        held=None,
    ),
    "GPTQ": Layout(pack=gptq, config=GPTQ, held=PACKED),
    "GPTQ, 8 bits": Layout(
        pack=lambda weight, generator: gptq(weight, generator, bits=8), config={**GPTQ, "bits": 8}, held=GROUPED
    ),
    "GPTQ, version 2": Layout(
        pack=lambda weight, generator: gptq(weight, generator, stored=0),
        config={**GPTQ, "checkpoint_format": "gptq_v2"},
        held=PACKED,
    ),
    "GPTQ, inputs in any order": Layout(
        pack=lambda weight, generator: gptq(weight, generator, in_order=False),
        config={**GPTQ, "desc_act": True},
        held=None,
    ),
    "ModelOpt's NVFP4": Layout(
        pack=nvfp4, config={"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, held=SIXTEENS
    ),
    "ModelOpt's mixture": Layout(
        pack=per_tensor,
        pack_mlp=nvfp4,
        config={"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}},
        held="fp4, fp8, int8 in groups of 16",
    ),
    "nvfp4-pack-quantized": Layout(
        pack=lambda weight, generator: nvfp4(weight, generator, is_modelopts=False),
        config=compressed(
            "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True
        ),
        held=SIXTEENS,
    ),
    "AWQ": Layout(
        pack=awq,
        config={"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        held=PACKED,
    ),
}


def quantize_checkpoint(
    directory: Path, layout: Layout, modules: str = r"_proj(_qkvz?|_z|_with_mqa)?$|\.dense$"
) -> dict[str, Tensor]:
    """Rewrite what the layers of a dense checkpoint multiply by; the dense tensors that it stands for now."""
    file, generator = directory / "model.safetensors", torch.Generator().manual_seed(0)
    tensors, dense = dict[str, Tensor](), load_file(file)
    for name, tensor in list(dense.items()):
        module, _, kind = name.rpartition(".")
        if kind != "weight" or not re.search(modules, module):
            tensors[name] = tensor
            continue
        pack = layout.pack_mlp if layout.pack_mlp is not None and ".mlp." in module else layout.pack
        packed, dense[name] = pack(tensor.float(), generator)
        tensors |= {f"{module}.{part}": value for part, value in packed.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    state_config(directory, layout.config)
    return dense


def state_config(directory: Path, quantization_config: dict[str, Any]) -> None:
    file = directory / "config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**values, "quantization_config": quantization_config}), encoding="utf-8")


MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def pack_experts(directory: Path) -> dict[str, Tensor]:
    """Random experts in a dense gpt-oss checkpoint, in MXFP4; the dense stacks that they stand for."""
    file, generator = directory / "model.safetensors", torch.Generator().manual_seed(0)
    tensors, dense = load_file(file), dict[str, Tensor]()
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num_experts, in_features, outputs = tensors.pop(name).shape
        groups = (num_experts, outputs, in_features // GROUP)
        codes = torch.randint(0, 16, (*groups, GROUP), generator=generator, dtype=torch.uint8)
        exponents = torch.randint(120, 125, groups, generator=generator, dtype=torch.uint8)
        tensors[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        tensors[f"{name}_scales"] = exponents
        two_bits = (codes >> 1 & 3).float()  # a sign, two bits of exponent, one of mantissa
        fraction = (codes & 1).float() / 2
        size = torch.where(two_bits > 0, (1 + fraction) * 2 ** (two_bits - 1), fraction)
        signed = torch.where(codes >= 8, -size, size) * 2.0 ** (exponents.float() - 127).unsqueeze(-1)
        dense[name] = signed.flatten(2).transpose(1, 2).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    state_config(directory, MXFP4)
    return dense


def save_dense(directory: Path) -> Path:
    """A small dense checkpoint of SHAPE, to be quantized."""
    save(random_model(AutoConfig.for_model("llama", **SHAPE)), directory)
    save_tokenizer(directory, SHAPE["vocab_size"])
    return directory


def refusal(directory: Path, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(ModelSource(model=str(directory), **options))
    message = str(caught.value)
    assert "\n" not in message and ";" in message, message
    return message
