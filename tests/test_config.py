"""The schema: what it accepts, how it reads a mapping, and what it says about one that is wrong."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from pydantic import BaseModel

from proposers.heads.dflash import DFlashHead
from proposers.heads.dflash_config import DFlashConfig, read_dflash_config
from proposers.heads.dspark import DSparkHead
from proposers.heads.dspark_config import read_dspark_config
from proposers.heads.laguna_dflash import LagunaDFlashHead
from proposers.heads.laguna_dflash_config import read_laguna_layers
from proposers.heads.mtp_assistant_config import read_assistant_config
from runner.cli.compose import Composer
from runner.cli.usage import _yaml
from runner.config import (
    ConfigError,
    DrafterMethod,
    HardwareConfig,
    MethodConfig,
    ModelConfig,
    NgramMethod,
    NoneMethod,
    SamplerConfig,
    SpeculativeConfig,
)
from runner.config.method_union import METHODS, AnyMethod
from runner.config.problem import node_classes, union_tag
from runner.engine.architecture import read_architecture
from runner.engine.checkpoint import ModelSource
from runner.engine.decoder import Decoder
from runner.engine.loader import LoadedModel
from runner.engine.sampling_params import SamplingParams
from runner.tiny import DRAFTER_KEYS

CONF = Path(__file__).parent.parent / "conf"
OPTIONS = sorted(path.relative_to(CONF).with_suffix("").as_posix() for path in CONF.glob("*/*.yaml"))
MANDATORY = {"model/hf": ["model.model=x", "method=ngram"], "method/custom_class": ["method.model=a.B"]}
MANDATORY["model/qwen3_0_6b"] = ["method=ngram"]  # no draft is smaller
MANDATORY["model/gpt_oss_20b"] = ["method=eagle3"]  # nor of this vocabulary
# Billions of weights.
WITH_MTP = {"glm4_5_air": 106, "glm4_7_flash": 29, "ernie4_5_21b_a3b": 21, "qwen3_5_27b": 26, "qwen3_5_35b_a3b": 34}
WITH_MTP |= {"ling3_flash": 124, "nemotron3_5_lightning": 31, "nemotron3_super": 120}
MANDATORY |= {f"model/{preset}": ["method=mtp"] for preset in WITH_MTP}
# Of language models alone, in billions; their drafters are checkpoints of their own.
WITH_ASSISTANT = {"gemma4_e2b": 4, "gemma4_26b_a4b": 25}
MANDATORY |= {f"model/{preset}": ["method=mtp"] for preset in WITH_ASSISTANT}
WITH_BLOCKS = {"laguna_xs": (33, "dflash"), "muse_glimmer_30b": (27, "dflash"), "lfm2_5_1_2b": (1, "dspark")}
MANDATORY |= {f"model/{preset}": [f"method={method}"] for preset, (_, method) in WITH_BLOCKS.items()}
WITHOUT_DRAFTER = {"kimi_linear_48b": 49, "nemotron3_nano": 31}
ALONE = (
    WITH_MTP | WITH_ASSISTANT | WITHOUT_DRAFTER | {preset: billions for preset, (billions, _) in WITH_BLOCKS.items()}
)
MANDATORY |= {f"model/{preset}": ["method=suffix"] for preset in WITHOUT_DRAFTER}
MANDATORY["workload/jsonl"] = ["workload.path=prompts.jsonl"]
EXPERIMENT_POINTS = {"experiment/synthetic_acceptance": ["method.synthetic_acceptance_rate=0.5"]}
TINY = {"model": "tiny", "draft": {"model": "tiny-draft"}}
DRAFTERS = [union_tag(node) for node in node_classes(AnyMethod) if issubclass(node, DrafterMethod)]


def nodes_of(group: str) -> dict[str, type[BaseModel]]:
    """The schema of each option of a group: one class for all, or the member of the union with the option's name."""
    classes = node_classes(SpeculativeConfig.model_fields[group].annotation)
    options = [option.split("/")[1] for option in OPTIONS if option.startswith(f"{group}/")]
    if len(classes) == 1:
        return dict.fromkeys(options, classes[0])
    return {union_tag(node): node for node in classes}


def problems(**values: Any) -> str:
    """The screen's text for a configuration that must be refused."""
    with pytest.raises(ConfigError) as raised:
        SpeculativeConfig.parse({"model": TINY} | values)
    return str(raised.value)


