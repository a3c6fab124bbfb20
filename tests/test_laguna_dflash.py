"""poolside's DFlash heads for Laguna, on a Laguna target: logits and drafts are those of an independent rewrite.

tests/test_family_logits.py has the target's logits, tests/test_other_families.py its steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from proposers.heads.dflash_family import load_head_of_family
from proposers.heads.laguna_dflash import LagunaDFlashHead
from runner.config import parse_method
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.llm import LLM
from tests.conftest import complete
from tests.emulated_device import EmulatedDevice
from tests.one_pass_reference import MASK, OPTIONS, SHAPE, Target, context_of, passes_of_a_run
from tests.test_dflash import inside, norm, rotate, save_head, with_, without
from tests.test_whole_steps import GREEDY, SAMPLED, VOCAB_SIZE, Traffic, assert_same_steps, play
from tests.transformers_reference import (
    KeepFloat64,
    assert_as_accurate,
    in_float64,
    random_model,
    save,
    save_tokenizer,
)

NUM_LAYERS, NUM_HEAD_LAYERS, BLOCK, WINDOW = 3, 2, 6, 7
HIDDEN_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = SHAPE["hidden_size"], 8, 2, SHAPE["head_dim"]
TAPS = [1, 3]  # the last is the residual stream in front of the norm
SMALL = {**SHAPE, "vocab_size": VOCAB_SIZE}
TARGET: dict[str, Any] = {
    **SMALL,
    "num_hidden_layers": NUM_LAYERS,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "num_attention_heads_per_layer": [4, 8, 4],
    "sliding_window": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "moe_routed_scaling_factor": 2.5,
}
HEAD: dict[str, Any] = {
    **SMALL,
    "architectures": ["DFlashLagunaForCausalLM"],
    "model_type": "laguna",
    "num_hidden_layers": NUM_HEAD_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "layer_types": ["sliding_attention"] * NUM_HEAD_LAYERS,
    "sliding_window": WINDOW,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "attention_bias": False,
    "hidden_act": "silu",
    "gating": "per-head",
    "num_experts": 0,
    "draft_vocab_size": VOCAB_SIZE,
    "dflash_config": {
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "num_target_layers": NUM_LAYERS,
        "target_layer_ids": [tap - 1 for tap in TAPS],
        "causal": True,
    },
    "torch_dtype": "bfloat16",
}
BY_TYPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}}
Tensors = dict[str, Tensor]


def tensors(*, is_gated_by_element: bool = False, is_fused: bool = True, has_bias: bool = False) -> Tensors:
    q, kv, middle = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM, SHAPE["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN_SIZE, len(TAPS) * HIDDEN_SIZE)}
    norms = ["norm", "hidden_norm", *(f"aux_hidden_norms.{at}" for at in range(len(TAPS)))]
    shapes |= {f"{name}.weight": (HIDDEN_SIZE,) for name in norms}
    for layer in range(NUM_HEAD_LAYERS):
        rows = {"qkv_proj": q + 2 * kv} if is_fused else {"q_proj": q, "k_proj": kv, "v_proj": kv}
        attention: dict[str, tuple[int, ...]] = {f"{name}.weight": (own, HIDDEN_SIZE) for name, own in rows.items()}
        attention |= {f"{name}.bias": (own,) for name, own in rows.items() if has_bias}
        attention |= {"o_proj.weight": (HIDDEN_SIZE, q), "q_norm.weight": (HEAD_DIM,), "k_norm.weight": (HEAD_DIM,)}
        attention |= {"g_proj.weight": (q if is_gated_by_element else NUM_HEADS, HIDDEN_SIZE)}
        attention |= {"o_proj.bias": (HIDDEN_SIZE,)} if has_bias else {}
        mlp = dict.fromkeys(("gate_proj", "up_proj"), (middle, HIDDEN_SIZE)) | {"down_proj": (HIDDEN_SIZE, middle)}
        shapes |= {f"layers.{layer}.self_attn.{name}": shape for name, shape in attention.items()}
        shapes |= {f"layers.{layer}.mlp.{name}.weight": shape for name, shape in mlp.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers.{layer}.{name}.weight"] = (HIDDEN_SIZE,)
    generator = torch.Generator().manual_seed(3)
    random = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: tensor + 1 if "norm" in name else tensor for name, tensor in random.items()}


LAYOUTS: dict[str, tuple[dict[str, Any], Tensors]] = {
    "published": (HEAD, tensors()),
    "the pending token guesses too": ({**HEAD, "sample_from_anchor": True}, tensors()),
    "gates each element": ({**HEAD, "gating": "per-element"}, tensors(is_gated_by_element=True)),
    "projections apart, biased": ({**HEAD, "attention_bias": True}, tensors(is_fused=False, has_bias=True)),
    "fused, biased, rotations by type": (
        {**without("rope_theta")(HEAD), "attention_bias": True, "rope_parameters": BY_TYPE},
        tensors(has_bias=True),
    ),
    "sees all, and ahead": (
        inside(causal=False)({**HEAD, "layer_types": ["full_attention"] * NUM_HEAD_LAYERS}),
        tensors(),
    ),
}
exact_copy = cache(in_float64)


def fused(own: Tensors, kind: str) -> Tensor | None:
    """Of a layer's projections to queries, keys and values; None: there is no such thing."""
    if f"self_attn.qkv_proj.{kind}" in own:
        return own[f"self_attn.qkv_proj.{kind}"]
    apart = [own[name] for name in (f"self_attn.{part}_proj.{kind}" for part in "qkv") if name in own]
    return torch.cat(apart) if apart else None


