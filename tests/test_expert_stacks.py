"""gpt-oss's checkpoints, which hold all experts of a layer in one tensor, dense or in MXFP4, are read as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kernels.cpu.panels import unpack
from kernels.quantized_weight import QuantizedWeight
from runner.engine import backend
from runner.engine.checkpoint import ModelSource
from runner.engine.decoder import Decoder
from runner.engine.errors import UserError
from runner.engine.experts import Experts
from runner.engine.head_checkpoint import read_head_tensors
from runner.engine.loader import LoadedModel, load_model
from runner.engine.shard import Shard
from runner.llm import LLM
from tests.edit_tensors import edit_tensors
from tests.quantized_checkpoints import MXFP4, holds_8_bits, pack_experts
from tests.transformers_reference import (
    CPU,
    assert_as_accurate,
    engine_logits,
    float64_logits,
    load,
    random_model,
    random_sequences,
    reference_logits,
    save,
    saved_model,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
EXPERTS = "model.layers.0.mlp.experts."
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    from transformers import AutoConfig

    save(random_model(AutoConfig.for_model("gpt_oss", **SHAPE)), tmp_path)
    return tmp_path


def mixtures(loaded: LoadedModel) -> list[Experts]:
    assert isinstance(loaded.model, Decoder)
    return [layer.mlp for layer in loaded.model.layers if isinstance(layer.mlp, Experts)]


def assert_stand_for(loaded: LoadedModel, stacks: Tensors) -> None:
    for index, mixture in enumerate(mixtures(loaded)):
        gate_up, down = (stacks[f"model.layers.{index}.mlp.experts.{name}_proj"] for name in ("gate_up", "down"))
        for expert, (first, second) in enumerate(zip(mixture.gate_up_projs, mixture.down_projs, strict=True)):
            gates, ups = gate_up[expert].T[0::2], gate_up[expert].T[1::2]
            assert torch.equal(unpack(first), torch.cat((gates, ups))) and torch.equal(unpack(second), down[expert].T)


def test_a_dense_checkpoints_experts_are_taken_apart(dense: Path) -> None:
    loaded = load(ModelSource(model=str(dense)))
    assert loaded.held is None
    assert_stand_for(loaded, load_file(dense / "model.safetensors"))


@holds_8_bits
def test_mxfp4_is_held_in_4_bits(dense: Path) -> None:
    stacks = pack_experts(dense)
    loaded = load(ModelSource(model=str(dense)))
    assert loaded.held == "fp4"
    assert all(isinstance(own, QuantizedWeight) and own.kind == "fp4" for own in mixtures(loaded)[1].gate_up_projs)
    assert_stand_for(loaded, stacks)


def test_mxfp4_means_what_transformers_expands_it_to(dense: Path) -> None:
    pack_experts(dense)
    sequences = random_sequences(SHAPE["vocab_size"], ((17, 5), (40, 4), (17, 4)))
    ours, model = engine_logits(load(ModelSource(model=str(dense))), sequences), saved_model(dense, torch.float32)
    assert_as_accurate(ours, reference_logits(model, sequences), float64_logits(model, sequences))


def test_a_target_in_mxfp4_is_no_head(dense: Path) -> None:
    pack_experts(dense)
    with pytest.raises(UserError, match="holds experts in MXFP4, which draft heads have not; choose a head made for"):
        read_head_tensors(ModelSource(model=str(dense), name="method.model"))


def test_where_no_kernel_multiplies_by_8_bits_mxfp4_is_expanded(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "multiplies_and_adds", lambda: False)
    stacks = pack_experts(dense)
    loaded = load(ModelSource(model=str(dense)))
    assert loaded.held is None
    assert_stand_for(loaded, stacks)


@holds_8_bits
@pytest.mark.parametrize("intermediate_size", [128, 96])  # 48 inputs in each rank are one group and a half: in 8 bits
def test_a_shard_is_its_part_of_every_expert(intermediate_size: int, tmp_path: Path) -> None:
    from transformers import AutoConfig

    shape = {**SHAPE, "intermediate_size": intermediate_size}
    source = save(random_model(AutoConfig.for_model("gpt_oss", **shape)), tmp_path)
    pack_experts(tmp_path)
    whole = mixtures(load(source))[0]
    shards = [
        mixtures(
            load_model(source, device=CPU, dtype=torch.float32, max_model_len=None, shard=Shard(rank=rank, size=2))
        )
        for rank in range(2)
    ]
    for expert in range(SHAPE["num_local_experts"]):
        gate_up = [unpack(shard[0].gate_up_projs[expert]).chunk(2) for shard in shards]
        gates, ups = (torch.cat(halves) for halves in zip(*gate_up, strict=True))
        assert torch.equal(torch.cat((gates, ups)), unpack(whole.gate_up_projs[expert]))
        down = [unpack(shard[0].down_projs[expert]) for shard in shards]
        assert torch.equal(torch.cat(down, dim=1), unpack(whole.down_projs[expert]))


@holds_8_bits
def test_a_dummy_of_a_published_config_holds_its_experts_so_and_nothing_else() -> None:
    llm = LLM("dummy", load_format="dummy", hf_config={"model_type": "gpt_oss", **SHAPE, "quantization_config": MXFP4})
    assert llm.engine.target_info.held == "fp4"
    model = llm.engine.target.model
    assert isinstance(model, Decoder) and getattr(model.layers[0].attention.qkv_proj.weight, "scales", None) is None


@holds_8_bits
def test_mxfp4_is_not_quantized_once_more(dense: Path) -> None:
    pack_experts(dense)
    rule = r"must not be quantized to fp8: its checkpoint is quantized already \(fp4\)"
    with pytest.raises(UserError, match=rule):
        load(ModelSource(model=str(dense), quantization="fp8"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda t: t.pop(f"{EXPERTS}down_proj_scales"),
            f"{EXPERTS}down_proj_blocks lacks its down_proj_scales; download the checkpoint again",
        ),
        (
            lambda t: t.update({f"{EXPERTS}down_proj_scales": t[f"{EXPERTS}down_proj_scales"][:, :, :2].clone()}),
            f"{EXPERTS}down_proj_blocks must have shape [3, 64, 2, 16] by its scales, got [3, 64, 4, 16]",
        ),
        (
            lambda t: t[f"{EXPERTS}gate_up_proj_scales"].fill_(255),
            f"{EXPERTS}gate_up_proj must have finite scales below 128",
        ),
        (lambda t: t.pop(f"{EXPERTS}gate_up_proj_blocks"), f"unexpected: {EXPERTS}gate_up_proj_scales"),
        (
            lambda t: t.update({f"{EXPERTS}down_proj_bias": t[f"{EXPERTS}down_proj_bias"][:2].clone()}),
            f"{EXPERTS}down_proj.bias must have shape [3, 64] by its config.json, got [2, 64]",
        ),
        (
            lambda t: t.update({f"{EXPERTS}down_proj_scales": t[f"{EXPERTS}down_proj_scales"].to(torch.int8)}),
            f"{EXPERTS}down_proj_scales must hold bytes (U8), got I8; download the checkpoint again",
        ),
        (
            lambda t: t.update({f"{EXPERTS}down_proj": torch.ones(3, 128, 64, dtype=torch.int8)}),
            f"{EXPERTS}down_proj must hold weights, got I8 without the scales",
        ),
        (lambda t: t.pop("model.layers.1.self_attn.sinks"), "missing: model.layers.1.self_attn.sinks"),
        (
            lambda t: t.update({f"{EXPERTS}down_proj_bias": torch.zeros(64)}),
            f"unexpected: {EXPERTS}down_proj_bias; missing: {EXPERTS}down_proj.bias",
        ),
    ],
)
def test_a_broken_checkpoint_is_refused_with_the_tensor(
    change: Callable[[Tensors], object], said: str, dense: Path
) -> None:
    pack_experts(dense)
    edit_tensors(dense, change)
    with pytest.raises(UserError) as error:
        load(ModelSource(model=str(dense)))
    assert said in str(error.value)