# --- the YAML files and the schema say the same -------------------------------------------------------------------


@pytest.mark.parametrize("option", OPTIONS)
def test_every_yaml_option_composes_and_validates(option: str) -> None:
    group, name = option.split("/")
    overrides = [f"{group}={name}", *MANDATORY.get(option, []), *EXPERIMENT_POINTS.get(option, [])]
    with Composer() as composer:
        config = composer.config(overrides)
    if group == "method":
        assert config.method.method == name
    if group == "workload":
        assert config.workload.name == name


@pytest.mark.parametrize("option", [option for option in OPTIONS if not option.startswith("experiment/")])
def test_every_yaml_lists_exactly_the_fields_of_its_schema(option: str) -> None:
    """With those of the file that it starts from."""
    group, name = option.split("/")
    assert set(_yaml(option)) - {"defaults"} == set(nodes_of(group)[name].model_fields)


def test_the_common_yaml_of_methods_lists_exactly_the_fields_of_all() -> None:
    assert set(_yaml("common_method_keys")) == set(MethodConfig.model_fields)


def test_config_yaml_lists_exactly_the_scalars_of_the_root() -> None:
    listed = set(OmegaConf.load(CONF / "config.yaml")) - {"defaults", "hydra"}
    fields = SpeculativeConfig.model_fields
    assert listed == {name for name in fields if not node_classes(fields[name].annotation)}


@pytest.mark.parametrize("group", ["method", "workload"])
def test_every_member_of_a_union_has_a_yaml_and_every_yaml_a_member(group: str) -> None:
    options = {option.split("/")[1] for option in OPTIONS if option.startswith(f"{group}/")}
    assert set(nodes_of(group)) == options


def test_common_keys_exist_on_every_method() -> None:
    common = set(MethodConfig.model_fields)
    assert all(common <= set(node.model_fields) for node in nodes_of("method").values())


def test_every_field_says_what_it_means_and_every_number_its_range() -> None:
    pending: list[type[BaseModel]] = [SpeculativeConfig]
    while pending:
        node = pending.pop()
        for name, field in node.model_fields.items():
            pending += node_classes(field.annotation)
            assert field.description, f"{node.__name__}.{name}"
            if re.search(r"\b(int|float)\b", str(field.annotation)):
                assert re.search(r"in \[|in \(|>=|<=", field.description), f"{node.__name__}.{name}"


def test_sampler_keys_are_those_of_sampling_params() -> None:
    """But for those by which one request differs from the others: for a run, `method` has their place."""
    of_one_request = ["speculative_sampling", "speculative_model", "speculative_ratio"]
    assert list(SamplerConfig.model_fields) + of_one_request == list(SamplingParams.__dataclass_fields__)


def test_defaults_are_the_trained_pair_with_four_draft_tokens_greedy() -> None:
    with Composer() as composer:
        config = composer.config([])
    assert (config.model.model, config.method.method, config.method.num_speculative_tokens) == (
        "tiny",
        "draft_model",
        4,
    )
    assert config.sampler.to_sampling_params().is_greedy
    assert config.baseline
    draft = config.draft_model_config()
    assert draft is not None
    assert draft.model == "tiny-draft"


# --- presets ------------------------------------------------------------------------------------------------------