@cache
@torch.inference_mode()
def states_behind(target: Any, token_ids: tuple[int, ...]) -> list[Tensor]:
    """The residual stream after each number of layers."""
    found: list[Tensor] = [target.model.embed_tokens(torch.tensor(token_ids))]
    hooks = [
        layer.register_forward_hook(lambda module, args, output: found.append(output[0]))
        for layer in target.model.layers
    ]
    target.model(torch.tensor([token_ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


@torch.inference_mode()
def reference_logits(layout: str, target: Any, token_ids: list[int], num_tokens: int) -> Tensor:
    """[num_tokens, vocab] behind token_ids, in the target's dtype: as vLLM and SGLang compute it, from the start."""
    config, weights = LAYOUTS[layout]
    num_silent = 0 if config.get("sample_from_anchor") else 1
    embedding = target.model.embed_tokens.weight
    weights = {name: weight.to(embedding.dtype) for name, weight in weights.items()}
    states = states_behind(target, tuple(token_ids[:-1]))
    normed = [norm(states[tap], weights[f"aux_hidden_norms.{at}.weight"]) for at, tap in enumerate(TAPS)]
    context = norm(torch.cat(normed, dim=-1) @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    hidden = embedding[torch.tensor([token_ids[-1]] + [MASK] * (num_tokens + num_silent - 1))]
    positions = torch.arange(len(context) + len(hidden))
    queries = positions[len(context) :]
    distance = queries[:, None] - positions
    visible = torch.ones_like(distance, dtype=torch.bool)
    if config["layer_types"][0] == "sliding_attention":
        visible = (distance >= 0) & (distance < WINDOW)
    for layer in range(NUM_HEAD_LAYERS):
        own = {name.split(".", 2)[2]: weight for name, weight in weights.items() if name.startswith(f"layers.{layer}.")}
        rows = norm(torch.cat((context, hidden)), own["input_layernorm.weight"])  # the context's, too
        qkv = F.linear(rows, fused(own, "weight"), fused(own, "bias")).view(len(rows), -1, HEAD_DIM)
        q, k, v = qkv.split((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), dim=1)
        q = rotate(norm(q[len(context) :], own["self_attn.q_norm.weight"]), queries)
        k = rotate(norm(k, own["self_attn.k_norm.weight"]), positions)
        k, v = (x.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
        weight = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        found = torch.einsum("hqk,khd->qhd", weight, v)
        gates = (1 + (rows[len(context) :] @ own["self_attn.g_proj.weight"].T).exp()).log()
        found = (found * gates.view(len(hidden), NUM_HEADS, -1)).flatten(1)
        hidden = hidden + F.linear(found, own["self_attn.o_proj.weight"], own.get("self_attn.o_proj.bias"))
        normed_rows = norm(hidden, own["post_attention_layernorm.weight"])
        gate = normed_rows @ own["mlp.gate_proj.weight"].T
        up = normed_rows @ own["mlp.up_proj.weight"].T
        hidden = hidden + (gate * torch.sigmoid(gate) * up) @ own["mlp.down_proj.weight"].T
    logits: Tensor = norm(hidden[num_silent:], weights["norm.weight"]) @ target.lm_head.weight.T
    return logits


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    from transformers import AutoConfig

    directory = tmp_path_factory.mktemp("target")
    model = random_model(AutoConfig.for_model("laguna", **TARGET))
    model.lm_head.weight.data[12:] *= 0.3  # few tokens are likely, so that drafts are right now and then
    save(model, directory)
    save_tokenizer(directory, VOCAB_SIZE)
    return Target(directory=directory, model=model)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_head(tmp_path_factory.mktemp("head"), *LAYOUTS["published"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_pass_has_the_logits_of_a_rewrite(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """From its own cache: the context in chunks, after every way to accept, after preemption, over blocks' scratch."""
    method = {"model": save_head(tmp_path / "head", *LAYOUTS[layout]), "num_speculative_tokens": 5}
    passes, _ = passes_of_a_run(target, monkeypatch, method)
    assert len(passes) > 20 and {1, 5} < {len(one.drafted) for one in passes}
    texts = [(one.token_ids, len(one.drafted)) for one in passes]
    theirs = [reference_logits(layout, target.model, *text) for text in texts]
    with KeepFloat64():
        exact = [reference_logits(layout, exact_copy(target.model), *text) for text in texts]
    assert_as_accurate(torch.cat([one.logits for one in passes]), torch.cat(theirs), torch.cat(exact))
    assert [one.drafted for one in passes] == [logits.argmax(dim=-1).tolist() for logits in exact]


CHAIN = {"num_speculative_tokens": 3}
TREE = {"num_speculative_tokens": 6, "speculative_token_tree": "dynamic"}


def engine(target: Target, head: str | None, **keys: Any) -> LLM:
    method = None if head is None else {"model": head, **CHAIN, **keys}
    return LLM(str(target.directory), speculative_config=method, **OPTIONS)


@pytest.mark.parametrize("keys", [CHAIN, TREE], ids=["chain", "tree"])
def test_every_whole_step_drafts_and_accepts_what_it_does_in_parts(
    target: Target, head: str, keys: dict[str, Any]
) -> None:
    """And the text is plain decoding's."""
    lengths = (60, 23, 1, 25, 5)
    params = tuple(replace(SAMPLED if own == 23 else GREEDY, ignore_eos=True, max_tokens=own) for own in lengths)
    arrivals = tuple((12 * index, 3 + 8 * index) for index in range(len(lengths)))
    traffic = Traffic(arrivals=arrivals, params=params, cancelled={}, max_num_seqs=3)
    llm = engine(target, head, **keys)
    _, in_parts, _ = play(llm, traffic, whole=False)
    llm.reset_prefix_cache()
    requests, whole, num_launched = play(llm, traffic, whole=True)
    plain, _, _ = play(engine(target, None), traffic, whole=False)
    assert num_launched > 10
    assert [request.output_token_ids for request in requests] == [request.output_token_ids for request in plain]
    assert_same_steps(whole, in_parts)
    assert {0, 1} <= {count for record in whole for count in record.num_accepted_tokens}


def test_captured_steps_of_a_gpu_say_what_the_cpu_says(
    target: Target, head: str, emulated_gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runner.engine import weight_filling

    # It adds weights up, which a GPU does in no certain order.
    monkeypatch.setattr(weight_filling, "require_finite", lambda *_: None)
    prompts = [{"prompt_token_ids": [(3 * i + j) % VOCAB_SIZE for i in range(5 + 30 * j)]} for j in range(2)]
    params = [replace(GREEDY, max_tokens=9), replace(SAMPLED, max_tokens=7)]
    found = []
    for device in ("cpu", "cuda"):
        method = {"model": head, "num_speculative_tokens": 2}
        options = {**OPTIONS, "batch_invariant": False, "device": device}
        llm = LLM(str(target.directory), speculative_config=method, **options)
        requests, metrics = complete(llm, prompts, params)
        counts = [(record.num_draft_tokens, record.num_accepted_tokens) for record in metrics.records]
        found.append(([request.output_token_ids for request in requests], counts))
    assert found[0] == found[1] and emulated_gpu.num_replays > 0


def read(target: Target, head: str) -> LagunaDFlashHead:
    source = ModelSource(model=head, name="method.model")
    found = load_head_of_family(source, replace(context_of(target), vocab_size=VOCAB_SIZE), None, None)
    assert isinstance(found, LagunaDFlashHead)
    return found


def test_a_local_checkpoint_says_its_method_and_its_block(target: Target, head: str) -> None:
    assert parse_method({"model": head})[0].method == "dflash"
    config = read(target, head).config
    assert config.tap_layers == tuple(TAPS) and config.max_draft_tokens == BLOCK - 1
    assert config.causal_layers == (True, True) and config.arch.sliding_windows == (WINDOW, WINDOW)


def test_stretched_rotations_are_read_in_the_older_layout(target: Target, tmp_path: Path) -> None:
    head = save_head(tmp_path, with_(rope_scaling={"type": "linear", "factor": 4.0})(HEAD), tensors())
    found = read(target, head).config.hf_config.rope_parameters["sliding_attention"]
    assert (found["rope_type"], found["factor"], found["rope_theta"]) == ("linear", 4.0, 5000.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_(num_experts=4), r"must be Laguna's with .* without experts .*, got num_experts=4; choose"),
        (with_(swa_attention_sink_enabled=True), "attention sinks, got swa_attention_sink_enabled=True; choose"),
        (with_(hidden_act="gelu"), "must be Laguna's with hidden_act 'silu'"),
        (with_(layer_types=["sliding_attention", "full_attention"]), r"all of one type \(layer_types\)"),
        (with_(num_attention_heads_per_layer=[8, 4]), "and as many heads"),
        (with_(partial_rotary_factor=0.5), "with rotations of whole heads"),
        (without("rope_theta"), "rope_theta in its config must be a number > 0, got None; mend"),
        (with_(rope_theta=-1.0), "rope_theta in its config must be a number > 0, got -1.0; mend"),
        (with_(partial_rotary_factor="all"), "partial_rotary_factor in its config must be a number > 0, got 'all'"),
        (with_(rope_parameters=[1]), r"rope_parameters in its config must be a mapping, got \[1\]; mend"),
        (
            with_(rope_parameters={"full_attention": {}, "sliding_attention": 5}),
            "rope_parameters in its config must be a mapping for sliding_attention, got 5; mend",
        ),
        (with_(layer_types=True), "layer_types in its config must be a list of names, got True; mend"),
        (with_(moe_apply_router_weight_on_input=True), "cannot be read as a laguna config: .*; mend"),
        (without("num_hidden_layers"), "num_hidden_layers in its config must be a whole number >= 1"),
        (with_(sliding_window=None), "sliding_window in its config must be a whole number >= 1"),
        (with_(hidden_size=64), "made for .*, got hidden_size 64 for 32; choose"),
        (inside(num_target_layers=40), "got layers of the target 40 for 3; choose"),
        (inside(target_layer_ids=[0, 3]), r"hidden states \[1, 4\], which must lie in \[0, 3\]"),
        (inside(mask_token_id=None), "must name the mask token"),
        (with_(markov_rank=256), r"must be a plain DFlash head, got markov_rank=256 \(DSpark\)"),
    ],
)  # fmt: skip
def test_a_config_that_is_not_this_targets_laguna_drafter_is_one_message(
    target: Target, tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read(target, save_head(tmp_path / "head", change(HEAD), tensors()))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value) and "; " in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("aux_hidden_norms.1.weight"), r"Laguna DFlash head .*; missing: aux_hidden_norms\.1\.weight; "),
        (without("layers.1.self_attn.g_proj.weight"), r"missing: layers\.1\.self_attn\.g_proj\.weight; "),
        (without("layers.0.self_attn.qkv_proj.weight"), r"missing: layers\.0\.self_attn\.k_proj\.weight, .*v_proj"),
        (
            with_(layers__0__self_attn__qkv_proj__weight=torch.zeros(90, HIDDEN_SIZE)),
            r"unexpected: layers\.0\.self_attn\.qkv_proj\.weight; missing: layers\.0\.self_attn\.k_proj\.weight, ",
        ),
    ],
)
def test_tensors_that_are_not_this_heads_are_one_message(
    target: Target, tmp_path: Path, change: Callable[[Tensors], Tensors], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read(target, save_head(tmp_path / "head", HEAD, change(tensors())))
    assert str(caught.value).startswith("method.model=") and "; " in str(caught.value)
