"""Targets carry MTP modules whatever the method; a module is read whole or refused in one message."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from proposers.heads import mtp_block
from proposers.heads.mtp import MtpHead
from proposers.heads.mtp_block import OwnBlock
from proposers.heads.mtp_checkpoint import describe_module
from runner.engine.architecture import read_architecture
from runner.engine.checkpoint import ModelSource
from runner.engine.decoder import Decoder
from runner.engine.errors import UserError
from runner.engine.experts import Experts
from runner.engine.memory import require_memory
from runner.engine.mlp import MLP
from runner.llm import LLM, SamplingParams
from tests.edit_json import edit_json
from tests.edit_tensors import edit_tensors
from tests.mtp_checkpoints import HIDDEN_SIZE, NUM_LAYERS, SHAPE, VOCAB_SIZE, write
from tests.transformers_reference import load

Tensors = dict[str, torch.Tensor]
LAST = f"model.layers.{NUM_LAYERS}."


def edit_config(directory: Path, **values: Any) -> None:
    edit_json(directory / "config.json", **values)


def start(model: Path | str, head: Path | None = None, **options: Any) -> LLM:
    method: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 2}
    if head is not None:
        method["model"] = str(head)
    return LLM(str(model), speculative_config=method, device="cpu", dtype="float32", max_num_seqs=2, **options)


def head_of(llm: LLM) -> MtpHead:
    head = llm.engine.proposer.head  # type: ignore[attr-defined]
    assert isinstance(head, MtpHead)
    return head


def refusal(model: Path | str, head: Path | None = None, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        start(model, head, **options)
    message = str(caught.value)
    assert "\n" not in message and ";" in message, message
    return message


@pytest.mark.parametrize(
    ("layout", "model_type"),
    [("qwen3_next", "qwen3"), ("deepseek", "deepseek_v3"), ("deepseek", "deepseek_v3, run by transformers")],
)
def test_other_methods_load_the_target_and_leave_its_module_alone(layout: str, model_type: str, tmp_path: Path) -> None:
    write(tmp_path, layout, model_type)
    llm = LLM(str(tmp_path), speculative_config={"method": "ngram"}, device="cpu", dtype="float32")
    (out,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(out.outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    ("layout", "model_type", "name"),
    [
        ("qwen3_next", "qwen3", "mtp.fusion.weight"),
        ("qwen3_next", "qwen3", "mtp.layers.0.mlp.router.weight"),
        ("qwen3_next", "qwen3", "mtp.layers.1.input_layernorm.weight"),
        ("mimo", "qwen2", "model.mtp_layers.1.input_proj.weight"),
        ("deepseek", "llama", f"model.layers.{NUM_LAYERS + 1}.eh_proj.weight"),
        ("nemotron", "nemotron_h", "mtp.layers.2.norm.weight"),
        ("deepseek", "deepseek_v3, run by transformers", f"model.layers.{NUM_LAYERS + 1}.eh_proj.weight"),
    ],
)
def test_a_target_with_tensors_that_no_module_has_is_refused(
    layout: str, model_type: str, name: str, tmp_path: Path
) -> None:
    write(tmp_path, layout, model_type)
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: torch.zeros(HIDDEN_SIZE)}))
    with pytest.raises(UserError, match=f"unexpected: {name};"):
        load(ModelSource(model=str(tmp_path)))


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3, run by transformers"])
def test_a_further_layer_is_a_module_only_where_the_config_says_so(model_type: str, tmp_path: Path) -> None:
    write(tmp_path, "deepseek", model_type, num_nextn_predict_layers=0)
    with pytest.raises(UserError, match=f"unexpected: {LAST}"):
        load(ModelSource(model=str(tmp_path)))


def test_a_module_of_layers_that_none_is_built_of_here_is_refused(tmp_path: Path) -> None:
    """Taken for Llama's its drafts would be poor, and nobody would see why."""
    write(tmp_path, "deepseek", "glm4")
    rule = "must have a layer like Llama's or Qwen3-MoE's, got model_type 'glm4'; choose another method"
    assert rule in refusal(tmp_path)


