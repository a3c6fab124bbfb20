"""What configs of families say, and what they may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.engine.architecture import read_architecture
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from tests.dense_families import GEMMA4
from tests.expert_families import LAGUNA
from tests.family_options import (
    DEFAULT_ROPE,
    EXPERTS,
    GEMMA,
    GRANITE,
    GRANITE_OF_WINDOWS,
    LENGTHS,
    PARTIAL,
    ROUTED,
    SHAPE,
    SLIDING_LAYER,
    VOCAB_SIZE,
)
from tests.latent_families import LATENT, LATENT_ROUTED
from tests.recurrent_families import DELTA_NET, GRANITE_HYBRID, KIMI
from tests.transformers_reference import (
    assert_as_accurate,
    engine_logits,
    float64_logits,
    load,
    random_model,
    random_sequences,
    reference_logits,
    save,
)


def test_families_that_are_not_ours_are_left_to_transformers() -> None:
    from transformers import AutoConfig

    assert read_architecture(AutoConfig.for_model("cohere")) is None
    assert read_architecture(AutoConfig.for_model("olmoe", clip_qkv=8.0)) is None
    only_states = ["linear_attention"] * 2
    assert read_architecture(AutoConfig.for_model("qwen3_5_text", **{**SHAPE, "layer_types": only_states})) is None
    assert read_architecture(AutoConfig.for_model("llama", hidden_act="gelu")) is None
    assert read_architecture(AutoConfig.for_model("gemma2", hidden_activation="gelu")) is None  # not Gemma's own gelu
    assert read_architecture(AutoConfig.for_model("gpt_oss", swiglu_limit=5.0)) is None
    for other in ({"layer_types": ["mamba", "mamba"]}, {"time_step_limit": [0.001, 0.1]}):
        assert (
            read_architecture(AutoConfig.for_model("granitemoehybrid", **{**SHAPE, **GRANITE_HYBRID, **other})) is None
        )
    assert read_architecture(AutoConfig.for_model("gpt_oss", swiglu_alpha=1.0)) is None
    assert read_architecture(AutoConfig.for_model("deepseek_v2", topk_method="group_limited_greedy")) is None
    assert read_architecture(AutoConfig.for_model("ernie4_5_moe", use_bias=True)) is None
    assert read_architecture(AutoConfig.for_model("laguna", moe_router_logit_softcapping=30.0)) is None
    for other in ({"use_sandwich_norm": False}, {"use_attention_gate": False}, {"attention_bias": True}):
        assert read_architecture(AutoConfig.for_model("lfm3", **other)) is None
    assert read_architecture(AutoConfig.for_model("qwen3", architectures=["Qwen3ForTokenClassification"])) is None


@pytest.mark.parametrize(
    ("family", "stray"),
    [
        ("llama", {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 24, "no_rope_layers": [0, 1]}),
        ("llama", {"attn_logit_softcapping": 3.0, "partial_rotary_factor": 0.5, "use_bias": True}),
        ("mistral", {"sliding_window": 8, "use_sliding_window": False}),
        ("gemma3_text", {**GEMMA, "attn_logit_softcapping": 3.0}),
    ],
)
def test_keys_of_other_families_mean_nothing(family: str, stray: dict[str, Any], tmp_path: Path) -> None:
    """Configs of heads and merged models repeat what some other model's said."""
    from transformers import AutoConfig

    model = random_model(AutoConfig.for_model(family, **{**SHAPE, **stray}))
    sequences = random_sequences(VOCAB_SIZE, LENGTHS)
    ours = engine_logits(load(save(model, tmp_path)), sequences)
    assert_as_accurate(ours, reference_logits(model, sequences), float64_logits(model, sequences))


def test_the_gelu_of_gemmas_first_releases_is_the_tanh_one() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("gemma", **{**SHAPE, "head_dim": 16})
    config.hidden_act = "gelu"  # as releases of transformers before 5.24 read it
    found = read_architecture(config)
    assert found is not None and found.activation == "gelu_tanh"


