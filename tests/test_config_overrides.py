"""model.hf_overrides: values in place of those of a checkpoint's config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.engine.checkpoint import ModelSource, load_config
from runner.engine.config_overrides import overridden
from runner.engine.errors import UserError
from runner.llm import LLM, SamplingParams
from runner.tiny import TARGET_DIR
from tests.edit_json import edit_json
from tests.family_options import LENGTHS, VOCAB_SIZE, YARN
from tests.model_families import make_config
from tests.transformers_reference import engine_logits, load, random_model, random_sequences, save

YARN_ALONE = {key: value for key, value in YARN.items() if key != "rope_theta"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("qwen3")
    save(random_model(make_config("qwen3")), found)
    return found


def config_of(directory: Path, **overrides: Any) -> Any:
    return load_config(ModelSource(model=str(directory), hf_overrides=overrides))


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_another_scaling_of_rotations_is_what_a_config_json_with_it_is(
    key: str, directory: Path, tmp_path: Path
) -> None:
    """In every bit; its base stays, and as many tokens are allowed as it is made for."""
    written = Path(shutil.copytree(directory, tmp_path / "written"))
    base = json.loads((written / "config.json").read_text())["rope_parameters"]["rope_theta"]
    edit_json(written / "config.json", rope_parameters={**YARN_ALONE, "rope_theta": base})
    asked = ModelSource(model=str(directory), hf_overrides={key: YARN_ALONE})
    expected, found = load(ModelSource(model=str(written))), load(asked)
    assert found.max_model_len == expected.max_model_len == 4 * YARN["original_max_position_embeddings"]
    sequences = random_sequences(VOCAB_SIZE, LENGTHS)
    logits = engine_logits(found, sequences)
    assert torch.equal(logits, engine_logits(expected, sequences))
    assert not torch.equal(logits, engine_logits(load(ModelSource(model=str(directory))), sequences))


@pytest.mark.parametrize(
    "scaling", [{"rope_scaling": None, "rope_theta": 1e6}, {"rope_parameters": {"rope_theta": 1e6}}]
)
def test_the_base_of_rotations_is_changed_wherever_a_config_json_has_it(
    scaling: Any, directory: Path, tmp_path: Path
) -> None:
    older = Path(shutil.copytree(directory, tmp_path / "older"))
    values = json.loads((older / "config.json").read_text())
    del values["rope_parameters"]
    (older / "config.json").write_text(json.dumps(values | scaling))
    for path in (directory, older):
        assert config_of(path, rope_theta=5e5).rope_parameters["rope_theta"] == 5e5
    assert config_of(older, rope_scaling=YARN_ALONE).rope_parameters["rope_theta"] == 1e6
    assert config_of(older, rope_scaling=YARN).rope_parameters["rope_theta"] == YARN["rope_theta"]


@pytest.mark.parametrize("family", ["gemma3_text, linear rope", "laguna"])
def test_rotations_by_kinds_of_layers_are_changed_by_kind(family: str, tmp_path: Path) -> None:
    """A flat scaling reached no layer of theirs, and raised the limit of their texts all the same."""
    save(random_model(make_config(family)), tmp_path)
    plain = config_of(tmp_path)
    kind, other = "full_attention", "sliding_attention"
    changed = config_of(tmp_path, rope_parameters={kind: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}})
    assert changed.rope_parameters[kind]["factor"] == 8.0
    assert changed.rope_parameters[other] == plain.rope_parameters[other]
    for flat in ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, {"rope_theta": 1e6}):
        with pytest.raises(UserError, match=r"must have rotations by kinds of layers .*; write rope_parameters=\{"):
            config_of(tmp_path, **flat)


def test_a_text_models_keys_are_found_where_they_are(tmp_path: Path) -> None:
    text = {**make_config("llama").to_dict(), "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": text, "vision_config": {}}))
    with pytest.raises(UserError, match=r"'intermediate_size'; it is one of text_config: \{intermediate_size: "):
        config_of(tmp_path, intermediate_size=9)


def test_a_mapping_within_a_config_is_changed_too(tmp_path: Path) -> None:
    save(random_model(make_config("kimi_linear")), tmp_path)
    assert config_of(tmp_path, linear_attn_config={"short_conv_kernel_size": 3}).linear_conv_kernel_dim == 3


def test_other_values_are_changed_one_by_one_and_no_given_mapping_is() -> None:
    values = {"text_config": {"eos_token_id": 3, "vocab_size": 9}, "hidden_size": 4}
    changed = overridden(values, values, {"text_config": {"eos_token_id": 5}, "hidden_size": 8})
    assert changed == {"text_config": {"eos_token_id": 5, "vocab_size": 9}, "hidden_size": 8}
    assert values == {"text_config": {"eos_token_id": 3, "vocab_size": 9}, "hidden_size": 4}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rope_tetha": 1e6}, r"model\.hf_overrides must have keys .*config.json, got 'rope_tetha'; did you mean"),
        ({"model_type": "llama"}, r"must not have model_type; choose a checkpoint of another family"),
        ({"max_position_embeddings": 1}, r"max_position_embeddings of model\.model=.* must be >= 2, .*, got 1"),
        ({"to_dict": 3}, r"must have keys of the checkpoint's config.json, got 'to_dict'"),
        ({"quantization_config": None}, r"must not have quantization_config; use model\.quantization"),
        ({"rope_scaling": "yarn"}, r"hf_overrides must have values that transformers reads: .*; mend them"),
        ({"hidden_size": "wide"}, r"hf_overrides must have values that transformers reads: .*; mend them"),
    ],
)  # fmt: skip
def test_what_means_nothing_to_a_config_is_refused(overrides: dict[str, Any], message: str, directory: Path) -> None:
    with pytest.raises(UserError, match=message):
        load(ModelSource(model=str(directory), hf_overrides=overrides))


def test_a_dummys_config_is_overridden_too() -> None:
    shape = {**make_config("llama").to_dict(), "model_type": "llama"}
    source = ModelSource(model="x", load_format="dummy", hf_config=shape, hf_overrides={"num_hidden_layers": 1})
    assert load_config(source).num_hidden_layers == 1
    assert shape["num_hidden_layers"] == 2


def test_an_engine_takes_them_under_vllms_name_and_its_errors_too() -> None:
    """The tokens that end its texts among them, which generation_config.json names too."""
    asked = SamplingParams(temperature=0.0, max_tokens=24)
    options: dict[str, Any] = {"device": "cpu", "max_num_seqs": 2}
    with pytest.raises(UserError, match="hf_overrides must have keys"):
        LLM(str(TARGET_DIR), hf_overrides={"hidden": 1}, **options)
    llm = LLM(str(TARGET_DIR), hf_overrides={"max_position_embeddings": 96, "eos_token_id": 7}, **options)
    assert llm.engine.target_info.hf_config.eos_token_id == 7 and llm.engine.eos_token_ids == (7,)
    assert llm.engine.target_info.max_model_len == 96
    (out,) = llm.generate(["def f(x):\n"], asked)
    (plain,) = LLM(str(TARGET_DIR), **options).generate(["def f(x):\n"], asked)
    assert out.outputs[0].token_ids == plain.outputs[0].token_ids
