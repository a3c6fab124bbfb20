"""Checkpoints that take more than text: their language model runs on our own decoder, read in the published layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from runner.engine.checkpoint import ModelSource
from runner.engine.decoder import Decoder
from runner.engine.errors import UserError
from runner.engine.sampling_params import SamplingParams
from runner.engine.text_part import WITH_TEXT_PART, text_config, text_tensors
from runner.llm import LLM
from tests.edit_tensors import edit_tensors
from tests.transformers_reference import (
    INITIALIZER_RANGE,
    assert_as_accurate,
    engine_logits,
    float64_logits,
    load,
    random_model,
    random_sequences,
    reference_logits,
    save,
    save_tokenizer,
)

VOCAB_SIZE = 96
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "initializer_range": INITIALIZER_RANGE,
}
LLAMA, QWEN2 = {**TEXT, "model_type": "llama"}, {**TEXT, "model_type": "qwen2"}
EYES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
PATCHES = {**EYES, "image_size": 28, "patch_size": 14}
CLIP = {**PATCHES, "model_type": "clip_vision_model", "projection_dim": 32}
BLOCKS = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}


STATES: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
HEADS: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
EARS = {**EYES, "output_proj_dims": 32, "subsampling_conv_channels": [8, 4]}


def turning(sections: list[int]) -> dict[str, Any]:
    """Rotations by time, height and width, which are one position in a text."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}}


