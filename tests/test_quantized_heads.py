"""Draft heads in quantized checkpoints: held as they are published, with the drafts of what they stand for."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kernels.cpu.panels import unpack
from kernels.quantized_weight import QuantizedWeight
from proposers.heads.dflash import DFlashHead, load_dflash_head
from proposers.heads.dspark import load_dspark_head
from proposers.heads.eagle3 import load_eagle3_head
from proposers.heads.quantized import quantize_head_of_target
from runner.engine import backend, weight_filling
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.linear import WeightTarget
from runner.engine.quantization import Storage
from runner.llm import LLM, SamplingParams
from tests import (
    gemma4_head_reference,
    mtp_checkpoints,
    test_dflash,
    test_dspark,
    test_eagle,
    test_gemma4_heads,
    test_mtp,
)
from tests.conftest import complete
from tests.eagle_reference import random_weights, save_head
from tests.edit_tensors import edit_tensors
from tests.emulated_device import EmulatedDevice
from tests.one_pass_reference import OPTIONS, PARAMS, PROMPTS, VOCAB_SIZE, Target, context_of
from tests.one_pass_reference import save_target as save
from tests.quantized_checkpoints import LAYOUTS, holds_8_bits, quantize_checkpoint, state_config
from tests.transformers_reference import CPU, assert_rows_are_as_accurate, random_sequences

pytestmark = holds_8_bits

FP8_BLOCKS, FP8, NVFP4 = "DeepSeek's and Qwen's FP8", "float-quantized, outputs", "ModelOpt's NVFP4"
ALL = r"(_proj|^fc|\.markov_w2|^lm_head)$"
OF_NVIDIA = r"(^fc|\.mlp\.\w+)$"
KINDS = {FP8: {"fp8"}, FP8_BLOCKS: {"fp8"}, "int-quantized": {"int8"}, NVFP4: {"fp4", "int8"}}
SIXTEENS = {"fp4", "int8 in groups of 16"}  # the latter of numbers of inputs that are no whole spans of 4 bits


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return save(tmp_path_factory.mktemp("target"))


eagle_target = test_eagle.target


def held(head: Any) -> dict[str, str]:
    """How those weights of a head are held that are quantized, by their modules."""
    targets: dict[str, WeightTarget] = head.weight_targets()
    quantized = {name: own.quantized for name, own in targets.items()}
    return {
        name.removesuffix(".weight"): str(Storage.of(weight))
        for name, weight in quantized.items()
        if weight is not None
    }


def dense(targets: dict[str, WeightTarget]) -> dict[str, Tensor]:
    return {name: own.view if own.quantized is None else own.quantized.dense() for name, own in targets.items()}


def num_bytes(head: Any) -> int:
    return sum(own.nbytes for own in head.weight_targets().values())


def source_of(directory: Path | str, **options: Any) -> ModelSource:
    return ModelSource(model=str(directory), name="method.model", **options)


# --- one pass over a block ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [FP8, FP8_BLOCKS, "int-quantized", NVFP4])
def test_a_dspark_head_drafts_what_its_expanded_weights_say(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """NVIDIA's have a sequential head of more inputs, which is in NVFP4 too."""
    config, tensors = test_dspark.LAYOUTS["NVIDIA"]
    directory, modules = tmp_path / "head", OF_NVIDIA if name == NVFP4 else ALL
    test_dflash.save_head(directory, config, tensors)
    whole = num_bytes(load_dspark_head(source_of(directory), context_of(target), None, None))
    expected = quantize_checkpoint(directory, LAYOUTS[name], modules)
    head = load_dspark_head(source_of(directory), context_of(target), None, None)
    found, parts = held(head), {"layers.0.self_attn.k_proj", "markov_head.markov_w2"}
    assert {"fc", "layers.0.mlp.gate_proj", "layers.1.mlp.down_proj"} <= found.keys()
    assert parts & found.keys() == (set() if name == NVFP4 else parts)
    assert {kind.partition(" ")[0] for kind in found.values()} == KINDS[name]
    weights = dense(head.weight_targets())
    assert all(torch.equal(weights[f"{own}.weight"], expected[f"{own}.weight"]) for own in found)
    assert num_bytes(head) < 0.7 * whole
    monkeypatch.setitem(test_dspark.LAYOUTS, "packed", (config, expected))
    test_dspark.check_passes(target, monkeypatch, "packed", str(directory), agree_row_by_row)