def test_a_nemotron_module_of_other_layers_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "nemotron", "nemotron_h", mtp_layers_block_type=["mamba", "moe"])
    rule = "mtp_layers_block_type must be ['full_attention', 'moe'], which a module is built of here, got"
    assert rule in refusal(tmp_path)


def test_a_target_without_a_module_is_told_what_was_looked_for(tmp_path: Path) -> None:
    write(tmp_path, "speculators", "qwen3")
    message = refusal(tmp_path)
    assert message.startswith(f"model={tmp_path}: method=mtp needs a multi-token-prediction module")
    for name in ("mtp.fc.weight", "model.mtp_layers.0.input_proj.weight", f"{LAST}eh_proj.weight"):
        assert name in message
    assert "speculative_config.model=<directory>" in message


def test_everything_wrong_with_a_module_is_one_message(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_next", "qwen3")

    def change(tensors: Tensors) -> None:
        tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"][:, :HIDDEN_SIZE].contiguous()
        del tensors["mtp.norm.weight"], tensors["mtp.layers.0.mlp.up_proj.weight"]

    edit_tensors(tmp_path, change)
    message = refusal(tmp_path)
    assert "an MTP module in Qwen3-Next's layout" in message
    assert "missing: mtp.layers.0.mlp.up_proj.weight, mtp.norm.weight;" in message
    assert f"of another shape: mtp.fc.weight {[HIDDEN_SIZE] * 2} for {[HIDDEN_SIZE, 2 * HIDDEN_SIZE]};" in message


def test_missing_experts_of_a_module_are_named(tmp_path: Path) -> None:
    write(tmp_path, "deepseek", "deepseek_v3, run by transformers")
    name = f"{LAST}mlp.experts.3.up_proj.weight"

    def change(tensors: Tensors) -> None:  # for a layer that transformers stacks the experts of, all of one kind
        for index in range(8):
            del tensors[f"{LAST}mlp.experts.{index}.up_proj.weight"]

    edit_tensors(tmp_path, change)
    assert f"missing: {name.replace('.3.', '.0.')}, " in refusal(tmp_path)


def test_a_directory_of_its_own_has_nothing_surplus(tmp_path: Path) -> None:
    head = write(tmp_path, "speculators", "qwen3").head
    assert head is not None
    edit_tensors(head, lambda tensors: tensors.update({"d2t": torch.zeros(4)}))
    assert "unexpected: d2t;" in refusal(tmp_path, head)


@pytest.mark.usefixtures("unpacked_weights")
def test_the_speculators_format_may_write_model_before_its_names(tmp_path: Path) -> None:
    head = write(tmp_path, "speculators", "qwen3").head
    assert head is not None
    expected = head_of(start(tmp_path, head)).projection.weight
    edit_tensors(head, lambda tensors: [tensors.update({f"model.{n}": tensors.pop(n)}) for n in list(tensors)])
    assert torch.equal(head_of(start(tmp_path, head)).projection.weight, expected)


def test_a_speculators_config_of_another_kind_is_refused(tmp_path: Path) -> None:
    """Where the configuration cannot look first: on the hub."""
    head = write(tmp_path, "speculators", "qwen3").head
    assert head is not None
    target, source = load(ModelSource(model=str(tmp_path))), ModelSource(model=str(head), name="method.model")
    edit_config(head, speculators_model_type="eagle3")
    with pytest.raises(UserError, match="speculators_model_type must be 'mtp' with method=mtp, got 'eagle3';"):
        describe_module(source, target)
    (head / "config.json").write_text('{"speculators_model_type": "mtp"}')
    with pytest.raises(UserError, match="must hold transformer_layer_config, a mapping, got none;"):
        describe_module(source, target)


@pytest.mark.parametrize("model_type", ["qwen3", "deepseek_v3, run by transformers"])
@pytest.mark.usefixtures("unpacked_weights")
def test_a_module_may_lie_in_another_checkpoint_of_the_same_target(model_type: str, tmp_path: Path) -> None:
    layout = "qwen3_next" if model_type == "qwen3" else "deepseek"
    (tmp_path / "both").mkdir()
    write(tmp_path / "both", layout, model_type)
    bare, module = (shutil.copytree(tmp_path / "both", tmp_path / name) for name in ("bare", "module"))
    prefix = "mtp." if model_type == "qwen3" else LAST
    edit_tensors(bare, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(prefix)])
    expected = head_of(start(tmp_path / "both")).projection.weight
    assert "method=mtp needs" in refusal(bare)
    for head in (tmp_path / "both", module):
        found = head_of(start(bare, head))
        assert torch.equal(found.projection.weight, expected)
        assert found.lm_head is None and found.embed_tokens is None, "the target's own"
        edit_tensors(
            module, lambda tensors: [tensors.pop(name) for name in list(tensors) if not name.startswith(prefix)]
        )
    edit_tensors(module, lambda tensors: tensors.update({"mtp.fusion.weight": torch.zeros(4)}))
    assert "unexpected: mtp.fusion.weight;" in refusal(bare, module)


