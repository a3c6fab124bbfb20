"""Heads with Gemma 4's layers, as DeepSpec publishes them, over a Gemma 4 target: steps, promise, refusals.

Their drafts are proved beside those of other layouts (test_eagle.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from proposers.drafting.from_hidden_states import HeadProposer
from proposers.heads.eagle3 import load_eagle3_head
from runner.engine import decoder_weights, head_checkpoint
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.llm import LLM
from tests.conftest import complete
from tests.eagle_reference import random_weights, save_head
from tests.emulated_device import EmulatedDevice
from tests.gemma4_head_reference import EAGLE3, eagle3_shapes, save_target
from tests.one_pass_reference import Target, context_of
from tests.test_whole_steps import GREEDY, SAMPLED, VOCAB_SIZE, Traffic, play

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 3, "max_num_batched_tokens": 32}
CHAIN = {"num_speculative_tokens": 3}
TREE = {"num_speculative_tokens": 6, "speculative_token_tree": "dynamic", "tree_depth": 3, "tree_top_k": 2}
HEADS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "eagle3": ({**EAGLE3, "vocab_size": VOCAB_SIZE}, eagle3_shapes(VOCAB_SIZE)),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    directory = tmp_path_factory.mktemp("target")
    return Target(directory=directory, model=save_target(directory, VOCAB_SIZE))


@pytest.fixture(scope="module")
def heads(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """With the target's embeddings and projection, as in training, which has them say what the target says."""
    table, directories = target.model.get_input_embeddings().weight.detach(), {}
    for name, (config, shapes) in HEADS.items():
        tensors = random_weights(shapes) | {"embed_tokens.weight": table, "lm_head.weight": table.clone()}
        directories[name] = save_head(tmp_path_factory.mktemp("head"), config, tensors)
    return directories


def engine(target: Target, head: Path | None, **keys: Any) -> LLM:
    method = None if head is None else {"model": str(head), **CHAIN, **keys}
    return LLM(str(target.directory), speculative_config=method, **OPTIONS)


@pytest.mark.parametrize("keys", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", HEADS)
def test_every_whole_step_drafts_and_accepts_what_it_does_in_parts(
    target: Target, heads: dict[str, Path], name: str, keys: dict[str, Any]
) -> None:
    """And the text is plain decoding's."""
    lengths = (60, 23, 1, 25, 5)
    params = tuple(replace(SAMPLED if own == 23 else GREEDY, ignore_eos=True, max_tokens=own) for own in lengths)
    arrivals = tuple((12 * index, 3 + 8 * index) for index in range(len(lengths)))
    traffic = Traffic(arrivals=arrivals, params=params, cancelled={}, max_num_seqs=3)
    llm = engine(target, heads[name], **keys)
    _, in_parts, _ = play(llm, traffic, whole=False)
    llm.reset_prefix_cache()
    requests, whole, num_launched = play(llm, traffic, whole=True)
    plain, _, _ = play(engine(target, None), traffic, whole=False)
    assert num_launched > 10
    assert [request.output_token_ids for request in requests] == [request.output_token_ids for request in plain]
    by_id = {record.request_id: record for record in in_parts}
    for record in whole:
        for field in ("token_ids", "tokens_per_step", "num_draft_tokens", "num_accepted_tokens"):
            assert getattr(record, field) == getattr(by_id[record.request_id], field), field
    assert {0, 1} <= {count for record in whole for count in record.num_accepted_tokens}


@pytest.mark.parametrize("name", HEADS)
def test_captured_steps_of_a_gpu_say_what_the_cpu_says(
    target: Target, heads: dict[str, Path], emulated_gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for module in (decoder_weights, head_checkpoint):  # it adds weights up, which a GPU does in no certain order
        monkeypatch.setattr(module, "require_finite", lambda *_: None)
    prompts = [{"prompt_token_ids": [(3 * i + j) % VOCAB_SIZE for i in range(5 + 30 * j)]} for j in range(2)]
    params = [replace(GREEDY, max_tokens=9), replace(SAMPLED, max_tokens=7)]
    found = []
    for device in ("cpu", "cuda"):
        method = {"model": str(heads[name]), "num_speculative_tokens": 2}
        options = {**OPTIONS, "batch_invariant": False, "device": device}
        requests, metrics = complete(LLM(str(target.directory), speculative_config=method, **options), prompts, params)
        counts = [(record.num_draft_tokens, record.num_accepted_tokens) for record in metrics.records]
        found.append(([request.output_token_ids for request in requests], counts))
    assert found[0] == found[1] and emulated_gpu.num_replays > 0


def test_a_copy_of_the_targets_projection_in_8_bits_is_capped_as_the_target_caps_it(
    target: Target, heads: dict[str, Path], tmp_path: Path
) -> None:
    """It was not: sampled drafts were drawn as if the target were surer than it is."""
    layer = {**EAGLE3, "vocab_size": VOCAB_SIZE}
    tensors = {name: tensor for name, tensor in random_weights(HEADS["eagle3"][1]).items() if "lm_head" not in name}
    save_head(tmp_path, layer, tensors)
    for quantization in (None, "int8"):
        proposer = engine(target, tmp_path, quantization=quantization).engine.proposer
        assert isinstance(proposer, HeadProposer)
        head: Any = proposer.head
        assert (head.lm_head is None) == (quantization is None)
        logits = head.logits(100 * torch.ones(1, head.hidden_size), 1)
        assert 5.9 < logits.abs().max() <= 6.0


def test_random_weights_stand_in_for_a_head_that_is_not_there(target: Target) -> None:
    """As models that are measured before a download have them; its values are its keys all the same."""
    source = ModelSource(model="a-head", name="method.model", load_format="dummy", hf_config=HEADS["eagle3"][0])
    head = load_eagle3_head(source, replace(context_of(target), vocab_size=VOCAB_SIZE), None, None)
    targets = head.weight_targets()
    keys, values = (targets[f"layers.0.self_attn.{name}_proj.weight"].view for name in "kv")
    assert torch.equal(keys, values) and keys.std() > 0


REFUSALS: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "a tensor too few": ({}, "layers.0.layer_scalar", "missing: layers.0.layer_scalar; download it again"),
    "values of their own": (
        {"attention_k_eq_v": False, "num_key_value_heads": 1},
        None,
        "missing: layers.0.self_attn.v_proj.weight; download it again",
    ),
    "experts": (
        {"model_type": "gemma4_text", "enable_moe_block": True, "num_experts": 2, "top_k_experts": 1}
        | {"moe_intermediate_size": 8},
        None,
        r"must be Gemma 4's .* without experts \(enable_moe_block\)",
    ),
    "inputs of layers": (
        {"model_type": "gemma4_text", "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE},
        None,
        r"without .* inputs of their own \(hidden_size_per_layer_input\)",
    ),
    "layers of another family": ({"model_type": "gemma3_text"}, None, "model_type must be one of gemma4_text, "),
    "two layers": (
        {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
        None,
        "missing: layers.1.input_layernorm.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSALS)
def test_a_head_that_does_not_belong_is_refused_in_one_message(target: Target, tmp_path: Path, what: str) -> None:
    keys, missing, message = REFUSALS[what]
    config, shapes = HEADS["eagle3"]
    save_head(tmp_path, config | keys, {n: t for n, t in random_weights(shapes).items() if n != missing})
    with pytest.raises(UserError, match=message) as caught:
        engine(target, tmp_path, method="eagle3")
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