def agree_row_by_row(*logits: Tensor) -> None:
    """The worst of rows whose conditions differ much says little: one of NVFP4's is off by ten times what most are, and
    by as much with the same weights expanded.
    """
    ours, theirs, exact = (own.view(-1, VOCAB_SIZE) for own in logits)
    assert_rows_are_as_accurate(ours, theirs, exact)


def test_a_dflash_head_in_nvfp4_drafts_what_its_expanded_weights_say(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tensors = test_dflash.LAYOUTS["z-lab"]
    directory = test_dflash.save_head(tmp_path / "head", config, tensors)
    expected = quantize_checkpoint(Path(directory), LAYOUTS[NVFP4], ALL)
    assert set(held(load_dflash_head(source_of(directory), context_of(target), None, None)).values()) == SIXTEENS
    monkeypatch.setitem(test_dflash.LAYOUTS, "packed", (config, expected))
    method = {"method": "dflash", "model": directory, "num_speculative_tokens": 5}
    test_dflash.check_passes(target, monkeypatch, "packed", method, taps=[1, 2])


@pytest.fixture
def dflash(tmp_path: Path) -> Path:
    """A dense head, to be quantized."""
    return Path(test_dflash.save_head(tmp_path / "head", *test_dflash.LAYOUTS["z-lab"]))


def load_dflash(directory: Path, target: Target, **options: Any) -> DFlashHead:
    return load_dflash_head(source_of(directory, **options), context_of(target), None, None)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_weights_that_it_stands_for(name: str, dflash: Path, target: Target) -> None:
    expected = quantize_checkpoint(dflash, LAYOUTS[name], r"_proj$")
    head = load_dflash(dflash, target)
    assert (len(held(head)) == 2 * 7) == (LAYOUTS[name].held is not None)
    assert all(torch.equal(weight, expected[own]) for own, weight in dense(head.weight_targets()).items())


def quantize_as_autogptq(directory: Path, modules: str, bias: float = 0.0) -> dict[str, Tensor]:
    """A bias of that for every product, too; the dense checkpoint that it stands for, without them."""

    def add_biases(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".qweight")]:
            tensors[f"{name.removesuffix('qweight')}bias"] = torch.full((tensors[name].shape[1],), bias)

    expected = quantize_checkpoint(directory, LAYOUTS["GPTQ"], modules)
    edit_tensors(directory, add_biases)
    return expected


def test_biases_of_nothing_that_a_head_has_no_place_for_are_left_out(dflash: Path, target: Target) -> None:
    expected = quantize_as_autogptq(dflash, r"_proj$")
    head = load_dflash(dflash, target)
    assert all(torch.equal(weight, expected[own]) for own, weight in dense(head.weight_targets()).items())
    edit_tensors(dflash, lambda tensors: tensors["layers.1.mlp.up_proj.bias"].fill_(0.5))
    with pytest.raises(UserError, match=r"unexpected: layers\.1\.mlp\.up_proj\.bias;"):
        load_dflash(dflash, target)


def test_rows_of_a_fused_tensor_are_held_as_it_is(dflash: Path, target: Target) -> None:
    def fuse(tensors: dict[str, Tensor]) -> None:
        for layer in range(2):
            parts = [tensors.pop(f"layers.{layer}.self_attn.{name}_proj.weight") for name in "qkv"]
            tensors[f"layers.{layer}.self_attn.qkv_proj.weight"] = torch.cat(parts)

    edit_tensors(dflash, fuse)
    expected = quantize_checkpoint(dflash, LAYOUTS[FP8], r"_proj$")
    head = load_dflash(dflash, target)
    for index, layer in enumerate(head.layers):
        assert f"layers.{index}.self_attn.q_proj" in held(head)
        assert torch.equal(
            unpack(layer.attention.products[0].weight), expected[f"layers.{index}.self_attn.qkv_proj.weight"]
        )