@pytest.mark.usefixtures("unpacked_weights")
def test_a_target_that_is_named_as_its_own_drafter_has_its_module_read(tmp_path: Path) -> None:
    """Sources were told apart by the options that name them, so that the target's own tensors were read as a head's."""
    write(tmp_path, "qwen3_next", "qwen3")
    target = load(ModelSource(model=str(tmp_path)))
    named = ModelSource(model=str(tmp_path), quantization="fp8", quantizes_head=True, name="method.model")
    assert describe_module(named, target).config is target.hf_config
    assert not replace(named, revision="main").has_files_of(target.source)
    named_head, own_head = head_of(start(tmp_path, tmp_path)), head_of(start(tmp_path))
    assert torch.equal(named_head.projection.weight, own_head.projection.weight)


def test_a_module_of_another_target_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    write(tmp_path / "ours", "deepseek", "deepseek_v3, run by transformers")
    write(tmp_path / "theirs", "qwen3_next", "qwen3_moe")
    message = refusal(tmp_path / "ours", tmp_path / "theirs")
    assert "model_type must be 'deepseek_v3', the target's, or a dense family of ours, got 'qwen3_moe';" in message


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3", "deepseek_v3, run by transformers"])
def test_copies_of_embedding_and_head_are_shared_and_others_are_used(model_type: str, tmp_path: Path) -> None:
    write(tmp_path, "deepseek", model_type)

    def add(scale: float) -> Callable[[Tensors], object]:
        return lambda tensors: tensors.update(
            {
                f"{LAST}embed_tokens.weight": tensors["model.embed_tokens.weight"] * scale,
                f"{LAST}shared_head.head.weight": tensors["lm_head.weight"] * scale,
            }
        )

    edit_tensors(tmp_path, add(1.0))
    shared = head_of(start(tmp_path))
    assert shared.embed_tokens is None and shared.lm_head is None
    edit_tensors(tmp_path, add(2.0))
    own = head_of(start(tmp_path))
    assert own.embed_tokens is not None
    assert torch.equal(own.embed_tokens, 2 * own.target.embed_tokens)
    rows = torch.randn(5, HIDDEN_SIZE)
    torch.testing.assert_close(own.logits(rows, 5), 2 * shared.logits(rows, 5))
    edit_tensors(tmp_path, lambda tensors: tensors.update({f"{LAST}embed_tokens.weight": torch.zeros(3, 4)}))
    assert f"of another shape: {LAST}embed_tokens.weight [3, 4] for [{VOCAB_SIZE}, {HIDDEN_SIZE}];" in refusal(tmp_path)