def num_parameters(config: dict[str, Any]) -> int:
    """Weights of a Llama, Qwen3, Qwen3-MoE, Gemma 3 or gpt-oss decoder, from its config.json."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    has_head_norms, is_gemma = config["model_type"] not in ("llama", "gpt_oss"), config["model_type"] == "gemma3_text"
    norms = (4 if is_gemma else 2) * hidden + (2 * head_dim if has_head_norms else 0)
    layer = 2 * hidden * queries + 2 * hidden * keys + norms
    if "num_experts" in config:
        layer += config["num_experts"] * (3 * hidden * config["moe_intermediate_size"] + hidden)
    elif "num_local_experts" in config:  # biases everywhere, and a sink for every head
        layer += queries + 2 * keys + hidden + config["num_attention_heads"]
        layer += config["num_local_experts"] * (3 * hidden * inner + 2 * inner + 2 * hidden + 1)
    else:
        layer += 3 * hidden * inner
    embeddings = config["vocab_size"] * hidden * (1 if config["tie_word_embeddings"] else 2)
    return int(config["num_hidden_layers"] * layer + embeddings + hidden)


@pytest.mark.parametrize(
    ("preset", "target", "draft"),
    [
        ("llama8b", 8_030_261_248, 1_235_814_400),
        ("llama70b", 70_553_706_496, 1_235_814_400),
        ("qwen3_8b", 8_190_735_360, 596_049_920),
        ("qwen3_30b_a3b", 30_532_122_624, 596_049_920),
        ("gemma3_1b", 999_885_952, 268_098_176),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset: str, target: int, draft: int) -> None:
    with Composer() as composer:
        config = composer.config([f"model={preset}", "model.load_format=dummy"])
    draft_model = config.draft_model_config()
    assert config.model.hf_config is not None
    assert draft_model is not None
    assert draft_model.hf_config is not None
    assert num_parameters(config.model.hf_config) == target
    assert num_parameters(draft_model.hf_config) == draft
    assert config.model.hf_config["vocab_size"] == draft_model.hf_config["vocab_size"]
    assert draft_model.load_format == "dummy"


def test_a_preset_without_a_draft_has_the_published_number_of_parameters() -> None:
    """20.91 B by its makers' model card."""
    with Composer() as composer:
        config = composer.config(["model=gpt_oss_20b", "model.load_format=dummy", "method=ngram"])
    assert config.model.hf_config is not None
    assert num_parameters(config.model.hf_config) == 20_914_757_184


@pytest.mark.parametrize(("preset", "billions"), ALONE.items())
def test_other_presets_have_as_many_parameters_as_the_language_models_they_name(preset: str, billions: int) -> None:
    from transformers import AutoConfig

    with Composer() as composer:
        values = composer.config([f"model={preset}", "method=ngram"]).model.hf_config
    assert values is not None
    config = AutoConfig.for_model(**values)
    arch = read_architecture(config)
    assert arch is not None
    with torch.device("meta"):
        decoder = Decoder(arch, config, max_model_len=64, dtype=torch.bfloat16)
    assert sum(weights.numel() for weights in decoder.parameters()) // 10**9 == billions


@pytest.mark.parametrize("preset", ["qwen3_8b", "qwen3_30b_a3b"])
def test_the_small_preset_is_the_draft_of_a_large_one(preset: str) -> None:
    with Composer() as composer:
        small, large = (composer.config([f"model={name}", "method=ngram"]).model for name in ("qwen3_0_6b", preset))
    assert large.draft is not None
    assert (large.draft.model, large.draft.hf_config) == (small.model, small.hf_config)


@pytest.mark.parametrize(
    ("preset", "method"), [("llama8b", "eagle"), ("llama8b", "eagle3"), ("qwen3_8b", "dflash"), ("qwen3_8b", "dspark")]
)
def test_presets_say_the_shape_of_published_heads_so_that_dummy_weights_need_no_hub(preset: str, method: str) -> None:
    with Composer() as composer:
        config = composer.config([f"model={preset}", f"method={method}", "model.load_format=dummy"])
    head = config.draft_model_config()
    assert head is not None
    assert head.hf_config is not None
    assert config.model.hf_config is not None
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        assert head.hf_config[key] == config.model.hf_config[key], key


@pytest.mark.parametrize("preset", WITH_ASSISTANT)
def test_the_drafter_of_a_preset_sees_keys_and_values_as_its_target_has_them(preset: str) -> None:
    from transformers import AutoConfig

    with Composer() as composer:
        config = composer.config([f"model={preset}", "method=mtp", "model.load_format=dummy"])
    head, values = config.draft_model_config(), config.model.hf_config
    assert head is not None and head.hf_config is not None and values is not None
    hf_config = AutoConfig.for_model(**values)
    arch = read_architecture(hf_config)
    assert arch is not None
    with torch.device("meta"):
        model = Decoder(arch, hf_config, max_model_len=64, dtype=torch.bfloat16)
    source = ModelSource(model=preset)
    target = LoadedModel(source=source, model=model, hf_config=hf_config, max_model_len=64, num_weight_bytes=0)
    read = read_assistant_config(source, head.hf_config, target)
    kinds = hf_config.layer_types
    last = {kinds[layer]: layer for layer, own in enumerate(arch.heads) if own.kv_layer is None}
    assert [own.kv_layer for own in read.arch.heads] == [last[kind] for kind in read.hf_config.layer_types]


