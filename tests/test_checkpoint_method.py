"""The method that a checkpoint is made for: every published layout is told from the others by its own files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.config import ConfigError, SpeculativeConfig, parse_method
from runner.config.checkpoint_method import misfit
from runner.tiny import HEAD_NAMES

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
DFLASH = {"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 1, "target_layer_ids": [1]}}


def checkpoint(directory: Path, config: dict[str, Any] | None, *names: str, file: str = "model.safetensors") -> str:
    """A directory with a config.json and a file that has tensors of these names, all of them empty."""
    directory.mkdir(exist_ok=True)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    header = json.dumps({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}).encode()
    (directory / file).write_bytes(struct.pack("<Q", len(header)) + header)
    return str(directory)


@pytest.mark.parametrize(
    ("config", "names", "method"),
    [
        ({"speculators_model_type": "eagle3", "draft_vocab_size": 9}, (), "eagle3"),
        ({"speculators_model_type": "peagle"}, (), "eagle3"),
        ({"speculators_model_type": "dflash"}, (), "dflash"),
        ({"speculators_model_type": "mtp"}, (), "mtp"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, (), "eagle3"),
        ({**LLAMA, "draft_vocab_size": 32000}, (), "eagle3"),
        ({**LLAMA, "eagle_config": {}}, (), "eagle3"),
        ({"architectures": ["Gemma4Eagle3Model"], "model_type": "gemma4_unified_text", "ttt_length": 7}, (), "eagle3"),
        (LLAMA, ("midlayer.hidden_norm.weight", "fc.weight"), "eagle3"),
        (LLAMA, ("layers.0.hidden_norm.weight", "fc.weight"), "eagle3"),
        (LLAMA, ("layers.0.mlp.up_proj.weight", "fc.weight"), "eagle"),
        ({**LLAMA, "num_hidden_layers": 2}, ("layers.1.mlp.up_proj.weight", "fc.weight"), "eagle"),
        ({"model_type": "eagle", "model": LLAMA}, (), "eagle"),
        (DFLASH, (), "dflash"),
        ({"dflash_config": {"mask_token_id": 1}}, (), "dflash"),
        ({**DFLASH, "architectures": ["DFlashLagunaForCausalLM"], "draft_vocab_size": 9}, (), "dflash"),
        ({**DFLASH, "projector_type": None, "markov_rank": None, "selector_rank": 0, "xpress_rank": 0}, (), "dflash"),
        ({"architectures": ["DFlash2DraftModel"], "dflash_config": {"selector_rank": 8}}, (), "dflash"),
        ({"speculators_model_type": "dflash2"}, (), "dflash"),
        ({"architectures": ["DominoDraftModel"], "dflash_config": {"projector_type": "domino"}}, (), "dflash"),
        ({"speculators_model_type": "dspark"}, (), "dspark"),
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 256}, (), "dspark"),
        ({"architectures": ["Qwen3DSparkModel"], "num_hidden_layers": 3}, (), "dspark"),
        ({"architectures": ["Gemma4DSparkModel"], "markov_rank": 0, "enable_confidence_head": False}, (), "dflash"),
        ({**DFLASH, "dflash_config": {"markov_rank": 256, "projector_type": "dspark"}}, (), "dspark"),
        ({"medusa_num_heads": 2}, (), "medusa"),
        ({"model_type": "medusa", "num_heads": 3}, (), "medusa"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel"], "n_predict": 3}, (), "mlp_speculator"),
        ({"model_type": "mlp_speculator"}, (), "mlp_speculator"),
        ({"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"], "method": "sum_lstm"}, (), "mlp_speculator"),
        ({"architectures": ["ArcticMLPSpeculatorPreTrainedModel"]}, (), "mlp_speculator"),
        ({"architectures": ["MLPVariantSpeculatorPreTrainedModel"]}, (), "mlp_speculator"),
        ({**LLAMA, "spd_type": "pard", "pard_token": 3}, (), "pard"),
        ({**LLAMA, "pard_token": 3}, (), "pard"),
        ({**LLAMA, "spd_type": "pard2", "pard2_scale": 0.02}, (), "pard"),
        ({"model_type": "deepseek_mtp"}, (), "mtp"),
        ({"model_type": "gemma4_assistant"}, (), "mtp"),
        ({"model_type": "muse_glimmer_assistant"}, (), "dflash"),
        ({"model_type": "gemma4_unified_assistant"}, (), "mtp"),
        ({"model_type": "mimo", "num_nextn_predict_layers": 1}, (), "mtp"),
        (LLAMA, ("model.layers.0.mlp.up_proj.weight",), "draft_model"),
        ({**LLAMA, "num_hidden_layers": 2, "num_nextn_predict_layers": 0}, (), "draft_model"),
    ],
)
def test_a_local_checkpoint_says_its_method(
    tmp_path: Path, config: dict[str, Any], names: tuple[str, ...], method: str
) -> None:
    model = checkpoint(tmp_path / "here", config, *names)
    assert parse_method({"model": model})[0].method == method
    assert parse_method({"model": model, "method": method})[0].method == method


def pickled(directory: Path, *names: str) -> str:
    """A directory, called by a hash as those of the hub's cache are, with a pickle of tensors of these names."""
    model = checkpoint(directory / "0f8c3a", LLAMA)
    (directory / "0f8c3a" / "model.safetensors").unlink()
    torch.save({name: torch.zeros(1) for name in names}, directory / "0f8c3a" / "pytorch_model.bin")
    return model


