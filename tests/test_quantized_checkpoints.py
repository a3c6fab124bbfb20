"""A quantized checkpoint of any published layout is read as the weights that it stands for, and held in 8 bits."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig
from transformers.models.mistral4 import Mistral4Config

from kernels.cpu.panels import unpack
from kernels.quantized_weight import FP4_NUMBERS, QuantizedWeight, quantize
from runner.engine import backend
from runner.engine.checkpoint import ModelSource, read_tensors
from runner.engine.decoder import Decoder
from runner.engine.delta_net import GatedDeltaNet
from runner.engine.errors import UserError
from runner.engine.experts import Experts
from runner.engine.latent_attention import LatentAttention
from runner.engine.loader import LoadedModel, load_model
from runner.engine.mlp import MLP
from runner.engine.packed_tensors import unpack_tensors
from runner.engine.quantization import FP4, read_scheme
from runner.engine.quantized_tensors import Numbers
from runner.engine.shard import Shard
from runner.llm import LLM
from tests.edit_tensors import edit_tensors
from tests.latent_families import LATENT
from tests.other_families import FAMILIES
from tests.quantized_checkpoints import (
    FLOAT8,
    GPTQ,
    GROUP,
    INT4,
    LAYOUTS,
    PACKED,
    SHAPE,
    Layout,
    Q,
    compressed,
    fields,
    holds_8_bits,
    in_words,
    int32,
    per_output,
    quantize_checkpoint,
    refusal,
    save_dense,
    state_config,
)
from tests.recurrent_families import DELTA_NET
from tests.transformers_reference import CPU, load, random_model, save

PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8]}, {"prompt_token_ids": [3]}]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dense checkpoint; do not change it."""

    return save_dense(tmp_path_factory.mktemp("dense"))


@pytest.fixture
def checkpoint(dense: Path, tmp_path: Path) -> Path:
    """A copy, to be quantized."""
    return Path(shutil.copytree(dense, tmp_path / "checkpoint"))