def target_and_head(
    preset: str, changes: Mapping[str, Any], method: str | None = None
) -> tuple[LoadedModel, dict[str, Any]]:
    """A preset's target without memory, and what is said of its block drafter; changes: of the target's config."""
    from transformers import AutoConfig

    with Composer() as composer:
        method = method or WITH_BLOCKS[preset][1]
        config = composer.config([f"model={preset}", f"method={method}", "model.load_format=dummy"])
    head, values = config.draft_model_config(), config.model.hf_config
    assert head is not None and head.hf_config is not None and values is not None
    hf_config = AutoConfig.for_model(**{**values, **changes})
    source = ModelSource(model="a-head", load_format="dummy", hf_config=head.hf_config)
    arch = read_architecture(hf_config)
    assert arch is not None
    with torch.device("meta"):
        model = Decoder(arch, hf_config, max_model_len=64, dtype=torch.bfloat16)
    target = LoadedModel(source=source, model=model, hf_config=hf_config, max_model_len=64, num_weight_bytes=0)
    return target, dict(head.hf_config)


def num_head_weights(head_class: Callable[..., DFlashHead], config: DFlashConfig, target: LoadedModel) -> int:
    """Without embeddings and projection, which are the target's."""
    with torch.device("meta"):
        head = head_class(config, target, max_model_len=64, dtype=torch.bfloat16, own=(), quantization={})
    return sum(target.view.numel() for target in head.weight_targets().values())


def test_muse_glimmers_drafter_has_as_many_parameters_as_the_published_one() -> None:
    """5.11 GB in bfloat16."""
    target, values = target_and_head("muse_glimmer_30b", {})
    read = read_dflash_config(target.source, values, target, None)
    assert num_head_weights(DFlashHead, read, target) == 2_555_985_152
    assert read.tap_layers == (2, 14, 26, 38, 50) and read.max_draft_tokens == 15
    assert not any(read.causal_layers) and not (read.brings_embedding or read.brings_projection)


def test_lfm2_5s_drafter_has_as_many_parameters_as_the_published_one() -> None:
    """591 MB in bfloat16."""
    target, _ = target_and_head("lfm2_5_1_2b", {})
    read = read_dspark_config(target.source, target, None)
    assert num_head_weights(DSparkHead, read, target) == 295_725_953
    assert read.tap_layers == (3, 6, 9, 12, 15) and read.max_draft_tokens == 9
    assert not any(read.causal_layers) and not (read.brings_embedding or read.brings_projection)


