"""Other architectures run by transformers' own code over our paged cache: its logits, or a refusal with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.tile_shape import ANY_SHAPE_TILES
from runner.engine.transformers_model import TransformersModel
from runner.llm import LLM, SamplingParams
from tests.mtp_checkpoints import DEEPSEEK
from tests.quantized_checkpoints import pack_experts
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
    save_tokenizer,
    saved_model,
)

VOCAB_SIZE = 96
LENGTHS = ((5, 5), (70, 4), (17, 4))
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
ONE_SLIDING_LAYER = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 32,
}
OTHER_ACT = {"hidden_act": "gelu"}  # with the published one its layers are ours
# model_type -> options beyond SHAPE
MODELS: dict[str, dict[str, Any]] = {
    "olmoe": {**OTHER_ACT, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **OTHER_ACT,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "vaultgemma": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "final_logit_softcapping": 3.0},
    "olmo3": {**OTHER_ACT, **ONE_SLIDING_LAYER},  # each kind of layers has rotations of its own
    "gpt_oss": {
        "head_dim": 16,
        **EXPERTS,
        **ONE_SLIDING_LAYER,
        "swiglu_limit": 1.0,  # with the published one its layers are ours
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "deepseek_v3": {**OTHER_ACT, **DEEPSEEK},
    "laguna": {
        **ONE_SLIDING_LAYER,
        "moe_router_logit_softcapping": 1.0,  # without one its layers are ours
        "head_dim": 16,
        "num_attention_heads_per_layer": [8, 4],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "olmo2": OTHER_ACT,
    "cohere2": {**ONE_SLIDING_LAYER, "logit_scale": 0.25},
    "granite": {**OTHER_ACT, "logits_scaling": 4.0, "attention_multiplier": 0.3, "embedding_multiplier": 3.0},
    "gpt2": {},  # learned positions, biases everywhere, a decoder that goes by another name
}


def make_config(model_type: str, **options: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **{**SHAPE, **MODELS.get(model_type, {}), **options})


@pytest.mark.parametrize("model_type", MODELS)
def test_logits_are_as_accurate_as_those_of_transformers_alone(model_type: str, tmp_path: Path) -> None:
    model = random_model(make_config(model_type))
    sequences = random_sequences(VOCAB_SIZE, LENGTHS)
    loaded = load(save(model, tmp_path))
    assert isinstance(loaded.model, TransformersModel) and loaded.model.vocab_size == VOCAB_SIZE
    ours = engine_logits(loaded, sequences)
    assert_as_accurate(ours, reference_logits(model, sequences), float64_logits(model, sequences))


# No mixture of experts: rounding to bfloat16 sends a token to another expert, and its error is then no rounding error.
@pytest.mark.parametrize("model_type", ["vaultgemma", "cohere2"])
def test_bfloat16_logits_are_as_accurate_as_those_of_transformers_alone(model_type: str, tmp_path: Path) -> None:
    source = save(random_model(make_config(model_type)), tmp_path)
    model = saved_model(tmp_path, torch.bfloat16)
    sequences = random_sequences(VOCAB_SIZE, LENGTHS)
    ours = engine_logits(load(source, dtype=torch.bfloat16), sequences)
    assert_as_accurate(ours, reference_logits(model, sequences), float64_logits(model, sequences))


def test_the_cache_holds_keys_and_values_of_their_own_widths() -> None:
    source = dummy_source("deepseek_v3")
    assert load(source).model.kv_widths == [4 * (24 + 16)] * 2


@pytest.mark.parametrize(
    ("model_type", "share"),
    [("olmo2", 1.0), ("phi3", 0.5), ("phi3", 1.0)],
    ids=["transformers' own code", "half a head rotated", "whole heads rotated"],
)
def test_longrope_does_not_change_with_the_longest_sequence_of_the_batch(
    model_type: str, share: float, tmp_path: Path
) -> None:
    rope = {**LONGROPE, "partial_rotary_factor": share}
    for name in ("short_factor", "long_factor"):
        rope[name] = LONGROPE[name][: int(8 * share)]
    model = random_model(make_config(model_type, rope_parameters=rope))
    source = save(model, tmp_path)
    short = random_sequences(VOCAB_SIZE, ((5, 5), (20, 4), (17, 4)))
    pinned_short = engine_logits(load(source, max_model_len=32), short)
    assert_as_accurate(pinned_short, reference_logits(model, short), float64_logits(model, short))
    mixed = random_sequences(VOCAB_SIZE, LENGTHS)
    assert_as_accurate(engine_logits(load(source), mixed), *long_context_logits(model, mixed))


@pytest.mark.parametrize("model_type", ["granite", "olmo3"])
def test_dynamic_rope_is_plain_up_to_the_length_that_a_config_states(model_type: str, tmp_path: Path) -> None:
    """Longer texts change it in transformers, for all that are computed beside them; here there are none."""
    rope: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    if model_type != "granite":
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    model = random_model(make_config(model_type, rope_parameters=rope))
    loaded = load(save(model, tmp_path))
    assert isinstance(loaded.model, TransformersModel) and loaded.max_model_len == SHAPE["max_position_embeddings"]
    sequences = random_sequences(VOCAB_SIZE, LENGTHS)
    ours = engine_logits(loaded, sequences)
    assert_as_accurate(ours, reference_logits(model, sequences), float64_logits(model, sequences))


@pytest.mark.parametrize("model_type", ["vaultgemma", "olmo2", "gpt2"])
def test_taps_are_the_hidden_states_of_transformers(model_type: str, tmp_path: Path) -> None:
    model = random_model(make_config(model_type))
    assert_taps_are_hidden_states(load(save(model, tmp_path)), model, ANY_SHAPE_TILES["prefill"])


@pytest.mark.parametrize("model_type", ["olmoe", "vaultgemma"])
def test_greedy_text_from_a_checkpoint_directory_is_that_of_transformers_with_and_without_speculation(
    model_type: str, tmp_path: Path
) -> None:
    model = random_model(make_config(model_type, bos_token_id=None, eos_token_id=None))
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, VOCAB_SIZE)
    pattern = [7, 8, 9, 10] * 5
    prompts = [{"prompt_token_ids": ids} for ids in (pattern, [3, 1, 4, 1, 5], list(range(1, 50)))]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    options = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 32}
    plain = LLM(str(tmp_path), **options).generate(prompts, params)
    ngram_config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    drafted = LLM(str(tmp_path), speculative_config=ngram_config, **options)
    for prompt, output, speculative in zip(prompts, plain, drafted.generate(prompts, params), strict=True):
        ids = torch.tensor([prompt["prompt_token_ids"]])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        assert list(output.outputs[0].token_ids) == expected[0, ids.shape[1] :].tolist()
        assert speculative.outputs[0].token_ids == output.outputs[0].token_ids
    again = drafted.generate(prompts, params)
    assert [output.num_cached_tokens for output in again] == [16, 0, 48], "behind what was found in the cache"
    assert [output.outputs[0].token_ids for output in again] == [output.outputs[0].token_ids for output in plain]
    assert {counter.name: counter for counter in drafted.get_metrics()}[
        "vllm:spec_decode_num_draft_tokens"
    ].value > 0, "nothing was drafted, so nothing was tested"


def test_mxfp4_experts_are_expanded_on_loading(tmp_path: Path) -> None:
    source = save(random_model(make_config("gpt_oss", intermediate_size=64)), tmp_path)
    stacks = pack_experts(tmp_path)
    expanded = dict(load(source).model.decoder.named_parameters())
    assert all(torch.equal(expanded[name.removeprefix("model.")], stack) for name, stack in stacks.items())


def test_code_of_a_checkpoint_runs_when_it_is_trusted_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    directory = tmp_path / "checkpoint"
    model = random_model(make_config("olmo2"))
    model.save_pretrained(directory)
    (directory / "modeling_own.py").write_text(
        "from transformers import Olmo2Config, Olmo2ForCausalLM\n"
        "class OwnConfig(Olmo2Config):\n    model_type = 'own'\n"
        "class OwnForCausalLM(Olmo2ForCausalLM):\n    config_class = OwnConfig\n"
    )
    file = directory / "config.json"
    auto_map = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "own", "auto_map": auto_map}))
    sequences = random_sequences(VOCAB_SIZE, LENGTHS)
    ours = engine_logits(load(ModelSource(model=str(directory), trust_remote_code=True)), sequences)
    assert_as_accurate(ours, reference_logits(model, sequences), float64_logits(model, sequences))
    with pytest.raises(UserError, match="trust_remote_code"):
        load(ModelSource(model=str(directory)))


def dummy_source(model_type: str, **options: Any) -> ModelSource:
    config = {"model_type": model_type, **SHAPE, **MODELS.get(model_type, {}), **options}
    return ModelSource(model=f"a-{model_type}", load_format="dummy", hf_config=config)


# What is refused -> (source, words of the reason and the remedy)
REFUSALS: dict[str, tuple[ModelSource, str]] = {
    "linear attention": (
        dummy_source("minimax", layer_types=["linear_attention", "full_attention"]),
        r"model\.model=a-minimax: model_type 'minimax' has layers of type linear_attention, whose state is no "
        r"key-value cache and cannot roll back yet what rejected drafts, MTP's or any other's, left in it; "
        r"choose a model of attention layers only",
    ),
    "short convolutions": (
        dummy_source("lfm2_moe", use_expert_bias=False, layer_types=["conv", "full_attention"], num_dense_layers=1),
        r"'lfm2_moe' has layers of type conv, .* cannot roll back yet .*; our own decoder runs this family as it is",
    ),
    "a recurrent model": (
        ModelSource(model="a-mamba", load_format="dummy", hf_config={"model_type": "mamba", "num_hidden_layers": 2}),
        r"'mamba' has layers of type linear_attention, whose state is no key-value cache",
    ),
    "an encoder-decoder": (
        ModelSource(model="a-t5", load_format="dummy", hf_config={"model_type": "t5"}),
        r"model_type 't5' is an encoder-decoder; choose a decoder-only model",
    ),
    "an encoder": (
        ModelSource(model="a-vit", load_format="dummy", hf_config={"model_type": "vit"}),
        r"model_type 'vit' is no causal language model of transformers; choose a decoder-only model",
    ),
    "more than text": (
        ModelSource(model="a-paligemma", load_format="dummy", hf_config={"model_type": "paligemma"}),
        r"model_type 'paligemma' takes more than text, .* of .*gemma3, .*; its is 'gemma'; choose another checkpoint",
    ),
    "more than text around a language model that is not ours": (
        ModelSource(
            model="a-mistral3",
            load_format="dummy",
            hf_config={"model_type": "mistral3", "text_config": {"model_type": "cohere"}},
        ),
        r"model_type 'mistral3' takes more than text, .*; its is 'cohere'; choose",
    ),
    "attention with biases by distance": (
        ModelSource(model="a-bloom", load_format="dummy", hf_config={"model_type": "bloom", "n_layer": 2}),
        r"does not let its attention be replaced \(BloomForCausalLM\._supports_attention_backend is false\)",
    ),
    "sparse attention": (
        dummy_source("deepseek_v32"),
        r"has layers of type (indexed|deepseek_sparse)_attention, whose state is no key-value cache",
    ),
    "chunked attention": (dummy_source("llama4_text", **OTHER_ACT), r"has layers of type chunked_attention"),
    "a rope that is not known": (
        dummy_source("llama", rope_parameters={"rope_type": "spiral", "rope_theta": 1e4, "factor": 2.0}),
        r"rope type must be one of default, .*, got 'spiral': its frequencies are not known here; use a checkpoint",
    ),
    "longrope in one layer type": (
        dummy_source(
            "gemma3_text",
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": LONGROPE,
            },
        ),
        r"rope type of a gemma3_text model must not be 'longrope' for one type of its layers: its frequencies depend "
        r"on the longest sequence in the batch, .* use a checkpoint with static rope",
    ),
    "no layers": (dummy_source("olmo2", num_hidden_layers=0), r"has 0 layers; mend num_hidden_layers in its config"),
    "a config without what the model is built from": (
        dummy_source("dbrx"),
        r"transformers cannot build a 'dbrx' model by its config\.json \(AttributeError: .*\); mend",
    ),
    "an activation that there is not": (
        dummy_source("olmoe", hidden_act="swoosh"),
        r"cannot build a 'olmoe' model by its config\.json \(KeyError: 'swoosh'\); mend it",
    ),
    "numbers that do not go together": (
        dummy_source("gpt_oss", num_experts_per_tok=9),
        r"GptOssForCausalLM does not run with what its config\.json says \(RuntimeError: .*\); mend it",
    ),
    "quantized weights": (
        dummy_source("olmoe", quantization_config={"quant_method": "fp8"}),
        r"is quantized \(fp8\), and only mxfp4 is expanded on loading; choose an unquantized checkpoint",
    ),
    # What the config does not tell and the probing pass finds out.
    "a mask of its own": (
        dummy_source("doge", sliding_window=None),
        r"DogeForCausalLM cannot run over a paged KV cache: DogeAttention attends by more than queries, keys and "
        r"values: \['attention_mask'\]; choose another model",
    ),
    "keyword arguments dropped on the way": (
        dummy_source("nemotron"),
        r"NemotronAttention does not get the keyword arguments of its model; choose another model",
    ),
    "a sliding window known to the mask only": (
        dummy_source("phimoe", **EXPERTS, sliding_window=8),
        r"PhimoeAttention has a sliding window and does not hand it over; choose another model",
    ),
    "bidirectional attention": (
        ModelSource(
            model="a-bert", load_format="dummy", hf_config={"model_type": "bert", **SHAPE, "num_hidden_layers": 1}
        ),
        r"BertSelfAttention looks ahead: its attention is not causal; choose another model",
    ),
    "two attentions a layer": (
        dummy_source("diffllama"),
        r"DiffLlamaAttention attends more than once a layer or does not know its layer; choose another model",
    ),
    "rotation that switches with the longest sequence": (
        dummy_source("phimoe", **EXPERTS, rope_parameters={**LONGROPE, "short_mscale": 1.0, "long_mscale": 1.2}),
        r"rope type of a phimoe model must not be 'longrope': its own code changes the rotation of every sequence",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_run_is_refused_with_the_reason(what: str) -> None:
    source, message = REFUSALS[what]
    with pytest.raises(UserError, match=message):
        load(source)