def weights_of(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """What layers multiply by, expanded: those that are multiplied together in one."""
    assert isinstance(loaded.model, Decoder)
    return {
        f"{index}.{name}": unpack(getattr(part, name).weight)
        for index, layer in enumerate(loaded.model.layers)
        for part, name in (
            *((layer.attention, name) for name in ("qkv_proj", "o_proj")),
            *((layer.mlp, name) for name in ("gate_up_proj", "down_proj")),
        )
    }


@holds_8_bits
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_weights_that_it_stands_for(name: str, checkpoint: Path, tmp_path: Path) -> None:
    """In every bit, and the text of the dense checkpoint that holds those weights."""
    layout = LAYOUTS[name]
    expected = quantize_checkpoint(checkpoint, layout)
    twin = Path(shutil.copytree(checkpoint, tmp_path / "twin"))
    save_file(expected, twin / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((twin / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps({k: v for k, v in values.items() if k != "quantization_config"}))
    quantized, of_twin = load(ModelSource(model=str(checkpoint))), load(ModelSource(model=str(twin)))
    assert quantized.held == layout.held and of_twin.held is None
    for part, weight in weights_of(of_twin).items():
        assert torch.equal(weights_of(quantized)[part], weight), part
    is_smaller = quantized.num_weight_bytes < 0.75 * of_twin.num_weight_bytes
    assert is_smaller == (layout.held is not None)
    texts = [
        [output.outputs[0].token_ids for output in LLM(str(path), device="cpu").generate(PROMPTS, use_tqdm=False)]
        for path in (checkpoint, twin)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_language_model_inside_another_may_say_by_itself_how_it_is_quantized(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    """In its own config, as Kimi K2.5's does."""
    quantize_checkpoint(checkpoint, LAYOUTS[name])
    inside = Path(shutil.copytree(checkpoint, tmp_path / "inside"))

    def move(tensors: dict[str, Tensor]) -> None:
        for own in list(tensors):
            tensors[f"language_model.{own}"] = tensors.pop(own)

    edit_tensors(inside, move)
    values = json.loads((checkpoint / "config.json").read_text())
    (inside / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": values}))
    alone, found = (load(ModelSource(model=str(path))) for path in (checkpoint, inside))
    assert found.held == alone.held == LAYOUTS[name].held
    for part, weight in weights_of(alone).items():
        assert torch.equal(weights_of(found)[part], weight), part


@pytest.mark.parametrize("name", LAYOUTS)
def test_matrices_that_share_a_quantized_tensor_are_held_as_it_is(name: str, tmp_path: Path) -> None:
    """Phi-3's, each as it would be in a tensor of its own."""

    save(random_model(AutoConfig.for_model("phi3", **{**SHAPE, "pad_token_id": 0})), tmp_path)
    expected = quantize_checkpoint(tmp_path, LAYOUTS[name])
    loaded = load(ModelSource(model=str(tmp_path)))
    assert isinstance(loaded.model, Decoder) and loaded.held == LAYOUTS[name].held
    for index, layer in enumerate(loaded.model.layers):
        for fused, weight in (
            ("self_attn.qkv_proj", layer.attention.qkv_proj.weight),
            ("mlp.gate_up_proj", layer.mlp.gate_up_proj.weight),
        ):
            assert torch.equal(unpack(weight), expected[f"model.layers.{index}.{fused}.weight"]), fused


@pytest.mark.parametrize(
    "family",
    ["qwen3_5_text", "qwen3_next", "granitemoehybrid", "bailing_hybrid", "kimi_linear", "nemotron_h", "lfm2_moe"],
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_layers_with_states_and_gated_attention_multiply_by_is_what_the_checkpoint_holds(
    name: str, family: str, tmp_path: Path
) -> None:
    """In every bit, also where a key head's parts and a head's gate take turns with others in one tensor."""

    experts = {"moe_intermediate_size": 32, "num_experts": 2, "shared_expert_intermediate_size": 32}
    options = {"model_type": family, **DELTA_NET, "num_experts_per_tok": 1}
    options |= experts if family == "qwen3_next" else {}
    if not family.startswith("qwen3"):
        options = FAMILIES[family]
    save(random_model(AutoConfig.for_model(**{**SHAPE, **options})), tmp_path)
    twin = Path(shutil.copytree(tmp_path, tmp_path / "twin"))
    save_file(quantize_checkpoint(tmp_path, LAYOUTS[name]), twin / "model.safetensors", metadata={"format": "pt"})
    quantized, of_twin = load(ModelSource(model=str(tmp_path))), load(ModelSource(model=str(twin)))
    assert isinstance(quantized.model, Decoder) and isinstance(of_twin.model, Decoder) and of_twin.held is None
    for layer, other in zip(quantized.model.layers, of_twin.model.layers, strict=True):
        for own, expected in zip(layer.mixer.products, other.mixer.products, strict=True):
            assert torch.equal(unpack(own.weight), unpack(expected.weight))
        is_dense = [torch.is_tensor(product.weight) for product in layer.mixer.products]
        if LAYOUTS[name].held is not None:
            # What is never quantized, and queries and keys, of whose heads a part turns.
            if isinstance(layer.mixer, GatedDeltaNet):
                assert is_dense == [False, *[True] * (len(is_dense) - 2), False]
            elif family.startswith("qwen3"):
                assert is_dense == [True, False, False]
            elif family == "bailing_hybrid":
                assert is_dense == [True, True, False, False]
            else:
                assert not any(is_dense)


@holds_8_bits
@pytest.mark.parametrize("rows", [None, 16], ids=["a scale an expert", "scales of blocks"])
@pytest.mark.parametrize("family", ["mistral4", "llama4_text"], ids=["rows of outputs", "rows of inputs"])
def test_stacks_of_experts_in_8_bits_are_what_each_of_them_holds(family: str, rows: int | None, tmp_path: Path) -> None:
    """As Mistral Small 4's are published, whose scales lie beside each stack, and those of activations with them."""
    if family == "mistral4":
        experts = {"n_routed_experts": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 0}
        latent = {**LATENT, "q_lora_rank": 32, "v_head_dim": 16}
        config = Mistral4Config(**{**SHAPE, **latent, **experts, "num_experts_per_tok": 2})
    else:
        experts = {"num_local_experts": 4, "intermediate_size": 48, "intermediate_size_mlp": 96, "head_dim": 16}
        config = AutoConfig.for_model(family, **{**SHAPE, **experts, "interleave_moe_layer_step": 1, "pad_token_id": 0})
    save(random_model(config), tmp_path)
    twin = Path(shutil.copytree(tmp_path, tmp_path / "twin"))
    block = rows or 1 << 20
    expected: dict[str, Tensor] = {}

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj")) and "experts." in name]:
            stack = tensors[name]
            sizes = [min(block, size) for size in stack.shape[1:]]
            blocks = stack.unflatten(2, (-1, sizes[1])).unflatten(1, (-1, sizes[0]))
            scales = blocks.abs().amax(dim=(2, 4)) / 448
            wide = scales.repeat_interleave(sizes[0], dim=1).repeat_interleave(sizes[1], dim=2)
            tensors[name] = (stack / wide).to(FLOAT8)
            tensors[f"{name}_scale_inv"], tensors[f"{name}_activation_scale"] = scales, torch.ones(len(stack))
            expected[name] = tensors[name].float() * wide

    edit_tensors(tmp_path, change)
    edit_tensors(twin, lambda tensors: tensors.update(expected))
    state_config(tmp_path, {"quant_method": "fp8", "weight_block_size": None if rows is None else [rows, rows]})
    found, dense = (load(ModelSource(model=str(path))) for path in (tmp_path, twin))
    assert found.held is not None and isinstance(found.model, Decoder) and isinstance(dense.model, Decoder)
    for layer, other in zip(found.model.layers, dense.model.layers, strict=True):
        assert isinstance(layer.mlp, Experts) and isinstance(other.mlp, Experts)
        for own, like in zip(layer.mlp.gate_up_projs, other.mlp.gate_up_projs, strict=True):
            assert isinstance(own, QuantizedWeight) and torch.equal(unpack(own), unpack(like))
        for own, like in zip(layer.mlp.down_projs, other.mlp.down_projs, strict=True):
            assert isinstance(own, QuantizedWeight) and torch.equal(unpack(own), unpack(like))


@holds_8_bits
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_gpu_holds_the_same_numbers_in_words(name: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize_checkpoint(checkpoint, LAYOUTS[name])
    on_cpu = load(ModelSource(model=str(checkpoint)))
    monkeypatch.setattr(backend, "interprets_kernels", True)
    on_gpu = load(ModelSource(model=str(checkpoint)))
    assert isinstance(on_cpu.model, Decoder) and isinstance(on_gpu.model, Decoder) and on_gpu.held == on_cpu.held
    held = [{name: t.quantized for name, t in own.model.weight_targets().items()} for own in (on_cpu, on_gpu)]
    assert any(weight is not None for weight in held[0].values()) == (on_cpu.held is not None)
    for target, weight in held[0].items():
        found = held[1][target]
        assert (weight is None) == (found is None)
        if weight is not None and found is not None:
            expected = weight.in_words().tensors
            assert found.is_in_words and not weight.is_in_words and found.tensors.keys() == expected.keys()
            assert all(torch.equal(tensor, expected[part]) for part, tensor in found.tensors.items())


@pytest.mark.parametrize("name", LAYOUTS)
def test_queries_and_keys_in_another_order_are_expanded_with_their_values(name: str, tmp_path: Path) -> None:
    """ERNIE's, whose neighbours turn together; all other matrices are held as their checkpoint holds them."""
    save(random_model(AutoConfig.for_model("ernie4_5", **{**SHAPE, "head_dim": 16, "pad_token_id": 0})), tmp_path)
    expected = quantize_checkpoint(tmp_path, LAYOUTS[name])
    loaded = load(ModelSource(model=str(tmp_path)))
    assert isinstance(loaded.model, Decoder) and loaded.held == LAYOUTS[name].held
    order = [*range(0, 16, 2), *range(1, 16, 2)]
    for index, layer in enumerate(loaded.model.layers):
        q, k, v = (expected[f"model.layers.{index}.self_attn.{part}_proj.weight"] for part in "qkv")
        turned = [part.view(-1, 16, part.shape[1])[:, order].flatten(0, 1) for part in (q, k)]
        assert torch.equal(unpack(layer.attention.qkv_proj.weight), torch.cat((*turned, v)))
        down = expected[f"model.layers.{index}.mlp.down_proj.weight"]
        assert isinstance(layer.mlp, MLP) and torch.equal(unpack(layer.mlp.down_proj.weight), down)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layers_of_whose_heads_all_turns_are_held_as_their_checkpoint_holds_them(name: str, tmp_path: Path) -> None:
    """Laguna's that see a window; of its others half a head turns. Gates of heads are products as others are."""
    layers = {**FAMILIES["laguna"], "num_attention_heads_per_layer": [8, 16], "intermediate_size": 96, "head_dim": 16}
    layers |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    save(random_model(AutoConfig.for_model(**{**SHAPE, **layers})), tmp_path)
    twin = Path(shutil.copytree(tmp_path, tmp_path / "twin"))
    save_file(quantize_checkpoint(tmp_path, LAYOUTS[name]), twin / "model.safetensors", metadata={"format": "pt"})
    quantized, of_twin = load(ModelSource(model=str(tmp_path))), load(ModelSource(model=str(twin)))
    assert isinstance(quantized.model, Decoder) and isinstance(of_twin.model, Decoder) and of_twin.held is None
    for index, (layer, other) in enumerate(zip(quantized.model.layers, of_twin.model.layers, strict=True)):
        for own, expected in zip(layer.mixer.products, other.mixer.products, strict=True):
            assert torch.equal(unpack(own.weight), unpack(expected.weight))
        if LAYOUTS[name].held is not None:
            is_dense = [torch.is_tensor(product.weight) for product in layer.mixer.products]
            assert is_dense == [index == 0, False, False]


@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_latent_attention_multiplies_by_is_what_the_checkpoint_holds(
    name: str, is_interleaved: bool, tmp_path: Path
) -> None:
    """In every bit; what goes through latents is dense, and so are heads of another order and what is beside them."""

    options = {**SHAPE, **LATENT, "q_lora_rank": 32, "v_head_dim": 16, "rope_interleave": is_interleaved}
    save(random_model(AutoConfig.for_model("youtu", **options)), tmp_path)
    twin = Path(shutil.copytree(tmp_path, tmp_path / "twin"))
    save_file(quantize_checkpoint(tmp_path, LAYOUTS[name]), twin / "model.safetensors", metadata={"format": "pt"})
    quantized, of_twin = load(ModelSource(model=str(tmp_path))), load(ModelSource(model=str(twin)))
    assert isinstance(quantized.model, Decoder) and isinstance(of_twin.model, Decoder) and of_twin.held is None
    for layer, other in zip(quantized.model.layers, of_twin.model.layers, strict=True):
        own, expected = layer.mixer, other.mixer
        assert isinstance(own, LatentAttention) and isinstance(expected, LatentAttention)
        for product, like in zip(own.products, expected.products, strict=True):
            assert torch.equal(unpack(product.weight), unpack(like.weight))
        for heads, like_heads in zip(own.head_products, expected.head_products, strict=True):
            for weight, like_weight in zip(heads.weights, like_heads.weights, strict=True):
                assert torch.is_tensor(weight) and torch.equal(weight, unpack(like_weight))
        if LAYOUTS[name].held is not None:
            is_dense = [torch.is_tensor(product.weight) for product in own.products]
            assert is_dense == [is_interleaved, is_interleaved, False]


@holds_8_bits
@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen3_moe", {"num_experts": 3}), ("glm4_moe", {"n_routed_experts": 3, "first_k_dense_replace": 0})],
)
def test_experts_are_held_as_their_checkpoint_holds_them(family: str, options: dict[str, int], tmp_path: Path) -> None:
    """The published FP8 checkpoints, whose routers stay dense."""

    shape = {"head_dim": 16, "moe_intermediate_size": 48, "num_experts_per_tok": 2, **options}
    save(random_model(AutoConfig.for_model(family, **SHAPE, **shape)), tmp_path)
    layout = LAYOUTS["DeepSeek's and Qwen's FP8"]
    expected = quantize_checkpoint(tmp_path, layout)
    loaded = load(ModelSource(model=str(tmp_path)))
    assert loaded.held == layout.held and isinstance(loaded.model, Decoder)
    for index, layer in enumerate(loaded.model.layers):
        assert isinstance(layer.mlp, Experts)
        assert torch.equal(unpack(layer.mlp.router), expected[f"model.layers.{index}.mlp.gate.weight"])
        for expert, (gate_up, down) in enumerate(zip(layer.mlp.gate_up_projs, layer.mlp.down_projs, strict=True)):
            gate, up, own_down = (
                expected[f"model.layers.{index}.mlp.experts.{expert}.{name}_proj.weight"]
                for name in ("gate", "up", "down")
            )
            assert not isinstance(gate_up, torch.Tensor) and not isinstance(down, torch.Tensor)
            assert torch.equal(unpack(gate_up), torch.cat((gate, up))) and torch.equal(unpack(down), own_down)
        if layer.mlp.shared is not None:
            down = layer.mlp.shared.down_proj.weight
            assert not isinstance(down, torch.Tensor)
            assert torch.equal(unpack(down), expected[f"model.layers.{index}.mlp.shared_experts.down_proj.weight"])
    assert (loaded.model.layers[0].mlp.shared is not None) == (family == "glm4_moe")


def test_read_one_by_one_a_quantized_tensor_is_dense(checkpoint: Path) -> None:
    """Draft heads and MTP modules take theirs so."""
    expected = quantize_checkpoint(checkpoint, LAYOUTS["DeepSeek's and Qwen's FP8"])
    found = {name: tensor[...] for name, tensor in read_tensors(ModelSource(model=str(checkpoint)))}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_modelopts_own_file_says_how_too(checkpoint: Path) -> None:
    quantize_checkpoint(checkpoint, LAYOUTS["ModelOpt"])
    values = json.loads((checkpoint / "config.json").read_text())
    del values["quantization_config"]
    (checkpoint / "config.json").write_text(json.dumps(values))
    stated = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (checkpoint / "hf_quant_config.json").write_text(json.dumps(stated))
    found = dict(read_tensors(ModelSource(model=str(checkpoint))))
    assert not any("scale" in name for name in found)


@dataclass(frozen=True, kw_only=True)
class Slice:
    """As safetensors gives one."""

    tensor: torch.Tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return {torch.int32: "I32", torch.int64: "I64"}.get(self.tensor.dtype, "BF16")

    def __getitem__(self, index: Any) -> torch.Tensor:
        read = torch.empty(self.tensor.shape, dtype=self.tensor.dtype)  # strides of its own, also where a size is 1
        return read.copy_(self.tensor)[index]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_words_may_be_padded(bits: int, has_zeros: bool) -> None:
    """Of 7 outputs the zero points, of 82 inputs the numbers.

    Bug told here: words of one row or column, as these zero points, were not taken apart as they lie in memory.
    """
    weight, generator = torch.randn(7, 82, generator=torch.Generator().manual_seed(2)), torch.Generator().manual_seed(3)
    tensors, dense = int32(weight, generator, bits=bits, has_zeros=has_zeros)
    scheme = read_scheme(compressed("pack-quantized", **{**INT4, "num_bits": bits}), "x", "model.quantization")
    slices = {f"a.{name}": Slice(tensor=tensor) for name, tensor in tensors.items()}
    ((name, found),) = unpack_tensors(slices, scheme, "x")
    assert name == "a.weight" and torch.equal(found[...], dense)


@pytest.mark.parametrize("bits", [4, 8])
def test_modules_of_other_groups_may_have_other_bits(bits: int) -> None:
    """Bug told here: words of 8 bits were taken apart as of 4 where the first group of modules has 4, and half of them
    was the weight.
    """
    stated = compressed("pack-quantized", **{**INT4, "num_bits": 12 - bits})
    stated["config_groups"]["group_1"] = {"targets": ["re:.*down_proj"], "weights": {**INT4, "num_bits": bits}}
    weight = torch.randn(7, 82, generator=torch.Generator().manual_seed(2))
    tensors, dense = int32(weight, torch.Generator().manual_seed(3), bits=bits)
    scheme = read_scheme(stated, "x", "model.quantization")
    ((_, found),) = unpack_tensors({f"a.{n}": Slice(tensor=t) for n, t in tensors.items()}, scheme, "x")
    assert torch.equal(found[...], dense)


def test_an_order_that_is_not_stated_is_the_inputs_own() -> None:
    """compressed-tensors fills weight_g_idx with -1 then."""
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    tensors, dense = int32(weight, torch.Generator().manual_seed(3))
    tensors["weight_g_idx"] = torch.full((64,), -1, dtype=torch.int32)
    scheme = read_scheme(compressed("pack-quantized", **INT4), "x", "model.quantization")
    ((_, found),) = unpack_tensors({f"a.{n}": Slice(tensor=t) for n, t in tensors.items()}, scheme, "x")
    assert found.storage.group_size == GROUP and torch.equal(found[...], dense)


@holds_8_bits
def test_a_bias_of_nothing_that_a_model_has_no_place_for_is_left_out(checkpoint: Path) -> None:
    """AutoGPTQ writes one for every product."""
    quantize_checkpoint(checkpoint, LAYOUTS["GPTQ"])
    edit_tensors(checkpoint, lambda tensors: tensors.update({f"{Q}.bias": torch.zeros(64)}))
    load(ModelSource(model=str(checkpoint)))
    edit_tensors(checkpoint, lambda tensors: tensors[f"{Q}.bias"].fill_(0.5))
    assert f"unexpected: {Q}.bias" in refusal(checkpoint)


@holds_8_bits
def test_a_tied_head_is_the_embedding_whatever_a_checkpoint_holds_beside_it(checkpoint: Path) -> None:
    quantize_checkpoint(checkpoint, LAYOUTS["int-quantized"])

    def change(tensors: dict[str, torch.Tensor]) -> None:
        packed, _ = LAYOUTS["int-quantized"].pack(tensors.pop("lm_head.weight"), torch.Generator())
        tensors.update({f"lm_head.{part}": value for part, value in packed.items()})

    edit_tensors(checkpoint, change)
    values = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**values, "tie_word_embeddings": True}))
    loaded = load(ModelSource(model=str(checkpoint)))
    assert loaded.model.lm_head.data_ptr() == loaded.model.embed_tokens.data_ptr()


def test_a_head_may_repeat_what_its_target_says(checkpoint: Path) -> None:
    """Its own tensors are dense, so that nothing has to be read."""
    state_config(checkpoint, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    assert all(tensor[...].dtype == torch.float32 for _, tensor in read_tensors(ModelSource(model=str(checkpoint))))


def test_activations_that_were_not_to_be_rounded_change_nothing(checkpoint: Path) -> None:
    """ModelOpt has a name of its own for that."""
    quantize_checkpoint(checkpoint, LAYOUTS["ModelOpt's NVFP4"])
    state_config(checkpoint, {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"})
    assert load(ModelSource(model=str(checkpoint))).held == LAYOUTS["ModelOpt's NVFP4"].held


@holds_8_bits
def test_what_no_kernel_takes_may_be_quantized_anew(checkpoint: Path) -> None:
    expected = quantize_checkpoint(checkpoint, LAYOUTS["GPTQ, inputs in any order"])
    loaded = load(ModelSource(model=str(checkpoint), quantization="int8"))
    assert loaded.held == "int8" and isinstance(loaded.model, Decoder)
    weight = loaded.model.layers[0].attention.o_proj.weight
    assert torch.equal(unpack(weight), quantize(expected["model.layers.0.self_attn.o_proj.weight"], "int8").dense())


@holds_8_bits
def test_matrices_with_zero_points_are_multiplied_together_with_others(checkpoint: Path) -> None:
    """Not all GPTQ checkpoints that say that they are symmetric are, and those that are not may be so in part."""
    seen = list[int]()

    def pack(weight: torch.Tensor, generator: torch.Generator) -> Any:
        own = fields(weight, generator, bits=4, has_zeros=len(seen) % 2 == 0)
        seen.append(len(weight))
        tensors = {
            "qweight": in_words(own.numbers, 4).T.contiguous(),
            "qzeros": in_words(own.zeros.T - 1, 4),
            "scales": own.scales.T.contiguous(),
        }
        return tensors, own.dense

    layout = Layout(pack=pack, config={**GPTQ, "sym": True}, held=PACKED)
    expected = quantize_checkpoint(checkpoint, layout)
    loaded = load(ModelSource(model=str(checkpoint)))
    assert loaded.held == layout.held
    for part, weight in weights_of(loaded).items():
        layer, name = part.split(".")
        modules = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}.get(
            name, (name,)
        )
        parent = "self_attn" if name in ("qkv_proj", "o_proj") else "mlp"
        whole = torch.cat([expected[f"model.layers.{layer}.{parent}.{module}.weight"] for module in modules])
        assert torch.equal(weight, whole), part


@holds_8_bits
def test_modules_that_a_checkpoint_leaves_dense_stay_so(checkpoint: Path) -> None:
    """As Meta left attention of Llama 3.1 405B, and whoever quantizes may leave any layer."""

    def pack(weight: torch.Tensor, generator: torch.Generator) -> Any:
        return per_output(weight, generator) if 80 in weight.shape else ({"weight": weight}, weight)

    quantize_checkpoint(checkpoint, Layout(pack=pack, config={"quant_method": "fbgemm_fp8"}, held="fp8"))
    loaded = load(ModelSource(model=str(checkpoint)))
    assert isinstance(loaded.model, Decoder)
    kinds = {
        name: type(getattr(part, name).weight).__name__
        for layer in loaded.model.layers
        for part, name in ((layer.attention, "qkv_proj"), (layer.mlp, "gate_up_proj"), (layer.mlp, "down_proj"))
    }
    assert kinds == {"qkv_proj": "Tensor", "gate_up_proj": "QuantizedWeight", "down_proj": "QuantizedWeight"}


@holds_8_bits
def test_parts_that_are_multiplied_together_and_not_quantized_alike_are_expanded(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected, dense = quantize_checkpoint(checkpoint, LAYOUTS["FBGEMM"]), torch.randn(64, 64)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{Q}.weight_scale"]
        tensors[f"{Q}.weight"] = dense

    edit_tensors(checkpoint, change)
    with caplog.at_level(logging.INFO):
        loaded = load(ModelSource(model=str(checkpoint)))
    first, other = (layer.attention.qkv_proj.weight for layer in loaded.model.layers)
    k, v = (expected[Q.replace("q_proj", f"{name}_proj") + ".weight"] for name in "kv")
    assert torch.equal(unpack(first), torch.cat((dense, k, v)))
    assert isinstance(first, Tensor) and isinstance(other, QuantizedWeight)
    of_keys, of_values = (f"model.layers.0.self_attn.{name}_proj" for name in "kv")
    assert f"{of_keys}, {of_values} are expanded on loading" in caplog.text


@holds_8_bits
def test_a_head_that_a_checkpoint_quantizes_is_held_so_and_an_embedding_is_expanded(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected, layout = quantize_checkpoint(checkpoint, LAYOUTS["int-quantized"]), LAYOUTS["int-quantized"]

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for module in ("lm_head", "model.embed_tokens"):
            weight = tensors.pop(f"{module}.weight")
            packed, expected[f"{module}.weight"] = layout.pack(weight, torch.Generator())
            tensors.update({f"{module}.{part}": value for part, value in packed.items()})

    edit_tensors(checkpoint, change)
    with caplog.at_level(logging.INFO):
        loaded = load(ModelSource(model=str(checkpoint)))
    assert isinstance(loaded.model.lm_head, QuantizedWeight)
    assert torch.equal(unpack(loaded.model.lm_head), expected["lm_head.weight"])
    assert torch.equal(loaded.model.embed_tokens, expected["model.embed_tokens.weight"])
    assert "model.embed_tokens are expanded on loading" in caplog.text


def test_where_no_kernel_multiplies_by_8_bits_all_is_expanded(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quantize_checkpoint(checkpoint, LAYOUTS["int-quantized"])
    monkeypatch.setattr(backend, "multiplies_and_adds", lambda: False)
    loaded = load(ModelSource(model=str(checkpoint)))
    assert loaded.held is None and "no kernel here multiplies by quantized weights" in caplog.text


@holds_8_bits
@pytest.mark.parametrize(
    "name",
    ["float-quantized, outputs", "DeepSeek's and Qwen's FP8", "pack-quantized, 4 bits", "AWQ", "ModelOpt's NVFP4"],
)
def test_a_shard_is_its_part_of_numbers_and_scales(name: str, checkpoint: Path) -> None:
    """Outputs of q, k, v, gate and up, inputs of o and down; of groups the inputs' own."""
    edit_tensors(checkpoint, _widen_mlp)
    values = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**values, "intermediate_size": 4 * GROUP}))
    quantize_checkpoint(checkpoint, LAYOUTS[name])
    source = ModelSource(model=str(checkpoint))
    whole = weights_of(load(source))
    shards = [
        weights_of(
            load_model(source, device=CPU, dtype=torch.float32, max_model_len=None, shard=Shard(rank=rank, size=2))
        )
        for rank in range(2)
    ]
    for part, weight in whole.items():
        halves = [shard[part] for shard in shards]
        if part.endswith(("o_proj", "down_proj")):
            assert torch.equal(torch.cat(halves, dim=1), weight), part
            continue
        rows = [tensor.split([size // 2 for size in sizes_of(part)]) for tensor in halves]
        together = torch.cat([half for pair in zip(*rows, strict=True) for half in pair])
        assert torch.equal(together, weight), part


def sizes_of(part: str) -> list[int]:
    return [64, 32, 32] if part.endswith("qkv_proj") else [4 * GROUP, 4 * GROUP]


def _widen_mlp(tensors: dict[str, torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    for name in list(tensors):
        if ".mlp." in name:
            shape = (64, 4 * GROUP) if "down_proj" in name else (4 * GROUP, 64)
            tensors[name] = 0.2 * torch.randn(shape, generator=generator)


@holds_8_bits
def test_inputs_that_share_a_scale_stay_in_one_rank(checkpoint: Path) -> None:
    quantize_checkpoint(checkpoint, LAYOUTS["GPTQ"])
    source = ModelSource(model=str(checkpoint))
    with pytest.raises(
        UserError, match=r"down_proj has 40 inputs in each of 2 ranks, which must be divisible by 16: 32"
    ):
        load_model(source, device=CPU, dtype=torch.float32, max_model_len=None, shard=Shard(rank=0, size=2))


def test_an_fp4_is_exact_but_that_groups_of_less_than_2_to_the_minus_24_are_0() -> None:
    codes = torch.arange(80, dtype=torch.uint8).remainder(16).repeat(2, 1)
    block_scales = torch.tensor([[1.875, 2.0**-9, 0.0, 2.0**-24, 1.875 * 2.0**-25], [0.0, 1.0, 0.0, 0.0, 1.5]])
    scales = torch.tensor([[0.37], [1e-3]])
    found = Numbers.of_fp4(codes, block_scales, scales)
    kept = torch.where(block_scales < 2.0**-24, 0.0, block_scales * scales)
    numbers = torch.tensor(FP4_NUMBERS)[codes.int()]
    assert torch.equal(found.expand(FP4), numbers * kept.repeat_interleave(16, dim=1))


def test_an_nvfp4_whose_scales_are_all_0_is_0_whatever_they_are_multiplied_by(checkpoint: Path) -> None:
    quantize_checkpoint(checkpoint, LAYOUTS["ModelOpt's NVFP4"])

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.weight_scale"].view(torch.uint8).zero_()
        tensors[f"{Q}.weight_scale_2"].fill_(1e37)

    edit_tensors(checkpoint, change)
    tensors = dict(read_tensors(ModelSource(model=str(checkpoint))))
    assert not tensors[f"{Q}.weight"][...].any()


def test_the_start_asks_layers_of_each_kind_of_weights(checkpoint: Path) -> None:
    """Layers of one shape were asked once, of which a mixture holds some dense and others in 4 bits."""
    before = load_file(checkpoint / "model.safetensors")
    quantize_checkpoint(checkpoint, LAYOUTS["ModelOpt's mixture"])

    def restore(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.1.mlp.")]:
            del tensors[name]
        tensors |= {name: own for name, own in before.items() if name.startswith("model.layers.1.mlp.")}

    edit_tensors(checkpoint, restore)
    model = load(ModelSource(model=str(checkpoint))).model
    assert isinstance(model, Decoder)
    assert model.sample_layers == list(model.layers)