def test_lagunas_drafter_has_the_tensors_of_the_published_ones() -> None:
    """Of that for XS by its config; that for S has 1,114,977,792 weights, 2.23 GB in bfloat16."""
    target, values = target_and_head("laguna_xs", {})
    read = read_dflash_config(target.source, values, target, None, read_layers=read_laguna_layers)
    assert read.tap_layers == (2, 14, 26, 34, 40) and read.max_draft_tokens == 15 and all(read.causal_layers)
    of_s: dict[str, Any] = {"hidden_size": 3072, "num_hidden_layers": 48, "num_attention_heads_per_layer": [48] * 48}
    of_s |= {"layer_types": ["full_attention"] * 48, "mlp_layer_types": ["dense"] * 48}
    target, _ = target_and_head("laguna_xs", of_s)
    values |= {"hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 6, "num_attention_heads": 72}
    values |= {"layer_types": ["sliding_attention"] * 6}
    values["dflash_config"] |= {"num_target_layers": 48, "target_layer_ids": [1, 10, 19, 29, 38, 47]}
    read = read_dflash_config(target.source, values, target, None, read_layers=read_laguna_layers)
    assert num_head_weights(LagunaDFlashHead, read, target) == 1_114_977_792


def test_nemotrons_drafters_have_the_tensors_of_the_published_ones() -> None:
    """NVIDIA's DSpark head has 118, twenty of them in NVFP4 with two scales each, and takes 1.35 GB."""
    target, _ = target_and_head("nemotron3_5_lightning", {}, "dspark")
    read = read_dspark_config(target.source, target, None)
    with torch.device("meta"):
        own = DSparkHead(
            read, target, max_model_len=64, dtype=torch.bfloat16, own=("embed_tokens.weight",), quantization={}
        )
    sizes = {name: target.view.numel() for name, target in own.weight_targets().items()}
    packed = [name for name in sizes if name.startswith("fc.") or ".mlp." in name or ".markov_w2." in name]
    num_bytes = sum(size / 2 + size / 16 if name in packed else 2 * size for name, size in sizes.items())
    assert len(sizes) + 2 * len(packed) == 118 and round(num_bytes / 1e9, 2) == 1.35
    assert read.tap_layers == (2, 6, 20, 30, 42, 52) and read.max_draft_tokens == 7 and all(read.causal_layers)
    assert set(read.arch.sliding_windows) == {1024} and read.arch.has_sinks
    assert read.brings_embedding and not read.brings_projection
    target, values = target_and_head("nemotron3_5_lightning", {}, "dflash")
    block = read_dflash_config(target.source, values, target, None)
    assert block.tap_layers == read.tap_layers and not any(block.causal_layers) and not block.arch.has_sinks
    assert set(block.arch.sliding_windows) == {None} and block.hf_config.rope_parameters["rope_type"] == "yarn"


def test_the_tiny_preset_and_the_python_api_name_the_same_drafters() -> None:
    with Composer() as composer:
        model = composer.config([]).model
    assert ModelConfig.model_validate({"model": "tiny", **DRAFTER_KEYS}) == model
    assert {*(model.heads or {}), "draft_model", "hybrid"} == set(DRAFTERS)  # whose drafter is one of the others


@pytest.mark.parametrize(
    ("preset", "rope_type"),
    [
        ("llama8b", "llama3"),
        ("llama70b", "llama3"),
        ("qwen3_8b", "default"),
        ("qwen3_0_6b", "default"),
        ("qwen3_30b_a3b", "default"),
        ("gemma3_1b", "default"),
        ("gemma4_e2b", "proportional"),
        ("gemma4_26b_a4b", "proportional"),
        ("gpt_oss_20b", "yarn"),
        ("glm4_5_air", "default"),
        ("glm4_7_flash", "default"),
        ("ernie4_5_21b_a3b", "default"),
        ("qwen3_5_27b", "default"),
        ("qwen3_5_35b_a3b", "default"),
        ("muse_glimmer_30b", "default"),
        ("lfm2_5_1_2b", "default"),
        ("laguna_xs", "yarn"),
    ],
)
def test_transformers_reads_the_rope_of_a_preset(preset: str, rope_type: str) -> None:
    from transformers import AutoConfig

    with Composer() as composer:
        values = dict(composer.config([f"model={preset}", "method=ngram"]).model.hf_config or {})
    config = AutoConfig.for_model(**values)
    parameters = config.rope_parameters
    if preset == "gemma3_1b":
        assert parameters["sliding_attention"]["rope_theta"] == values["rope_local_base_freq"]
    parameters = parameters.get("full_attention", parameters)
    assert parameters["rope_type"] == rope_type
    stated = values.get("rope_parameters", values)
    assert parameters["rope_theta"] == stated.get("full_attention", stated)["rope_theta"]


# --- types and ranges ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [True, "4", 4.0, 4.5, None, [4]])
def test_only_an_integer_is_an_integer(value: object) -> None:
    text = problems(method={"method": "ngram", "num_speculative_tokens": value})
    assert text == f"method.num_speculative_tokens must be an integer, got {value!r}"


def test_an_integer_is_taken_for_a_float_but_a_bool_is_not() -> None:
    config = SpeculativeConfig.parse(
        {"model": TINY, "sampler": {"temperature": 1}, "hardware": {"gpu_memory_utilization": 1}}
    )
    assert config.sampler.temperature == 1.0
    assert "sampler.temperature must be a number, got True" in problems(sampler={"temperature": True})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_are_finite(value: float) -> None:
    assert "sampler.temperature must be finite" in problems(sampler={"temperature": value})


def test_a_number_is_not_taken_for_a_string_because_it_may_have_lost_its_spelling() -> None:
    """`model.revision=1e5` reaches us as the float 100000.0: the commit that was meant is gone."""
    text = problems(model={"model": "x", "revision": 100000.0})
    remedy = """quote it twice on the command line: model.revision='"..."'"""
    assert text == f"model.revision must be a string, got 100000.0; {remedy}"


@pytest.mark.parametrize("value", [-1, 129])
def test_draft_length_is_between_0_and_128(value: int) -> None:
    assert "method.num_speculative_tokens must be" in problems(
        method={"method": "ngram", "num_speculative_tokens": value}
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_p": 2}, "sampler.top_p must be in (0, 1], got 2.0"),
        ({"top_k": -2}, "sampler.top_k must be >= 1, or 0 or -1 for all tokens, got -2"),
        ({"seed": -2}, "sampler.seed must be in [0, 2**64 - 1] or null, got -2"),
        ({"min_tokens": 9, "max_tokens": 8}, "sampler.min_tokens must be in [0, max_tokens (8)], got 9"),
        ({"min_tokens": 200, "max_tokens": 300, "min_p": 2}, "sampler.min_p must be in [0, 1], got 2.0"),
        ({"max_tokens": 0, "min_tokens": 9}, "sampler.max_tokens must be >= 1, got 0"),
        ({"logit_bias": {"a": 1}}, "sampler.logit_bias has a key that must be an integer, got 'a'"),
        ({"logit_bias": {3: 200}}, "sampler.logit_bias must have values in [-100, 100], got {3: 200.0}"),
    ],
)
def test_sampler_ranges_are_those_of_sampling_params(values: dict[str, Any], message: str) -> None:
    assert problems(sampler=values) == message