@pytest.mark.parametrize(
    ("family", "options", "rule"),
    [
        (
            "qwen3_moe",
            {"num_experts_per_tok": 7},
            r"num_experts_per_tok of a qwen3_moe .* must lie in \[1, 6\], .*; mend",
        ),
        ("dots1", {"num_experts_per_tok": 2}, "n_routed_experts of a dots1 checkpoint must be given, got null; mend"),
        (
            "ernie4_5_moe",
            {"moe_layer_interval": 0},
            "moe_layer_interval of a ernie4_5_moe checkpoint must be >= 1, got 0",
        ),
        (
            "glm4_moe_lite",
            {**LATENT_ROUTED, "rope_parameters": PARTIAL},
            r"head_dim of a glm4_moe_lite .* must be its qk_rope_head_dim \(8\) by partial_rotary_factor",
        ),
        (
            "kimi_linear",
            {**KIMI, "linear_attn_config": {**KIMI["linear_attn_config"], "gate_lower_bound": -5.0}},
            "linear_attn_config of a kimi_linear checkpoint must have no gate_lower_bound",
        ),
        (
            "qwen3_5_text",
            {**DELTA_NET, "linear_num_value_heads": 3},
            r"divisible by linear_num_key_heads \(2\), got 3; mend its",
        ),
        (
            "qwen3_5_text",
            {**DELTA_NET, "linear_key_head_dim": 0},
            "linear_key_head_dim of a qwen3_5_text checkpoint must be >= 1",
        ),
        ("ernie4_5_moe", {"moe_layer_start_index": None}, "moe_layer_start_index of a ernie4_5_moe checkpoint must be"),
        (
            "glm4_moe",
            {**ROUTED, "n_group": 4, "topk_group": 1},
            "n_group of a glm4_moe checkpoint must divide 6, the experts, .* got 4; mend",
        ),
        (
            "glm4_moe",
            {**ROUTED, "n_group": 3, "topk_group": 1},
            r"topk_group of a glm4_moe checkpoint must lie in \[1, 3\], .* the 3 experts .*, got 1; mend",
        ),
        (
            "gemma4_text",
            {**GEMMA4, "vocab_size_per_layer_input": 95},
            "vocab_size_per_layer_input of a gemma4_text checkpoint must be >= 96, its vocab_size, got 95; mend",
        ),
        (
            "gemma4_text",
            {**GEMMA4, "num_kv_shared_layers": 1},
            r"num_kv_shared_layers of a gemma4_text .* \(full_attention, sliding_attention\) .* got 1 of 2 layers;",
        ),
        (
            "gemma4_text",
            {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 3},
            r"num_attention_heads of a gemma4_text checkpoint must be divisible by num_key_value_heads \(3\), got 4",
        ),
        (
            "laguna",
            {**LAGUNA, "num_attention_heads_per_layer": [4, 5]},
            r"num_attention_heads of a laguna checkpoint must be divisible by num_key_value_heads \(2\), got 5; mend",
        ),
        (
            "laguna",
            {**LAGUNA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "rope_parameters of a laguna checkpoint must have those of each of its layer_types, got none of full_att",
        ),
        (
            "granite_swa",
            {**GRANITE_OF_WINDOWS, "layer_rope_theta": [1e4]},
            r"layer_rope_theta of a granite_swa checkpoint must be a number in every layer, .* 2, got .*; mend",
        ),
        ("youtu", {**LATENT, "kv_lora_rank": 0}, "kv_lora_rank of a youtu checkpoint must be >= 1, got 0; mend"),
        ("youtu", {**LATENT, "q_lora_rank": -1}, "q_lora_rank of a youtu checkpoint must be >= 1, got -1; mend"),
        (
            "hunyuan_v1_moe",
            {"num_experts": 6, "moe_topk": [2, 3]},
            r"moe_topk of a hunyuan_v1_moe checkpoint must be one for all layers, got \[2, 3\]; choose",
        ),
        (
            "granite",
            {**GRANITE, "residual_multiplier": 0.0},
            "residual_multiplier of a granite checkpoint must be > 0, got 0.0; mend its config",
        ),
        (
            "muse_glimmer_text",
            {"output_multiplier": 0.0},
            "output_multiplier of a muse_glimmer_text checkpoint must be > 0, got 0.0; mend its config",
        ),
        (
            "lfm2_moe",
            {"layer_types": None},
            "layer_types of a lfm2_moe checkpoint must list its layers, got None; mend",
        ),
        ("youtu", {**LATENT, "head_dim": 16}, r"head_dim of a youtu .* its qk_rope_head_dim \(8\), got 16; leave"),
    ],
    ids=repr,
)
def test_numbers_that_cannot_be_are_refused(family: str, options: dict[str, Any], rule: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **{**SHAPE, **(EXPERTS if family == "qwen3_moe" else {}), **options})
    config.architectures = ["SomeForCausalLM"]
    with pytest.raises(UserError, match=rule):
        read_architecture(config)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("exaone4", {**SLIDING_LAYER, "head_dim": 16}),
        ("gemma4_text", GEMMA4),
        (
            "lfm3",
            {**SLIDING_LAYER, "layer_types": ["conv", "sliding_attention", "full_attention"], "num_hidden_layers": 3}
            | {"head_dim": 16, "pad_token_id": 0},
        ),
    ],
)
@pytest.mark.parametrize("lacking", [{}, {"sliding_attention": None}])
def test_rotations_that_a_kind_of_layers_lacks_are_named(
    family: str, options: dict[str, Any], lacking: dict[str, None]
) -> None:
    """The engine started, and its first step was a KeyError."""
    ropes = {"rope_parameters": {"full_attention": DEFAULT_ROPE, **lacking}}
    config = {**SHAPE, "model_type": family, **options, **ropes}
    rule = f"^model.model=m: rope_parameters of a {family} .* each of its layer_types, got none of sliding_attention; m"
    with pytest.raises(UserError, match=rule):
        load(ModelSource(model="m", load_format="dummy", hf_config=config))