@pytest.mark.parametrize(
    ("names", "method"),
    [
        (("fc.weight", "layers.0.mlp.up_proj.weight"), "eagle"),
        (("fc.weight", "midlayer.hidden_norm.weight"), "eagle3"),  # without draft_vocab_size: the target's vocabulary
        (("model.layers.0.mlp.up_proj.weight",), "draft_model"),
    ],
)
def test_pickled_heads_are_known_by_the_names_of_their_tensors(
    tmp_path: Path, names: tuple[str, ...], method: str
) -> None:
    """They were known by the name of their directory, which is a hash in the hub's cache."""
    model = pickled(tmp_path, *names)
    assert parse_method({"model": model})[0].method == method
    assert parse_method({"model": model, "method": method})[0].method == method


def test_pickled_medusa_heads_are_known_by_their_file(tmp_path: Path) -> None:
    medusa = checkpoint(tmp_path / "heads", None, file="medusa_lm_head.pt")
    assert parse_method({"model": medusa})[0].method == "medusa"


@pytest.mark.parametrize("content", [b"", b"PK", b"\x80\x02}q\x00."])
def test_a_broken_pickle_says_nothing_and_is_left_to_the_loader(tmp_path: Path, content: bytes) -> None:
    model = pickled(tmp_path, "fc.weight")
    (Path(model) / "pytorch_model.bin").write_bytes(content)
    assert parse_method({"model": model})[0].method == "draft_model"


def test_the_index_of_a_split_checkpoint_is_enough(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "here", LLAMA)
    (tmp_path / "here" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": "a"}}))
    assert parse_method({"model": model})[0].method == "eagle"


def test_files_speak_louder_than_the_directorys_name(tmp_path: Path) -> None:
    assert parse_method({"model": checkpoint(tmp_path / "eagle3", DFLASH)})[0].method == "dflash"


def test_a_link_to_no_weights_says_nothing_and_is_left_to_the_loader(tmp_path: Path) -> None:
    """An interrupted download leaves such links: it was a traceback."""
    model = checkpoint(tmp_path / "here", LLAMA, "fc.weight")
    (tmp_path / "here" / "model.safetensors").unlink()
    (tmp_path / "here" / "model.safetensors").symlink_to("nowhere")
    assert parse_method({"model": model})[0].method == "draft_model"


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"speculators_model_type": "dflash3"}, "a dflash3 drafter of the speculators format"),
        ({**DFLASH, "dflash_config": {"xpress_rank": 8}}, "an XPress drafter"),
        ({**DFLASH, "projector_type": "lilicorr"}, "a DFlash drafter with projector_type=lilicorr"),
    ],
)
@pytest.mark.parametrize("named", [{}, {"method": "dflash"}])
def test_a_drafter_that_nothing_here_runs_is_called_by_its_name(
    tmp_path: Path, config: dict[str, Any], kind: str, named: dict[str, str]
) -> None:
    model = checkpoint(tmp_path / "here", config)
    with pytest.raises(ConfigError) as raised:
        parse_method({"model": model} | named)
    assert str(raised.value).startswith(f"speculative_config.model {model!r} is {kind}, which is not available; name")


def test_a_method_that_contradicts_the_checkpoint_is_one_problem(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "here", {**LLAMA, "draft_vocab_size": 5})
    expected = f"{model!r} is an EAGLE-3 head, got method=medusa; set method=eagle3, or name a set of Medusa heads"
    with pytest.raises(ConfigError) as raised:
        parse_method({"method": "medusa", "model": model})
    assert str(raised.value) == f"speculative_config.model {expected}"
    with pytest.raises(ConfigError) as raised:
        SpeculativeConfig.parse(
            {"model": {"model": "t", "heads": {"medusa": {"model": model}}}, "method": {"method": "medusa"}}
        )
    assert str(raised.value) == f"model.heads.medusa.model {expected}"
    of_a_new_method = misfit(model, "my_head")  # whose kind nothing here can name
    assert of_a_new_method == expected.replace("medusa", "my_head").replace(
        "a set of Medusa heads", "a drafter for method=my_head"
    )


def test_a_model_that_can_draft_in_one_pass_may_draft_token_by_token(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "here", {**LLAMA, "pard_token": 3})
    assert parse_method({"method": "draft_model", "model": model})[0].method == "draft_model"
    method, notes = parse_method({"model": model, "num_speculative_tokens": 3, "parallel_drafting": False})
    assert (method.method, len(notes)) == ("draft_model", 1)


@pytest.mark.parametrize(("method", "name"), HEAD_NAMES.items())
def test_names_of_the_tiny_family_say_their_method(method: str, name: str) -> None:
    assert parse_method({"model": name})[0].method == method
    with pytest.raises(ConfigError, match=f"'{name}' is .*, got method="):
        parse_method({"model": name, "method": "medusa" if method != "medusa" else "eagle"})


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff"])
def test_a_broken_config_says_nothing_and_is_left_to_the_loader(tmp_path: Path, content: bytes) -> None:
    model = checkpoint(tmp_path / "here", None)
    (tmp_path / "here" / "config.json").write_bytes(content)
    (tmp_path / "here" / "model.safetensors").write_bytes(content)
    assert parse_method({"model": model})[0].method == "draft_model"