def test_all_problems_of_a_configuration_are_listed_at_once() -> None:
    text = problems(
        method={"method": "ngram", "num_speculative_tokens": -1, "prompt_lookup_min": 7, "max_dept": 3, "nonsense": 1},
        sampler={"top_p": 2, "temperature": -1},
        hardware={"device": "cdua"},
        workload={"name": "jsonl"},
        sed=1,
    )
    assert text.splitlines() == [
        "method.num_speculative_tokens must be >= 0, got -1; tokens drafted per request and step at most, in [0, 128]; "
        "0: none",
        "method.max_dept is an unknown key, got 3; did you mean 'suffix_decoding_max_tree_depth' of method=suffix?",
        f"method.nonsense is an unknown key, got 1; known: {', '.join(sorted(NgramMethod.model_fields))}",
        "sampler.temperature must be 0 (greedy) or in [1e-5, 100], got -1.0",
        "sampler.top_p must be in (0, 1], got 2.0",
        "hardware.device must be one of auto, cpu, cuda, got 'cdua'; did you mean 'cuda'?",
        "workload.path is required; add workload.path=<path of a .jsonl file, one JSON object a line>",
        "sed is an unknown key, got 1; did you mean 'seed'?",
    ]


def test_an_unknown_key_does_not_hide_what_else_is_wrong_with_its_group() -> None:
    """top_p came up with the next attempt."""
    method = {"method": "ngram", "foo": 1, "prompt_lookup_min": 9, "prompt_lookup_max": 5}
    text = problems(sampler={"bad": 3, "top_p": 7}, method=method)
    assert [line.split()[0] for line in text.splitlines()] == [
        "method.foo", "sampler.bad", "method.prompt_lookup_min", "sampler.top_p",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("num_spec", "did you mean 'num_speculative_tokens' or 'num_speculative_tokens_per_batch_size'?"),
        ("rev", "did you mean 'revision' of method=draft_model?"),
        ("prompt_lookup_mx", "did you mean 'prompt_lookup_max' or 'prompt_lookup_min'?"),
        ("temperature", "it is a key of sampler: sampler.temperature"),
        ("draft_tensor_parallel_size", f"only method={' or '.join(DRAFTERS)} has it"),
        ("aux_hidden_state_layer_ids", "only method=eagle3 or dflash or dspark or hybrid has it"),
        ("tensor_parallel_size", "pass 'draft_tensor_parallel_size' instead"),
    ],
)
def test_an_unknown_key_is_told_where_it_belongs(key: str, remedy: str) -> None:
    assert problems(method={"method": "ngram", key: 1}) == f"method.{key} is an unknown key, got 1; {remedy}"


def test_a_drafter_is_not_split_and_the_error_says_where_it_runs() -> None:
    found = problems(method={"method": "draft_model", "draft_tensor_parallel_size": 2})
    assert found.startswith("method.draft_tensor_parallel_size must be 1, got 2; the drafter runs whole on each")
    assert SpeculativeConfig.parse({"model": TINY, "hardware": {"tensor_parallel_size": 2}}).notes() == []


def test_an_escape_that_no_shell_and_not_hydra_has_read_is_told_of() -> None:
    """Texts ran on over their stop string, and nobody said why."""
    for stop, is_told in (["\\n"], True), (["\n"], False), ("a\\tb", True), (["\\w"], False):
        config = SpeculativeConfig.parse({"model": TINY, "method": {"method": "ngram"}, "sampler": {"stop": stop}})
        assert [note.startswith("sampler.stop: ") for note in config.notes()] == [True] * is_told


