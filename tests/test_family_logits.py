"""Our decoder computes what transformers computes, for every family and option it claims to support."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cpu.panels import pack, unpack
from runner.engine.decoder import Decoder
from runner.engine.experts import Experts
from runner.engine.grouped_query_attention import GroupedQueryAttention
from runner.engine.tile_shape import ROW_INVARIANT_TILES
from tests.family_options import LENGTHS, LONGROPE, SHAPE, VOCAB_SIZE
from tests.model_families import VARIANTS, make_config
from tests.transformers_reference import (
    assert_as_accurate,
    assert_taps_are_hidden_states,
    engine_logits,
    float64_logits,
    load,
    long_context_logits,
    random_model,
    random_sequences,
    reference_logits,
    save,
    saved_model,
)

BFLOAT16 = (
    "afmoe",
    "bailing_hybrid",
    "deepseek_v3",
    "ernie4_5, biased, tied",
    "exaone4",
    "gemma2",
    "gemma3_text",
    "gemma4_text, inputs of layers",
    "gemma4_text, keys that are values, other heads",
    "glm4",
    "granite",
    "granitemoehybrid",
    "hunyuan_v1_dense, stretched rope, biased",
    "kimi_linear",
    "laguna",
    "lfm2",
    "llama, attention bias",
    "minimax_m2",
    "mistral, sliding",
    "nemotron_h",
    "nemotron_h, experts over a latent",
    "olmo3",
    "olmo_hybrid, turned, heads share keys, written once, tied",
    "phi3",
    "qwen2, tied",
    "qwen3",
    "smollm3",
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_as_accurate_as_those_of_transformers(variant: str, tmp_path: Path) -> None:
    model = random_model(make_config(variant))
    sequences = random_sequences(VOCAB_SIZE, LENGTHS)
    loaded = load(save(model, tmp_path))
    assert isinstance(loaded.model, Decoder)
    ours = engine_logits(loaded, sequences)
    assert_as_accurate(ours, reference_logits(model, sequences), float64_logits(model, sequences))


@pytest.mark.parametrize("variant", ["llama", "qwen2, sliding layer", "qwen3", "qwen3_moe", "glm4_moe", "qwen3_5_text"])
def test_logits_are_accurate_without_fixed_tiles(variant: str, tmp_path: Path) -> None:
    model = random_model(make_config(variant))
    sequences = random_sequences(VOCAB_SIZE, LENGTHS)
    ours = engine_logits(load(save(model, tmp_path)), sequences, batch_invariant=False)
    assert_as_accurate(ours, reference_logits(model, sequences), float64_logits(model, sequences))


@pytest.mark.parametrize("variant", BFLOAT16)
def test_bfloat16_logits_are_as_accurate_as_those_of_transformers(variant: str, tmp_path: Path) -> None:
    source = save(random_model(make_config(variant)), tmp_path)
    model = saved_model(tmp_path, torch.bfloat16)
    sequences = random_sequences(VOCAB_SIZE, LENGTHS)
    ours = engine_logits(load(source, dtype=torch.bfloat16), sequences)
    assert_as_accurate(ours, reference_logits(model, sequences), float64_logits(model, sequences))


def test_longrope_takes_its_short_factors_when_max_model_len_does_not_pass_the_switch(tmp_path: Path) -> None:
    model = random_model(longrope_config())
    sequences = random_sequences(VOCAB_SIZE, ((5, 5), (24, 4), (17, 4)))  # transformers uses its short set up to 32
    ours = engine_logits(load(save(model, tmp_path), max_model_len=32), sequences)
    assert_as_accurate(ours, reference_logits(model, sequences), float64_logits(model, sequences))


def test_longrope_takes_its_long_factors_for_short_sequences_too_when_max_model_len_passes_the_switch(
    tmp_path: Path,
) -> None:
    """transformers switches by the longest sequence at hand, so a request's text would change with its neighbours."""
    model = random_model(longrope_config())
    sequences = random_sequences(VOCAB_SIZE, LENGTHS)
    ours = engine_logits(load(save(model, tmp_path), max_model_len=128), sequences)
    assert_as_accurate(ours, *long_context_logits(model, sequences))


def longrope_config() -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model("llama", **SHAPE, rope_parameters=LONGROPE)


@pytest.mark.parametrize(
    "variant",
    [
        *("llama, tied", "mistral, sliding", "olmo3", "qwen2", "qwen3", "gemma2", "gemma3_text", "glm4", "gpt_oss"),
        *("afmoe", "granite", "laguna"),
        "qwen3_5_text",
    ],
)
def test_taps_are_the_hidden_states_of_transformers(variant: str, tmp_path: Path) -> None:
    model = random_model(make_config(variant))
    assert_taps_are_hidden_states(load(save(model, tmp_path)), model, ROW_INVARIANT_TILES["prefill"])


def test_layers_of_one_kind_turn_as_many_heads_as_each_has(tmp_path: Path) -> None:
    """Kernels are told how many; plain torch, where gradients are asked for, looks them up in a table of whole rows."""
    model = load(
        save(random_model(make_config("laguna, layers of one kind have other heads, no experts")), tmp_path)
    ).model
    assert isinstance(model, Decoder)
    for layer in model.layers:
        attention = layer.attention
        assert isinstance(attention, GroupedQueryAttention)
        rope = model._ropes[attention.turns](torch.zeros(1, dtype=torch.int64), model.embed_tokens)
        assert len(rope.table.partner) == attention.qkv_proj.weight.shape[0]


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize(
    ("family", "stored", "held"),
    [
        ("ernie4_5_moe", torch.bfloat16, torch.float32),
        ("glm4_moe", torch.float32, torch.float32),
        ("glm4_moe", torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_a_router_keeps_its_digits_beside_16_bits(
    family: str,
    stored: torch.dtype,
    held: torch.dtype,
    is_packed: bool,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """ERNIE's is published in float32; GLM's is taken as it is stored. Either way logits are not rounded."""
    if not is_packed:
        request.getfixturevalue("unpacked_weights")
    model = random_model(make_config(family)).to(stored)
    loaded = load(save(model, tmp_path), dtype=torch.bfloat16)
    assert isinstance(loaded.model, Decoder)
    loaded.model.convert(pack if is_packed else lambda weight: weight)
    mlp, gate = loaded.model.layers[1].mlp, model.model.layers[1].mlp.gate
    assert isinstance(mlp, Experts) and mlp.corrections is not None
    assert mlp.router.dtype == held and torch.equal(unpack(mlp.router), gate.weight.to(held))
    statics = gate.moe_statics if family == "ernie4_5_moe" else gate
    assert torch.equal(mlp.corrections, statics.e_score_correction_bias.float().flatten())
    assert mlp.gate_up_projs[0].dtype == torch.bfloat16

    rows = torch.randn(16, SHAPE["hidden_size"], generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = rows.double() @ gate.weight.double().t()
    assert (mlp.router_logits(rows, 1) - exact).abs().max() < 1e-6 * exact.abs().max()