def test_the_head_beside_hunyuans_module_is_not_read(tmp_path: Path) -> None:
    """Its makers' code takes the target's, whatever lies there."""
    write(tmp_path, "hy", "hy_v3")
    edit_tensors(tmp_path, lambda tensors: tensors.update({f"{LAST}shared_head.weight": tensors["lm_head.weight"] * 2}))
    head = head_of(start(tmp_path))
    assert head.embed_tokens is None and head.lm_head is None


@pytest.mark.parametrize(
    ("layout", "model_type", "prefixes"),
    [
        ("mimo", "qwen2", ("model.mtp_layers.0.", "model.mtp_layers.1.")),
        ("qwen3_next", "qwen3", ("mtp.layers.0.", "mtp.layers.1.")),
        ("deepseek", "llama", (LAST, f"model.layers.{NUM_LAYERS + 1}.")),
        ("hy", "hy_v3", (LAST, f"model.layers.{NUM_LAYERS + 1}.")),
        ("deepseek", "deepseek_v3, run by transformers", (LAST, f"model.layers.{NUM_LAYERS + 1}.")),
    ],
)
@pytest.mark.usefixtures("unpacked_weights")
def test_of_several_modules_the_first_drafts_and_a_note_says_so(
    layout: str, model_type: str, prefixes: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, layout, model_type, num_nextn_predict_layers=2)
    expected = head_of(start(tmp_path)).projection.weight

    def add(tensors: Tensors) -> None:
        first, second = prefixes
        tensors |= {
            second + name.removeprefix(first): torch.zeros_like(tensor)
            for name, tensor in tensors.items()
            if name.startswith(first)
        }

    edit_tensors(tmp_path, add)
    with caplog.at_level(logging.INFO, "proposers.heads.mtp_checkpoint"):
        assert torch.equal(head_of(start(tmp_path)).projection.weight, expected)
    told = [record.getMessage() for record in caplog.records if record.name == "proposers.heads.mtp_checkpoint"]
    assert set(told) == {f"{tmp_path}: the first of 2 MTP modules drafts every token"}