def test_a_server_of_mlflow_without_its_scheme_is_refused_before_a_model_is_loaded() -> None:
    text = problems(tracking_uri="localhost:5000")
    assert text == "tracking_uri must begin with a scheme, got 'localhost:5000'; write http://localhost:5000"
    for uri in ("http://localhost:5000", "sqlite:///mlflow.db", "mlruns"):
        SpeculativeConfig.parse({"model": TINY, "tracking_uri": uri})


@pytest.mark.parametrize("block_size", [0, 8, 24, 272])
def test_block_size_is_a_multiple_of_16_up_to_256(block_size: int) -> None:
    assert problems(hardware={"block_size": block_size}).startswith("hardware.block_size must be")


def test_token_budget_holds_every_running_request_with_all_its_drafts() -> None:
    """A smaller budget would leave requests out of a step: a request must not wait because of its neighbours."""
    method = {"method": "ngram", "num_speculative_tokens": 63}
    SpeculativeConfig.parse({"model": TINY, "method": method})
    text = problems(method=method | {"num_speculative_tokens": 64})
    assert text.startswith(
        "hardware.max_num_batched_tokens must be >= max_num_seqs * (1 + num_speculative_tokens) (4160)"
    )
    SpeculativeConfig.parse({"model": TINY, "method": {"method": "none", "num_speculative_tokens": 128}})
    assert "hardware.max_num_batched_tokens must be >= max_num_seqs (64), got 63" in problems(
        hardware={"max_num_batched_tokens": 63}
    )


def test_a_configuration_is_frozen() -> None:
    config = SpeculativeConfig.parse({"model": TINY})
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 1  # type: ignore[misc]


def test_a_checked_configuration_reads_back_from_its_own_dump() -> None:
    with Composer() as composer:
        config = composer.config(
            ["sampler.stop=[a,b]", "sampler.logit_bias={5: 1}", "method.rejection_sample_method=standard"]
        )
    assert SpeculativeConfig.parse(config.model_dump()) == config


def test_errors_survive_the_trip_between_processes() -> None:
    with pytest.raises(ConfigError) as raised:
        SpeculativeConfig.parse({"model": 3})
    copy = pickle.loads(pickle.dumps(raised.value))
    assert str(copy) == str(raised.value) == "model must be a mapping, got 3"


# --- the Python API -----------------------------------------------------------------------------------------------


def test_engine_args_are_the_keys_of_model_and_hardware() -> None:
    config = SpeculativeConfig.from_engine_args(
        "tiny", {"model": "tiny-draft"}, dtype="float32", max_model_len=64, max_num_seqs=4, seed=7
    )
    assert config.model == ModelConfig(model="tiny", max_model_len=64)
    assert config.hardware == HardwareConfig(dtype="float32", max_num_seqs=4)
    assert (config.seed, config.method.method) == (7, "draft_model")
    assert SpeculativeConfig.from_engine_args("tiny", seed=None).seed == 0


def test_without_speculative_config_decoding_is_plain() -> None:
    assert SpeculativeConfig.from_engine_args("tiny").method == NoneMethod()


def test_engine_args_that_are_wrong_are_named_as_they_were_written() -> None:
    with pytest.raises(ConfigError) as raised:
        SpeculativeConfig.from_engine_args("tiny", {"method": "ngrm"}, dtype="f32", block_sice=16, max_model_len=1)
    with pytest.raises(ConfigError) as of_values:
        SpeculativeConfig.from_engine_args(5, tensor_parallel_size=0)  # type: ignore[arg-type]
    assert str(of_values.value).splitlines() == [
        "model must be a string, got 5",
        f"tensor_parallel_size must be >= 1, got 0; {HardwareConfig.model_fields['tensor_parallel_size'].description}",
    ]
    assert str(raised.value).splitlines() == [
        "block_sice is an unknown argument, got 16; did you mean 'block_size'?",
        f"speculative_config.method must be one of {', '.join(METHODS)}, got 'ngrm'; did you mean 'ngram'?",
        "max_model_len must be >= 2, got 1; longest prompt plus output, tokens, >= 2; null takes the model's own limit",
        "dtype must be one of auto, float32, bfloat16, float16, got 'f32'; did you mean 'float32'?",
    ]