def test_queries_and_keys_in_another_order_are_expanded_with_their_values(target: Target, tmp_path: Path) -> None:
    layout = next(own for own in test_dflash.LAYOUTS.values() if own[0].get("is_neox_style") is False)
    directory = Path(test_dflash.save_head(tmp_path, *layout))
    expected = quantize_checkpoint(directory, LAYOUTS[FP8], r"_proj$")
    head = load_dflash(directory, target)
    parts = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert held(head) == {f"layers.{layer}.{part}": "fp8" for layer in range(2) for part in parts}
    values = head.weight_targets()["layers.0.self_attn.v_proj.weight"].view
    assert torch.equal(values, expected["layers.0.self_attn.v_proj.weight"])


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_values_that_are_keys_are_held_as_these(name: str, load_format: str, tmp_path: Path) -> None:
    """Of heads for Gemma 4, where one tensor is both."""
    config, shapes = test_gemma4_heads.HEADS[name]
    save_head(tmp_path / "head", config, random_weights(shapes))
    gemma4 = Target(directory=tmp_path, model=gemma4_head_reference.save_target(tmp_path, test_gemma4_heads.VOCAB_SIZE))
    expected = quantize_checkpoint(tmp_path / "head", LAYOUTS[FP8], r"_proj$")
    load: Any = {"eagle3": load_eagle3_head, "dflash": load_dflash_head}[name]
    context = replace(context_of(gemma4), vocab_size=test_gemma4_heads.VOCAB_SIZE)
    head = load(source_of(tmp_path / "head", load_format=load_format), context, None, None)
    weights = dense(head.weight_targets())
    keys, values = (f"layers.0.self_attn.{part}_proj" for part in "kv")
    assert {keys, values} <= held(head).keys()
    assert torch.equal(weights[f"{keys}.weight"], weights[f"{values}.weight"])
    if load_format == "auto":
        assert torch.equal(weights[f"{keys}.weight"], expected[f"{keys}.weight"])


