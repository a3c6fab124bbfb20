"""Heads with Gemma 4's layers, as DeepSpec publishes them, and z-lab's plain ones, over a Gemma 4 target.

EAGLE-3's drafts are proved beside those of other layouts (test_eagle.py), those of blocks here; of all steps, promise
and refusals.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from proposers.drafting.from_hidden_states import HeadProposer
from proposers.heads.dflash import load_dflash_head
from proposers.heads.dspark import load_dspark_head
from proposers.heads.eagle3 import load_eagle3_head
from runner.engine import weight_filling
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.llm import LLM
from tests.conftest import complete
from tests.eagle_reference import random_weights, save_head
from tests.emulated_device import EmulatedDevice
from tests.gemma4_head_reference import (
    DFLASH,
    DSPARK,
    EAGLE3,
    GEMMA4,
    NUM_LAYERS,
    SIZE,
    TARGET_LAYER_IDS,
    Gemma4Layers,
    block_shapes,
    eagle3_shapes,
    save_target,
)
from tests.one_pass_reference import OPTIONS, Target, context_of, passes_of_a_run
from tests.test_dflash import ZLAB, reference_rows, states_behind
from tests.test_dflash import tensors as plain_tensors
from tests.test_whole_steps import GREEDY, SAMPLED, VOCAB_SIZE, Traffic, assert_same_steps, play
from tests.transformers_reference import KeepFloat64, assert_as_accurate, in_float64

CHAIN = {"num_speculative_tokens": 3}
TREE = {"num_speculative_tokens": 6, "speculative_token_tree": "dynamic", "tree_depth": 3, "tree_top_k": 2}
HEADS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "eagle3": ({**EAGLE3, "vocab_size": VOCAB_SIZE}, eagle3_shapes(VOCAB_SIZE)),
    "dflash": ({**DFLASH, "vocab_size": VOCAB_SIZE}, block_shapes(DFLASH, VOCAB_SIZE)),
    "dspark": ({**DSPARK, "vocab_size": VOCAB_SIZE}, block_shapes(DSPARK, VOCAB_SIZE)),
}
CAP = GEMMA4["final_logit_softcapping"]
# Plain layers, the target's embeddings, which it scales, and its projection, whose logits it caps.
OF_ZLAB = {**ZLAB, "vocab_size": VOCAB_SIZE, "num_target_layers": NUM_LAYERS, "final_logit_softcapping": CAP}


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


@torch.inference_mode()
def block_logits(
    layout: str, weights: dict[str, torch.Tensor], model: Any, text: tuple[list[int], list[int]]
) -> torch.Tensor:
    """[guesses, vocab] behind a text; text: the tokens that are known, the last one pending, and the guesses."""
    known, guessed = text
    own = {name: weight.to(model.lm_head.weight.dtype) for name, weight in weights.items()}
    if layout == "z-lab":
        own["embed_tokens.weight"] = model.get_input_embeddings().weight * SIZE**0.5
        rows = reference_rows(OF_ZLAB, own, model, known, len(guessed), [1, 2], num_silent=1)
        return torch.tanh(rows @ model.lm_head.weight.T / CAP) * CAP
    states = states_behind(model, tuple(known[:-1]))
    context = torch.cat([states[layer + 1][0] for layer in TARGET_LAYER_IDS], dim=-1)
    return Gemma4Layers(HEADS[layout][0], own).block_logits(context, [known[-1], *guessed[:-1]])


@pytest.mark.parametrize("layout", ["dflash", "dspark", "z-lab"])
def test_every_pass_of_a_block_has_the_logits_of_a_rewrite(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """From its own cache: the context in chunks, after every way to accept, after preemption, over blocks' scratch."""
    if layout == "z-lab":
        config, weights = OF_ZLAB, plain_tensors()
    else:
        config, weights = HEADS[layout][0], random_weights(HEADS[layout][1])
    method = {"model": str(save_head(tmp_path, config, weights)), "num_speculative_tokens": 5}
    passes, _ = passes_of_a_run(target, monkeypatch, method)
    assert len(passes) > 20 and {1, 5} < {len(one.drafted) for one in passes}
    texts, exact_model = [(one.token_ids, one.drafted) for one in passes], in_float64(target.model)
    theirs = [block_logits(layout, weights, target.model, text) for text in texts]
    with KeepFloat64():
        exact = [block_logits(layout, weights, exact_model, text) for text in texts]
    assert_as_accurate(torch.cat([one.logits for one in passes]), torch.cat(theirs), torch.cat(exact))
    assert [one.drafted for one in passes] == [logits.argmax(dim=-1).tolist() for logits in exact]


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
    assert_same_steps(whole, in_parts)
    assert {0, 1} <= {count for record in whole for count in record.num_accepted_tokens}