# model_type -> its language model, its encoder, and what else its config says
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "exaone4_5": (
        {**TEXT, "model_type": "exaone4", "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        {**BLOCKS, "fullatt_block_indexes": [0], "num_key_value_heads": 1},
        {},
    ),
    "gemma3": (
        {
            **TEXT,
            "model_type": "gemma3_text",
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {**PATCHES, "model_type": "siglip_vision_model"},
        {},
    ),
    "gemma4": (
        {**TEXT, **HEADS, "model_type": "gemma4_text", "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2}
        | {"vocab_size_per_layer_input": VOCAB_SIZE},
        {**EYES, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 16},
        {"audio_config": EARS},
    ),
    "gemma4_unified": (
        {**TEXT, **HEADS, "model_type": "gemma4_unified_text", "attention_k_eq_v": True},
        {},
        {"audio_config": {}},
    ),
    "internvl": (QWEN2, {**EYES, "image_size": [28, 28], "patch_size": [14, 14], "model_type": "internvl_vision"}, {}),
    "kimi_k25": (
        {**TEXT, **LATENT, "model_type": "deepseek_v3"},
        {**EYES, "pos_emb_height": 4, "pos_emb_width": 4, "patch_size": 14},
        {"projection_hidden_size": 32, "tie_word_embeddings": False},
    ),
    "lfm2_vl": (
        {**TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        {**PATCHES, "model_type": "siglip2_vision_model"},
        {"downsample_factor": 1, "projector_hidden_size": 32},
    ),
    "lfm3_vl": (
        {**TEXT, "model_type": "lfm3", "head_dim": 16, "sliding_window": 8}
        | {"num_hidden_layers": 3, "layer_types": ["conv", "sliding_attention", "full_attention"]},
        {**EYES, "patch_size": 4},
        {"downsample_factor": 1, "projector_hidden_size": 32},
    ),
    "llama4": (
        {
            **TEXT,
            "model_type": "llama4_text",
            "head_dim": 16,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 16,
        },
        {**PATCHES, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        {},
    ),
    "llava": (LLAMA, CLIP, {}),
    "llava_next": (LLAMA, CLIP, {}),
    "mistral3": (
        {**TEXT, "model_type": "mistral", "sliding_window": None},
        {**PATCHES, "model_type": "pixtral", "head_dim": 16},
        {"tie_word_embeddings": False},
    ),
    "muse_glimmer": (
        {
            **TEXT,
            "model_type": "muse_glimmer_text",
            "head_dim": 16,
            "sliding_window": 8,
            "qk_scale_factor": 1.7,
            "post_norm_eps": 0.1,
            "output_multiplier": 0.3,
            "final_logit_softcapping": 3.0,
        },
        {**EYES, "num_hidden_layers": 2, "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4},
        {"out_hidden_size": 128, "projector_hidden_size": 32},
    ),
    "qwen2_5_vl": (
        {**TEXT, "model_type": "qwen2_5_vl_text", **turning([2, 3, 3])},
        {**BLOCKS, "fullatt_block_indexes": [0]},
        {},
    ),
    "qwen3_5": (
        {**TEXT, "model_type": "qwen3_5_text", "head_dim": 32, **STATES, **turning([2, 1, 1])},
        {**BLOCKS},
        {"tie_word_embeddings": True},
    ),
    "qwen3_5_moe": (
        {
            **{key: value for key, value in TEXT.items() if key != "intermediate_size"},
            **STATES,
            **turning([2, 1, 1]),
            "model_type": "qwen3_5_moe_text",
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        {**BLOCKS},
        {},
    ),
    "qwen3_vl": (
        {**TEXT, "model_type": "qwen3_vl_text", "head_dim": 16, **turning([4, 2, 2])},
        {**BLOCKS, "deepstack_visual_indexes": [0]},
        {"tie_word_embeddings": True},
    ),
    "qwen3_vl_moe": (
        {
            **TEXT,
            **turning([4, 2, 2]),
            "model_type": "qwen3_vl_moe_text",
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
        {**BLOCKS, "deepstack_visual_indexes": [0]},
        {},
    ),
    "smolvlm": (LLAMA, {**PATCHES, "model_type": "smolvlm_vision"}, {}),
}


def seeing_model(name: str) -> Any:
    from transformers import AutoConfig, AutoModelForImageTextToText

    text, eyes, options = MODELS[name]
    config = AutoConfig.for_model(name, text_config=dict(text), vision_config=dict(eyes), **options)
    return random_model(config, AutoModelForImageTextToText)


def named_as_published(tensors: dict[str, torch.Tensor]) -> None:
    """Of Kimi's language model transformers 5.24 saves layers as blocks, as its encoder's are named."""
    for name in [name for name in tensors if ".blocks." in name and name.startswith("language_model.")]:
        tensors[name.replace(".blocks.", ".layers.")] = tensors.pop(name)


def test_every_one_that_is_read_is_tested() -> None:
    assert set(MODELS) == set(WITH_TEXT_PART)


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_text_are_as_accurate_as_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = seeing_model(name)
    sequences = random_sequences(VOCAB_SIZE, ((5, 5), (70, 4), (17, 4)))
    source = save(model, tmp_path)
    if name == "kimi_k25":
        edit_tensors(tmp_path, named_as_published)
    loaded = load(source)
    assert isinstance(loaded.model, Decoder) and loaded.hf_config.model_type == MODELS[name][0]["model_type"]
    head = model.get_output_embeddings().weight
    assert loaded.model.is_tied == torch.equal(head, model.get_input_embeddings().weight)
    reads_text = model.language_model if name == "llama4" else model  # of 5.24 Llama 4 reads none without images
    assert_as_accurate(
        engine_logits(loaded, sequences), reference_logits(reads_text, sequences), float64_logits(reads_text, sequences)
    )


def test_exaones_mtp_module_is_its_drafter_and_nothing_of_the_target(tmp_path: Path) -> None:
    source = save(seeing_model("exaone4_5"), tmp_path)
    expected = load(source)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        layer = "model.language_model.layers.1."
        block = {f"mtp.layers.0.{name.removeprefix(layer)}": tensors[name].clone() for name in tensors if layer in name}
        norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        own = {f"mtp.{name}.weight": torch.ones(64) for name in norms} | {"mtp.fc.weight": torch.ones(64, 128)}
        tensors.update(block | own)

    edit_tensors(tmp_path, add)
    found = load(source)
    assert isinstance(found.model, Decoder) and isinstance(expected.model, Decoder)
    assert all(map(torch.equal, found.model.parameters(), expected.model.parameters()))
    save_tokenizer(tmp_path, VOCAB_SIZE)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    plain, drafted = (
        LLM(str(tmp_path), speculative_config=config, **options).generate([{"prompt_token_ids": [1, 2, 3]}], params)[0]
        for config in (None, {"method": "mtp", "num_speculative_tokens": 2})
    )
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path: Path) -> None:
    from transformers import AutoConfig

    text = {**TEXT, **LATENT, "tie_word_embeddings": False}
    model = random_model(AutoConfig.for_model("deepseek_v3", **text))
    source = save(model, tmp_path)
    file = tmp_path / "config.json"
    auto_map = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}  # code that is not run
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "kimi_k2", "auto_map": auto_map}))
    loaded = load(source)
    assert isinstance(loaded.model, Decoder) and loaded.hf_config.model_type == "kimi_k2"
    sequences = random_sequences(VOCAB_SIZE, ((5, 5), (70, 4), (17, 4)))
    assert_as_accurate(
        engine_logits(loaded, sequences), reference_logits(model, sequences), float64_logits(model, sequences)
    )


def test_experts_are_read_as_they_were_published_too(tmp_path: Path) -> None:
    """Of Qwen3-VL with a row for each input; transformers saves them with one for each output."""
    source = save(seeing_model("qwen3_vl_moe"), tmp_path)
    saved = load(source)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    stacks = [name for name in tensors if ".experts." in name]
    shapes = {tuple(tensors[name].shape) for name in stacks}
    assert shapes == {(4, 48, 64), (4, 64, 24)}
    save_file({**tensors, **{name: tensors[name].transpose(1, 2).contiguous() for name in stacks}}, file)
    published = load(source)
    assert isinstance(saved.model, Decoder) and isinstance(published.model, Decoder)
    assert all(map(torch.equal, saved.model.parameters(), published.model.parameters()))


def test_text_of_the_whole_checkpoint_is_that_of_transformers_with_and_without_speculation(tmp_path: Path) -> None:
    model = seeing_model("gemma3")
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, VOCAB_SIZE)
    ids = torch.tensor([[7, 8, 9, 10] * 5])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, eos_token_id=None
    )
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for method in (None, {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}):
        llm = LLM(str(tmp_path), speculative_config=method, device="cpu", dtype="float32")
        (output,) = llm.generate({"prompt_token_ids": ids[0].tolist()}, params, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model.text_model."])
def test_a_language_models_tensors_are_named_as_one_alone_names_them(prefix: str) -> None:
    head = "language_model.lm_head.weight" if prefix.startswith("language") else "lm_head.weight"
    others = ("vision_tower.a.weight", "model.visual.b", "model.multi_modal_projector.c", "image_newline")
    given = {f"{prefix}layers.0.mlp.up_proj.weight": 1, head: 2, **dict.fromkeys(others, 3)}
    assert text_tensors(given) == {"model.layers.0.mlp.up_proj.weight": 1, "lm_head.weight": 2}


def test_names_of_a_model_of_text_stay() -> None:
    given = {"model.layers.0.mlp.up_proj.weight": 1, "lm_head.weight": 2, "connector.weight": 3}
    assert text_tensors(given) == given


@pytest.mark.parametrize(("stated", "expected"), [(0, 0), ([0, 5], [0, 5]), (None, 7)], ids=str)
def test_the_whole_config_says_where_texts_end(stated: Any, expected: Any) -> None:
    """Bug told here: a token numbered 0 was taken for none, so that texts went on behind it."""
    from transformers import AutoConfig

    config = AutoConfig.for_model("internvl", text_config={**QWEN2, "eos_token_id": 7}, eos_token_id=stated)
    assert text_config(config, None).eos_token_id == expected


def test_what_is_neither_a_language_models_nor_an_encoders_is_named(tmp_path: Path) -> None:
    source = save(seeing_model("llava"), tmp_path)
    file = tmp_path / "model.safetensors"
    with safe_open(file, framework="pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - no dict
    save_file({**tensors, "model.language_model.extra": torch.ones(1), "ears.weight": torch.ones(1)}, file)
    with pytest.raises(UserError, match=r"unexpected: ears\.weight, model\.extra; download"):
        load(source)


def test_shapes_are_read_without_weights() -> None:
    text, eyes, _ = MODELS["gemma3"]
    config = {"model_type": "gemma3", "text_config": text, "vision_config": eyes}
    loaded = load(ModelSource(model="a-gemma3", load_format="dummy", hf_config=config))
    assert isinstance(loaded.model, Decoder) and loaded.model.is_tied