def test_mimos_published_config_is_read_as_qwen2s() -> None:
    published = {
        "architectures": ["MiMoForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
        "model_type": "mimo",
        "attention_bias": True,
        "hidden_act": "silu",
        "head_dim": 16,
        "rope_theta": 640000,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "max_window_layers": 2,
        "num_nextn_predict_layers": 1,
    }
    source = ModelSource(model="dummy", load_format="dummy", hf_config={**SHAPE, **published})
    loaded = load(source)
    arch = read_architecture(loaded.hf_config)
    assert arch is not None and arch.family == "mimo" and arch.qkv_bias and not arch.output_bias
    assert set(arch.sliding_windows) == {None} and loaded.hf_config.rope_parameters["rope_theta"] == 640000


def test_a_hybrid_target_of_others_is_told_that_its_state_cannot_roll_back_yet(tmp_path: Path) -> None:
    edit = {"model_type": "minimax", "layer_types": ["linear_attention", "full_attention"], **SHAPE}
    (tmp_path / "config.json").write_text(json.dumps({**edit, "num_hidden_layers": 2}))
    message = refusal(tmp_path)
    assert "linear_attention" in message and "cannot roll back yet what rejected drafts, MTP's" in message


@pytest.mark.parametrize("keys", [{"num_nextn_predict_layers": 1}, {"mtp_num_hidden_layers": 1}])
def test_dummy_weights_take_the_layout_that_the_config_states(keys: dict[str, int]) -> None:
    target = {**SHAPE, "num_hidden_layers": 2, "model_type": "qwen3", "head_dim": 16}
    llm = start("dummy", load_format="dummy", hf_config={**target, **keys})
    (out,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(out.outputs[0].token_ids) == 5
    assert head_of(llm).layout.projection == ("fc" if "mtp_num_hidden_layers" in keys else "eh_proj")
    assert "the config states none" in refusal("dummy", load_format="dummy", hf_config=target)


def test_ernies_module_ends_with_its_targets_norm_and_has_an_mlp(tmp_path: Path) -> None:
    """Whether its weights are read or are dummies."""
    write(tmp_path, "ernie", "ernie4_5_moe")
    values = json.loads((tmp_path / "config.json").read_text())
    for llm in (start(tmp_path), start("dummy", load_format="dummy", hf_config=values)):
        head, target = head_of(llm), llm.engine.target.model
        assert isinstance(head.block, OwnBlock) and isinstance(head.block.layer.mlp, MLP)
        assert isinstance(target, Decoder) and isinstance(target.layers[1].mlp, Experts)
        assert head.final_norm is target.norm


def test_ernies_module_is_refused_where_its_targets_norm_is_out_of_reach(tmp_path: Path) -> None:
    write(tmp_path, "ernie", "ernie4_5_moe", moe_norm_min=0.5)
    values = json.loads((tmp_path / "config.json").read_text())
    for message in (refusal(tmp_path), refusal("dummy", load_format="dummy", hf_config=values)):
        assert "an MTP module in ERNIE 4.5's layout ends with the norm of its target, which must run on our" in message


@pytest.mark.parametrize(
    ("stated", "window", "turns"), [("sliding_attention", 8, True), ("full_attention", None, False)]
)
def test_a_k_exaone_module_attends_as_its_config_states(
    stated: str, window: int | None, turns: bool, tmp_path: Path
) -> None:
    """Whether its weights are read or are dummies; without a word as the first layer does, with an MLP always."""
    write(tmp_path, "qwen3_next", "exaone_moe", mtp_layer_types=[stated], num_nextn_predict_layers=1)
    values = json.loads((tmp_path / "config.json").read_text())
    silent = {**values, "layer_types": [stated, "sliding_attention"], "mtp_layer_types": None}
    for llm in (start(tmp_path), *(start("dummy", load_format="dummy", hf_config=own) for own in (values, silent))):
        block = head_of(llm).block
        assert isinstance(block, OwnBlock) and isinstance(block.layer.mlp, MLP)
        assert block.layer.attention.sliding_window == window
        assert (block.layer.attention.rope_key is not None) is turns


def test_a_module_that_attends_to_nothing_known_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_next", "exaone_moe", mtp_layer_types=["chunked_attention"])
    rule = "mtp_layer_types must be a list of sliding_attention and full_attention, got ['chunked_attention']; mend"
    assert rule in refusal(tmp_path)


def test_a_mellum_module_attends_to_a_window_unless_its_config_says_otherwise(tmp_path: Path) -> None:
    """Whatever its target's layers do."""
    write(tmp_path, "qwen3_next", "mellum", layer_types=["full_attention"] * NUM_LAYERS, mtp_layer_types=None)
    attention = head_of(start(tmp_path)).attentions[0]
    assert attention.sliding_window == 8 and attention.rope_key == "sliding_attention"


@pytest.mark.parametrize(("stated", "kind"), [("sparse", Experts), ("dense", MLP)])
def test_a_mellum_module_has_experts_unless_its_config_states_an_mlp(stated: str, kind: type, tmp_path: Path) -> None:
    write(tmp_path, "qwen3_next", "mellum")
    values = json.loads((tmp_path / "config.json").read_text())
    values |= {"num_nextn_predict_layers": 1, "mtp_mlp_layer_types": [stated]}
    block = head_of(start("dummy", load_format="dummy", hf_config=values)).block
    assert isinstance(block, OwnBlock) and isinstance(block.layer.mlp, kind)


def test_a_module_that_does_not_fit_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "deepseek", "glm4_moe")
    monkeypatch.setattr(mtp_block, "require_memory", lambda needed, *rest: require_memory(needed << 40, *rest))
    assert f"the MTP module of model={tmp_path} needs" in refusal(tmp_path)