@pytest.mark.parametrize("name", HEADS)
def test_captured_steps_of_a_gpu_say_what_the_cpu_says(
    target: Target, heads: dict[str, Path], emulated_gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # It adds weights up, which a GPU does in no certain order.
    monkeypatch.setattr(weight_filling, "require_finite", lambda *_: None)
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


def test_heads_in_8_bits_draft_and_change_no_token(target: Target, heads: dict[str, Path]) -> None:
    """A layer's queries, keys and values are one product then, which a context cannot take a part of."""
    prompts = [{"prompt_token_ids": [3, 9, 27, 17]}, {"prompt_token_ids": list(range(40))}]
    params = [replace(SAMPLED, max_tokens=12), replace(GREEDY, max_tokens=12)]
    plain, _ = complete(engine(target, None), prompts, params)
    for head in heads.values():
        requests, metrics = complete(engine(target, head, quantization="int8"), prompts, params)
        assert [request.output_token_ids for request in requests] == [own.output_token_ids for own in plain]
        assert sum(point.num_accepted_tokens for point in metrics.step_points) > 0


@pytest.mark.parametrize("name", HEADS)
def test_random_weights_stand_in_for_a_head_that_is_not_there(target: Target, name: str) -> None:
    """As models that are measured before a download have them; its values are its keys all the same."""
    load: Any = {"eagle3": load_eagle3_head, "dflash": load_dflash_head, "dspark": load_dspark_head}[name]
    source = ModelSource(model="a-head", name="method.model", load_format="dummy", hf_config=HEADS[name][0])
    targets = load(source, replace(context_of(target), vocab_size=VOCAB_SIZE), None, None).weight_targets()
    keys, values = (targets[f"layers.0.self_attn.{part}_proj.weight"].view for part in "kv")
    assert torch.equal(keys, values) == HEADS[name][0]["attention_k_eq_v"] and keys.std() > 0
    assert {"embed_tokens.weight", "lm_head.weight"} <= targets.keys(), "DeepSpec's bring them"


EXPERTS = {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 8}
REFUSALS: dict[str, tuple[str, dict[str, Any], str | None, str]] = {
    "a tensor too few": ("eagle3", {}, "layers.0.layer_scalar", "missing: layers.0.layer_scalar; download it again"),
    "values of their own": (
        "dflash",
        {"attention_k_eq_v": False, "num_key_value_heads": 1},
        None,
        "missing: layers.0.self_attn.v_proj.weight, layers.1.self_attn.v_proj.weight; download it again",
    ),
    "values that are keys": (
        "dspark",
        {"attention_k_eq_v": True, "num_global_key_value_heads": 2},
        None,
        "unexpected: layers.0.self_attn.v_proj.weight, layers.1.self_attn.v_proj.weight; download it again",
    ),
    "experts": (
        "eagle3",
        {"model_type": "gemma4_text", **EXPERTS},
        None,
        r"must be Gemma 4's .* without experts \(enable_moe_block\)",
    ),
    "inputs of layers": (
        "dspark",
        {"model_type": "gemma4_text", "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE},
        None,
        r"without .* inputs of their own \(hidden_size_per_layer_input\)",
    ),
    "keys of other layers": (
        "dflash",
        {"model_type": "gemma4_text", "num_kv_shared_layers": 1},
        None,
        r"without .* keys of others \(num_kv_shared_layers\)",
    ),
    "a window": (
        "dflash",
        {"layer_types": ["sliding_attention", "full_attention"]},
        None,
        r"must be Gemma 4's .* that see all \(layer_types\)",
    ),
    "layers of another family": (
        "dspark",
        {"model_type": "gemma3_text"},
        None,
        "model_type must be one of gemma4_text, gemma4_unified_text, got 'gemma3_text'",
    ),
    "two layers": (
        "eagle3",
        {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
        None,
        "missing: layers.1.input_layernorm.weight",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_a_head_that_does_not_belong_is_refused_in_one_message(target: Target, tmp_path: Path, what: str) -> None:
    name, keys, missing, message = REFUSALS[what]
    config, shapes = HEADS[name]
    save_head(tmp_path, config | keys, {n: t for n, t in random_weights(shapes).items() if n != missing})
    with pytest.raises(UserError, match=message) as caught:
        engine(target, tmp_path, method=name)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_head_that_uses_its_targets_projection_states_its_targets_cap_or_none(target: Target, tmp_path: Path) -> None:
    for cap in (None, CAP):
        head = save_head(tmp_path / f"{cap}", {**OF_ZLAB, "final_logit_softcapping": cap}, plain_tensors())
        proposer: Any = engine(target, head).engine.proposer
        assert proposer.head.logits(100 * torch.ones(1, SIZE), 1).abs().max() <= CAP
    head = save_head(tmp_path / "other", {**OF_ZLAB, "final_logit_softcapping": 2 * CAP}, plain_tensors())
    with pytest.raises(
        UserError, match=r"final_logit_softcapping in its config must be that of .*, 6\.0, .* got 12\.0"
    ):
        engine(target, head)