def test_parts_of_a_product_that_are_not_quantized_alike_are_expanded_and_told(
    dflash: Path, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    expected = quantize_checkpoint(dflash, LAYOUTS[FP8], r"(self_attn\.[kvo]|mlp\.\w+)_proj$")
    with caplog.at_level(logging.INFO):
        head = load_dflash(dflash, target)
    parts = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert held(head) == {f"layers.{layer}.{part}": "fp8" for layer in range(2) for part in parts}
    assert all(torch.equal(weight, expected[own]) for own, weight in dense(head.weight_targets()).items())
    assert "layers.0.self_attn.k_proj, layers.0.self_attn.v_proj, layers.1" in caplog.text
    assert "are expanded on loading" in caplog.text


def test_where_no_kernel_multiplies_by_8_bits_all_is_expanded(
    dflash: Path, target: Target, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, context = quantize_checkpoint(dflash, LAYOUTS[FP8], ALL), context_of(target)
    monkeypatch.setattr(backend, "multiplies_and_adds", lambda: False)
    head = load_dflash_head(source_of(dflash), context, None, None)
    assert not held(head) and "no kernel here multiplies by quantized weights" in caplog.text
    assert all(torch.equal(weight, expected[own]) for own, weight in dense(head.weight_targets()).items())


def test_what_is_asked_for_is_what_becomes_of_dense_weights_alone(dflash: Path, target: Target) -> None:
    quantize_checkpoint(dflash, LAYOUTS[FP8], r"_proj$")
    head = load_dflash(dflash, target, quantization="int8")
    quantize_head_of_target(head, source_of(dflash, quantization="int8"), CPU)
    assert set(held(head).values()) == {"int8", "fp8"} and held(head)["fc"] == "int8"
    assert held(head)["layers.0.self_attn.q_proj"] == held(head)["layers.1.mlp.up_proj"] == "fp8"
    assert head.lm_head is not None and head.lm_head.kind == "int8"  # type: ignore[union-attr]


def test_a_dummy_is_held_as_its_config_says(dflash: Path, target: Target) -> None:
    """What its layers multiply by, of the usual size."""
    quantize_checkpoint(dflash, LAYOUTS[NVFP4], ALL)
    (dflash / "model.safetensors").unlink()
    head = load_dflash(dflash, target, load_format="dummy")
    assert set(held(head).values()) == SIXTEENS and len(held(head)) == 2 * 7
    for layer in head.layers:
        assert all(0.015 < unpack(weight).std() < 0.025 for weight in layer.product_weights)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_module_that_a_config_excludes_is_dense_beside_its_quantized_target(load_format: str, tmp_path: Path) -> None:
    """As NVIDIA publishes models in NVFP4: the layer behind the target's own stays as it was."""
    mtp_checkpoints.write(tmp_path, "deepseek", "llama")
    quantize_checkpoint(tmp_path, LAYOUTS[NVFP4], r"model\.layers\.[01]\..*_proj$")
    state_config(tmp_path, {**LAYOUTS[NVFP4].config, "exclude_modules": ["lm_head", "model.layers.2*"]})
    method = {"method": "mtp", "num_speculative_tokens": 2}
    llm = LLM(str(tmp_path), device="cpu", dtype="float32", load_format=load_format, speculative_config=method)
    weights = llm.engine.proposer.head.layers[0].product_weights  # type: ignore[attr-defined]
    assert {getattr(weight, "kind", None) for weight in weights} == {None}
    assert llm.engine.target_info.held is not None


@pytest.mark.parametrize(
    "stated",
    [
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},  # of experts
        {"quant_method": "bitsandbytes", "load_in_4bit": True},  # not read
    ],
    ids=lambda stated: stated["quant_method"],
)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_dense_head_may_repeat_what_its_target_says(
    load_format: str, stated: dict[str, Any], dflash: Path, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    state_config(dflash, stated)
    with caplog.at_level(logging.INFO):
        assert not held(load_dflash(dflash, target, load_format=load_format))
    is_told = "its quantization_config is not read; its weights are taken to be dense" in caplog.text
    assert is_told == (load_format == "dummy" and stated["quant_method"] == "bitsandbytes")


@pytest.mark.parametrize("name", [FP8_BLOCKS, NVFP4])
def test_captured_steps_of_a_gpu_say_what_the_cpu_says(
    name: str, dflash: Path, target: Target, emulated_gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It adds weights up, which a GPU does in no certain order.
    monkeypatch.setattr(weight_filling, "require_finite", lambda *_: None)
    quantize_checkpoint(dflash, LAYOUTS[name], ALL)
    method = {"method": "dflash", "model": str(dflash), "num_speculative_tokens": 2}
    found = []
    for device, own in (("cpu", None), ("cpu", method), ("cuda", method)):
        options = {**OPTIONS, "batch_invariant": False, "device": device}
        llm = LLM(str(target.directory), speculative_config=own, **options)
        requests, metrics = complete(llm, PROMPTS[:2], [replace(own, max_tokens=8) for own in PARAMS[:2]])
        counts = [(record.num_draft_tokens, record.num_accepted_tokens) for record in metrics.records]
        found.append(([request.output_token_ids for request in requests], counts))
    weight = llm.engine.proposer.head.fc.weight  # type: ignore[attr-defined]
    assert isinstance(weight, QuantizedWeight) and weight.is_in_words
    assert found[0][0] == found[1][0] and found[1] == found[2] and emulated_gpu.num_replays > 0


# --- token by token -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [FP8, NVFP4])
def test_an_eagle3_head_drafts_what_its_expanded_weights_say(
    eagle_target: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    layout, (directory, model) = test_eagle.LAYOUTS[test_eagle.NORMS_FIRST], eagle_target
    head = test_eagle.make_head(layout, model, tmp_path / "head")
    expected = quantize_checkpoint(tmp_path / "head", LAYOUTS[name], ALL)
    llm = test_eagle.engine(directory, tmp_path / "head", "eagle3", enforce_eager=True)
    weights = [llm.engine.proposer.head.lm_head, llm.engine.proposer.head.fc.weight]  # type: ignore[attr-defined]
    weights += llm.engine.proposer.head.layers[0].product_weights  # type: ignore[attr-defined]
    assert {weight.kind for weight in weights} == KINDS[name]
    drafted, requests = test_eagle.record(llm, monkeypatch)()
    test_eagle.check_drafts(layout, model, replace(head, weights=expected), drafted, requests)
    plain, _ = complete(LLM(str(directory), device="cpu"), test_eagle.PROMPTS, test_eagle.PARAMS)
    assert [own.output_token_ids for own in requests] == [own.output_token_ids for own in plain]


def test_an_eagle3_head_has_biases_where_some_say_something(eagle_target: tuple[Path, Any], tmp_path: Path) -> None:
    layout, (directory, model) = test_eagle.LAYOUTS[test_eagle.NORMS_FIRST], eagle_target
    context = replace(context_of(Target(directory=directory, model=model)), vocab_size=test_eagle.VOCAB_SIZE)
    biases = {f"layers.0.self_attn.{part}_proj.bias" for part in "qkv"}
    for value, modules, expected in ((0.0, r"_proj$", set()), (0.5, r"\.[qkv]_proj$", biases)):
        test_eagle.make_head(layout, model, tmp_path / "head")
        quantize_as_autogptq(tmp_path / "head", modules, value)
        head = load_eagle3_head(source_of(tmp_path / "head"), context, None, None)
        assert {name for name in head.weight_targets() if name.endswith("bias")} == expected


def write_quantized(directory: Path, layout: str, model_type: str, name: str) -> mtp_checkpoints.Written:
    """A target with its module, both quantized; in memory what they stand for."""
    written = mtp_checkpoints.write(directory, layout, model_type)
    names = written.names
    block = (names.block, f"model.layers.{written.num_layers}.")
    beside, of_model = dict(written.tensors), dict(written.model.named_parameters())
    for checkpoint in filter(None, (directory, written.head)):
        for own, tensor in quantize_checkpoint(checkpoint, LAYOUTS[name]).items():
            module = own.removesuffix(".weight").removeprefix(names.module)
            if own.startswith(names.module) and module in beside:
                beside[module] = tensor
            elif (parameter := of_model.get(own.replace(*block))) is not None:
                parameter.data.copy_(tensor)
    return replace(written, tensors=beside)


@pytest.mark.parametrize(
    ("layout", "model_type"), [("deepseek", "llama"), ("qwen3_next", "qwen3"), ("speculators", "qwen3")]
)
@pytest.mark.parametrize("name", [FP8_BLOCKS, NVFP4, "AWQ"])
def test_an_mtp_module_drafts_what_its_expanded_weights_say(
    layout: str, model_type: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_quantized(tmp_path, layout, model_type, name)
    found = held(test_mtp.load_head(written))
    parts = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    assert {f"{written.names.block}{part}" for part in parts} <= found.keys()
    assert (f"{written.names.module}{written.names.projection}" in found) == (layout != "qwen3_next")
    test_mtp.check_logits(written)
    test_mtp.check_drafts(written, monkeypatch)


def test_biases_of_nothing_in_a_module_stop_neither_it_nor_its_target(tmp_path: Path) -> None:
    written = mtp_checkpoints.write(tmp_path, "deepseek", "llama")
    expected = quantize_as_autogptq(tmp_path, r"_proj$")
    weights = dense(test_mtp.load_head(written).weight_targets())
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items() if name.endswith("_proj.weight"))
    name = f"{written.names.block}mlp.up_proj.bias"
    edit_tensors(tmp_path, lambda tensors: tensors[name].fill_(0.5))
    with pytest.raises(UserError, match=rf"unexpected: {name};"):
        test_mtp.load_head(written)


def twin_of(directory: Path, expected: dict[str, Tensor], to: Path) -> Path:
    """The dense checkpoint that a quantized one stands for."""
    shutil.copytree(directory, to)
    save_file(expected, to / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({k: v for k, v in values.items() if k != "quantization_config"}))
    return to


@pytest.mark.parametrize(
    ("name", "layout", "model_type"),
    [
        (FP8_BLOCKS, "deepseek", "deepseek_v3"),
        (FP8_BLOCKS, "qwen3_next", "qwen3_5_text"),
        (FP8_BLOCKS, "nemotron", "nemotron_h"),
        (NVFP4, "qwen3_next", "qwen3_moe"),
        (NVFP4, "qwen3_next", "qwen3_5_text"),
    ],
)
def test_a_module_with_experts_latents_or_gates_drafts_what_its_dense_twin_does(
    name: str, layout: str, model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expanded are queries and keys in another order, and what makes keys of latents."""
    written = mtp_checkpoints.write(tmp_path / "own", layout, model_type)
    expected = quantize_checkpoint(written.directory, LAYOUTS[name])
    twin = twin_of(written.directory, expected, tmp_path / "twin")
    head, whole = test_mtp.load_head(written), test_mtp.load_head(replace(written, directory=twin))
    found, expanded = dense(head.weight_targets()), dense(whole.weight_targets())
    assert found.keys() == expanded.keys() and held(head) and not held(whole)
    assert all(torch.equal(weight, expanded[own]) for own, weight in found.items())
    assert num_bytes(head) < 0.8 * num_bytes(whole)
    prompts = [{"prompt_token_ids": s.prompt} for s in random_sequences(mtp_checkpoints.VOCAB_SIZE, ((5, 0), (50, 0)))]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    method = {"method": "mtp", "num_speculative_tokens": 3}
    drafts, texts = [], []
    for path, own in ((written.directory, method), (twin, method), (written.directory, None)):
        llm = LLM(str(path), device="cpu", dtype="float32", enforce_eager=True, speculative_config=own)
        drafts.append(test_mtp.record_drafts(llm, monkeypatch))
        texts.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert texts[0] == texts[1] == texts[2] and drafts[0] == drafts[1] and len(drafts[0]) > 10
