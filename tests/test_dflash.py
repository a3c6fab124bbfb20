"""DFlash: heads in both published layouts read as they are; logits and drafts those of an independent rewrite."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from proposers.heads.dflash import load_dflash_head
from proposers.heads.dflash_config import spread_layer_ids, tap_layers
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from tests.one_pass_reference import (
    HIDDEN_SIZE,
    MASK,
    NUM_LAYERS,
    SHAPE,
    VOCAB_SIZE,
    Target,
    context_of,
    passes_of_a_run,
    save_target,
)
from tests.transformers_reference import KeepFloat64, assert_as_accurate, in_float64

NUM_HEAD_LAYERS, BLOCK, WINDOW, NUM_DRAFTED = 2, 6, 7, 30
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"], SHAPE["head_dim"]
Tensors = dict[str, Tensor]
Around = Callable[[Tensors, str, Callable[[Tensor], Tensor], Tensor], Tensor]  # (of a layer, which part, it, its input)
LAYERS = {
    **{key: value for key, value in SHAPE.items() if key != "num_hidden_layers"},
    "model_type": "qwen3",
    "num_hidden_layers": NUM_HEAD_LAYERS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "attention_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
ZLAB = {
    **LAYERS,
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": BLOCK,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]},
    "layer_types": ["full_attention"] * NUM_HEAD_LAYERS,
    "num_target_layers": NUM_LAYERS,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
}
DEEPSPEC = {  # its DSpark model without a sequential head
    **{key: value for key, value in ZLAB.items() if key not in ("auto_map", "dflash_config")},
    "architectures": ["Qwen3DSparkModel"],
    "target_layer_ids": [0, 1],
    "mask_token_id": MASK,
    "num_anchors": 512,
    "enable_confidence_head": False,
    "markov_rank": 0,
}
NVIDIA = {  # ModelOpt's words
    **{key: value for key, value in ZLAB.items() if key not in ("auto_map", "block_size", "num_target_layers")},
    "attention_sink_bias": False,
    "dflash_config": {
        "attention_sink_bias": False,
        "causal": False,
        "mask_token_id": MASK,
        "target_layer_ids": [0, 1],
        "use_swa": False,
        "sample_from_anchor": False,
    },
    "dflash_query_causal": False,
    "draft_vocab_size": None,
    "dspark_fixup_head_type": None,
    "has_embed_tokens": True,
    "has_lm_head": False,
}
OF_WINDOWS = {**NVIDIA["dflash_config"], "attention_sink_bias": True, "swa_window_size": WINDOW, "use_swa": True}
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
FIELDS_OF_DOMINO = {  # written with every head
    "projector_type": "dflash",
    "pure_draft_prefix_len": 1,
    "emb_dim": 256,
    "gru_hidden_dim": 1024,
    "shift_label": False,
}
SPECULATORS = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.5.0",
    "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "target", "architectures": ["Llama"]}},
    "transformer_layer_config": LAYERS,
    "draft_vocab_size": VOCAB_SIZE,
    "target_hidden_size": None,
    "block_size": BLOCK,
    "aux_hidden_state_layer_ids": [1, 2],
    "mask_token_id": MASK,
    "sliding_window_non_causal": False,
    "sample_from_anchor": False,
    **FIELDS_OF_DOMINO,
}
IDS = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(4))[:NUM_DRAFTED].sort().values
VOCABULARY = {
    "d2t": IDS - torch.arange(NUM_DRAFTED),
    "t2d": torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, IDS, True),
}


def tensors(*, has_bias: bool = False, **shapes: tuple[int, ...]) -> Tensors:
    """Of a head with taps of two depths; shapes: of the tensors that it brings besides, __ for a dot."""
    q, kv, middle = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM, SHAPE["intermediate_size"]
    found: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN_SIZE, 2 * HIDDEN_SIZE)}
    found |= {"norm.weight": (HIDDEN_SIZE,), "hidden_norm.weight": (HIDDEN_SIZE,)}
    for layer in range(NUM_HEAD_LAYERS):
        rows = {"q_proj": (q, HIDDEN_SIZE), "k_proj": (kv, HIDDEN_SIZE), "v_proj": (kv, HIDDEN_SIZE)}
        for name, shape in {**rows, "o_proj": (HIDDEN_SIZE, q)}.items():
            found[f"layers.{layer}.self_attn.{name}.weight"] = shape
            if has_bias:
                found[f"layers.{layer}.self_attn.{name}.bias"] = shape[:1]
        for name in ("q_norm", "k_norm"):
            found[f"layers.{layer}.self_attn.{name}.weight"] = (HEAD_DIM,)
        for name in ("gate_proj", "up_proj"):
            found[f"layers.{layer}.mlp.{name}.weight"] = (middle, HIDDEN_SIZE)
        found[f"layers.{layer}.mlp.down_proj.weight"] = (HIDDEN_SIZE, middle)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"layers.{layer}.{name}.weight"] = (HIDDEN_SIZE,)
    found |= {name.replace("__", "."): shape for name, shape in shapes.items()}
    generator = torch.Generator().manual_seed(3)
    random = {name: 0.25 * torch.randn(shape, generator=generator) for name, shape in found.items()}
    return {name: tensor + 1 if "norm" in name else tensor for name, tensor in random.items()}


SINKS = {f"layers__{layer}__self_attn__attention_sink_bias": (NUM_HEADS,) for layer in range(NUM_HEAD_LAYERS)}
CUT = {**tensors(lm_head__weight=(NUM_DRAFTED, HIDDEN_SIZE)), **VOCABULARY}
LAYOUTS: dict[str, tuple[dict[str, Any], Tensors]] = {
    "z-lab": (ZLAB, tensors()),
    "z-lab, block size inside": (
        {**ZLAB, "block_size": 99, "dflash_config": {**ZLAB["dflash_config"], "block_size": BLOCK}},
        tensors(),
    ),
    "z-lab, biases": ({**ZLAB, "attention_bias": True}, tensors(has_bias=True)),
    "z-lab, windows": ({**ZLAB, **WINDOWED}, tensors()),
    "z-lab, windows that see ahead": (
        {
            **ZLAB,
            **WINDOWED,
            "sliding_window": 99,
            "is_causal": False,
            "dflash_config": {**ZLAB["dflash_config"], "swa_window_size": WINDOW},
        },
        tensors(),
    ),
    "z-lab, causal": ({**ZLAB, "is_causal": True}, tensors()),
    "vLLM's key, neighbours turn together": (
        {**ZLAB, "is_neox_style": False, "attention_bias": True},
        tensors(has_bias=True),
    ),
    "vLLM's key, causal": ({**ZLAB, "dflash_config": {**ZLAB["dflash_config"], "causal": True}}, tensors()),
    "NVIDIA": (NVIDIA, tensors(embed_tokens__weight=(VOCAB_SIZE, HIDDEN_SIZE))),
    "vLLM's word for windows of all layers, sinks": ({**NVIDIA, "dflash_config": OF_WINDOWS}, tensors(**SINKS)),
    "speculators": (SPECULATORS, tensors()),
    "speculators, older": (
        {key: value for key, value in SPECULATORS.items() if key not in FIELDS_OF_DOMINO},
        tensors(),
    ),
    "speculators of Llama": (
        {**SPECULATORS, "transformer_layer_config": {**LAYERS, "model_type": "llama"}},
        tensors(),
    ),
    "speculators, windows": (
        {**SPECULATORS, "transformer_layer_config": {**LAYERS, **WINDOWED}},
        tensors(),
    ),
    "speculators, windows that see ahead": (
        {
            **SPECULATORS,
            "transformer_layer_config": {**LAYERS, **WINDOWED},
            "sliding_window_non_causal": True,
        },
        tensors(),
    ),
    "speculators, own ends": (
        SPECULATORS,
        tensors(embed_tokens__weight=(VOCAB_SIZE, HIDDEN_SIZE), lm_head__weight=(VOCAB_SIZE, HIDDEN_SIZE)),
    ),
    "speculators, own ends, capped": (
        {**SPECULATORS, "final_logit_softcapping": 2.0},
        tensors(lm_head__weight=(VOCAB_SIZE, HIDDEN_SIZE)),
    ),
    "DeepSpec": (
        DEEPSPEC,
        tensors(embed_tokens__weight=(VOCAB_SIZE, HIDDEN_SIZE), lm_head__weight=(VOCAB_SIZE, HIDDEN_SIZE)),
    ),
    "speculators, frequent tokens": ({**SPECULATORS, "draft_vocab_size": NUM_DRAFTED}, CUT),
    "speculators, the pending token guesses too": ({**SPECULATORS, "sample_from_anchor": True}, tensors()),
}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt() * weight


def rotate(x: Tensor, positions: Tensor, *, neighbours: bool = False) -> Tensor:
    """x: [num_rows, heads, HEAD_DIM]; places i and i + HEAD_DIM / 2 turn by position * theta ** (-2 i / HEAD_DIM).

    neighbours: 2 i and 2 i + 1 do.
    """
    if neighbours:
        apart = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
        return torch.stack(rotate(apart, positions).chunk(2, dim=-1), dim=-1).flatten(-2)
    frequencies = 1 / 5000.0 ** (torch.arange(0, HEAD_DIM, 2, dtype=torch.float32) / HEAD_DIM)
    angles = (positions.float()[:, None] * frequencies)[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


# Every layout has the same target, and drafts behind the same texts.
exact_copy = cache(in_float64)


@cache
def states_behind(target: Any, token_ids: tuple[int, ...]) -> tuple[Tensor, ...]:
    inputs = torch.tensor([token_ids])
    states: tuple[Tensor, ...] = target.model(inputs, output_hidden_states=True, use_cache=False).hidden_states
    return states


@torch.inference_mode()
def reference_logits(layout: str, target: Any, token_ids: list[int], num_tokens: int, taps: list[int]) -> Tensor:
    """[num_tokens, vocab] behind token_ids, in the target's dtype: the head as its paper and z-lab's code have it."""
    config, weights = LAYOUTS[layout]
    num_silent = 0 if config.get("sample_from_anchor", config is DEEPSPEC) else 1
    rows = reference_rows(config, weights, target, token_ids, num_tokens, taps, num_silent=num_silent)
    logits = rows @ weights.get("lm_head.weight", target.lm_head.weight).to(rows.dtype).T
    if cap := config.get("final_logit_softcapping"):
        logits = torch.tanh(logits / cap) * cap
    return over_all_tokens(logits) if "d2t" in weights else logits


def over_all_tokens(logits: Tensor) -> Tensor:
    everything = torch.full((len(logits), VOCAB_SIZE), float("-inf"), dtype=logits.dtype)
    everything[:, IDS] = logits
    return everything


@torch.inference_mode()
def reference_rows(
    config: dict[str, Any],
    weights: Tensors,
    target: Any,
    token_ids: list[int],
    num_tokens: int,
    taps: list[int],
    *,
    num_silent: int,
    around: Around | None = None,
) -> Tensor:
    """The normed rows of a block that guess, [num_tokens, hidden]; num_silent: rows in front that do not.

    around: what a layer computes around its attention and its MLP, other than these themselves.
    """
    embedding = target.model.embed_tokens.weight
    weights = {name: w.to(embedding.dtype) if w.is_floating_point() else w for name, w in weights.items()}
    states = states_behind(target, tuple(token_ids[:-1]))
    context = torch.cat([states[tap][0] for tap in taps], dim=-1)
    context = norm(context @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    block = torch.tensor([token_ids[-1]] + [MASK] * (num_tokens + num_silent - 1))
    around = around or (lambda own, name, compute, rows: compute(rows))
    scale = config.get("dflash_config", {}).get("input_embedding_scale", 1.0)
    hidden = weights.get("embed_tokens.weight", embedding)[block] * scale
    num_context, num_rows = len(context), len(block)
    positions = torch.arange(num_context + num_rows)
    queries = positions[num_context:]
    told = config.get("transformer_layer_config", config)
    turns_neighbours = not (config.get("rope_is_neox_style", True) and config.get("is_neox_style", True))
    for layer in range(NUM_HEAD_LAYERS):
        own = {name.split(".", 2)[2]: w for name, w in weights.items() if name.startswith(f"layers.{layer}.")}

        def project(x: Tensor, name: str, own: Tensors = own) -> Tensor:
            y = x @ own[f"self_attn.{name}.weight"].T
            return y + own[f"self_attn.{name}.bias"] if f"self_attn.{name}.bias" in own else y

        distance = queries[:, None] - positions
        has_window = told.get("layer_types", ["full_attention"] * 2)[layer] == "sliding_attention"
        has_window = has_window or config.get("dflash_config", {}).get("use_swa", False)
        sees_ahead = config.get("is_causal", config.get("dflash_config", {}).get("causal"))
        sees_ahead = not has_window if sees_ahead is None else not sees_ahead
        if "sliding_window_non_causal" in config:
            sees_ahead = not has_window or config["sliding_window_non_causal"]
        visible = torch.ones_like(distance, dtype=torch.bool) if sees_ahead else distance >= 0
        if has_window:
            visible = visible & (distance.abs() < WINDOW)

        def attend(normed: Tensor, own: Tensors = own, visible: Tensor = visible, project: Any = project) -> Tensor:
            both = torch.cat((context, normed))  # the context is not normed by the layer
            q = project(normed, "q_proj").view(num_rows, NUM_HEADS, HEAD_DIM)
            k = project(both, "k_proj").view(-1, NUM_KV_HEADS, HEAD_DIM)
            v = project(both, "v_proj").view(-1, NUM_KV_HEADS, HEAD_DIM)
            q = rotate(norm(q, own["self_attn.q_norm.weight"]), queries, neighbours=turns_neighbours)
            k = rotate(norm(k, own["self_attn.k_norm.weight"]), positions, neighbours=turns_neighbours)
            k, v = (x.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
            scores = scores.masked_fill(~visible, float("-inf"))
            if (sinks := own.get("self_attn.attention_sink_bias")) is not None:  # a key that yields nothing
                scores = torch.cat((scores, sinks[:, None, None].expand(-1, num_rows, 1)), dim=-1)
            weight = scores.softmax(dim=-1)[..., : len(positions)]
            attended: Tensor = project(torch.einsum("hqk,khd->qhd", weight, v).flatten(1), "o_proj")
            return attended

        def mlp(normed: Tensor, own: Tensors = own) -> Tensor:
            gate = normed @ own["mlp.gate_proj.weight"].T
            up = normed @ own["mlp.up_proj.weight"].T
            return (gate * torch.sigmoid(gate) * up) @ own["mlp.down_proj.weight"].T

        hidden = hidden + around(own, "attention", attend, norm(hidden, own["input_layernorm.weight"]))
        hidden = hidden + around(own, "mlp", mlp, norm(hidden, own["post_attention_layernorm.weight"]))
    return norm(hidden[num_silent:], weights["norm.weight"])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return save_target(tmp_path_factory.mktemp("target"))


def save_head(directory: Path, config: dict[str, Any], head: Tensors) -> str:
    from safetensors.torch import save_file

    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(head, directory / "model.safetensors")
    return str(directory)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_pass_has_the_logits_of_a_rewrite(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """From its own cache: the context in chunks, after every way to accept, after preemption, over blocks' scratch."""
    method = {"method": "dflash", "model": save_head(tmp_path / "head", *LAYOUTS[layout]), "num_speculative_tokens": 5}
    check_passes(target, monkeypatch, layout, method, taps=[1, 2])


def test_the_taps_of_the_method_override_those_of_the_checkpoint(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = {
        "method": "dflash",
        "model": save_head(tmp_path / "head", *LAYOUTS["z-lab"]),
        "num_speculative_tokens": 5,
        "aux_hidden_state_layer_ids": [2, 0],
    }
    check_passes(target, monkeypatch, "z-lab", method, taps=[2, 0])


def check_passes(
    target: Target, monkeypatch: pytest.MonkeyPatch, layout: str, method: dict[str, Any], taps: list[int]
) -> None:
    passes, _ = passes_of_a_run(target, monkeypatch, method)
    assert len(passes) > 20 and {1, 5} < {len(one.drafted) for one in passes}
    exact_model = exact_copy(target.model)
    theirs = [reference_logits(layout, target.model, one.token_ids, len(one.drafted), taps) for one in passes]
    with KeepFloat64():
        exact = [reference_logits(layout, exact_model, one.token_ids, len(one.drafted), taps) for one in passes]
    ours, is_drafted = torch.cat([one.logits for one in passes]), torch.cat(exact).isfinite()
    assert_as_accurate(ours[is_drafted], torch.cat(theirs)[is_drafted], torch.cat(exact)[is_drafted])
    assert is_drafted.all() or (ours.softmax(dim=1)[~is_drafted] == 0).all()
    assert [one.drafted for one in passes] == [logits.argmax(dim=-1).tolist() for logits in exact]


@pytest.mark.parametrize(("layout", "most"), [("z-lab", 5), ("speculators, the pending token guesses too", 6)])
def test_more_tokens_than_a_block_holds_are_not_drafted_and_a_note_says_so(
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    layout: str,
    most: int,
) -> None:
    head = save_head(tmp_path / "head", *LAYOUTS[layout])
    with caplog.at_level(logging.WARNING):
        passes, _ = passes_of_a_run(
            target,
            monkeypatch,
            {"method": "dflash", "model": head, "num_speculative_tokens": 9},
            max_num_batched_tokens=41,
        )
    assert max(len(one.drafted) for one in passes) == most
    assert f"9 tokens are asked of {head}, whose block holds {most} drafts" in caplog.text


def test_texts_longer_than_max_model_len_get_no_drafts(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = save_head(tmp_path / "head", *LAYOUTS["z-lab"])
    method = {"method": "dflash", "model": head, "num_speculative_tokens": 5, "max_model_len": 41}
    passes, _ = passes_of_a_run(target, monkeypatch, method)
    assert max(len(one.token_ids) + len(one.drafted) for one in passes) == 41


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda values: {key: value for key, value in values.items() if key != name}


def with_(**added: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda values: {**values, **{key.replace("__", "."): value for key, value in added.items()}}


OTHERS = {"dflash_config": {"num_target_layers": 28}}


def inside(**added: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda values: {**values, "dflash_config": {**values["dflash_config"], **added}}


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("z-lab", with_(hidden_size=64), "made for .*, got hidden_size 64 for 32"),
        ("z-lab", with_(vocab_size=50, num_target_layers=28), "vocabulary 50 for 48 and layers of the target 28 for 3"),
        ("DeepSpec", lambda values: without("num_target_layers")(values) | OTHERS, "layers of the target 28 for 3"),
        ("speculators", with_(target_hidden_size=64), "got hidden_size 64 for 32"),
        ("z-lab", inside(target_layer_ids=[1, 3]), r"hidden states \[2, 4\], which must lie in \[0, 3\]"),
        ("z-lab", inside(target_layer_ids=None), "target_layer_ids must be a list of whole numbers, got None"),
        ("z-lab", with_(layer_types=["sliding_attention"] * 2), "sliding_window in its config must be a whole number"),
        ("z-lab", with_(logit_scale=0.5), r"logit_scale=0.5 \(logits of another scale"),
        ("z-lab", with_(is_neox_style="false"), "is_neox_style in its config must be true or false, got 'false'; mend"),
        ("z-lab", with_(swa_rope_theta=1e4), r"got swa_rope_theta=10000\.0 \(another base of rotations in windows"),
        ("DeepSpec", with_(sample_from_anchor=True, dspark_bonus_anchor=True), "must not be the same, got True twice"),
        ("z-lab", inside(use_aux_hidden_state=False), r"use_aux_hidden_state=False \(a context of one"),
        ("speculators", without("aux_hidden_state_layer_ids"), "aux_hidden_state_layer_ids must be a list of whole"),
        ("z-lab", inside(mask_token_id=None), "must name the mask token"),
        ("z-lab", with_(block_size=1), "block_size must be a whole number >= 2, got 1"),
        ("z-lab", inside(conv_kernel_size=2, selector_rank=8), r"conv_kernel_size=2 \(DFlash 2\), selector_rank=8"),
        ("z-lab", with_(markov_rank=256), r"must be a plain DFlash head, got markov_rank=256 \(DSpark\)"),
        ("z-lab", inside(projector_type="lilicorr"), "got projector_type='lilicorr'"),
        ("speculators", with_(projector_type="domino"), "got projector_type='domino'"),
        ("speculators", with_(speculators_model_type="dspark"), "got speculators_model_type='dspark'"),
        ("z-lab", inside(final_logit_softcapping=20.0), r"must be that of .*, None, whose .* uses, got 20.0; choose"),
        ("z-lab", with_(final_logit_softcapping="x"), "final_logit_softcapping in its config must be a number >= 0"),
        ("DeepSpec", without("block_size"), "block_size must be a whole number >= 1, got None"),
        ("DeepSpec", without("target_layer_ids"), "target_layer_ids must be a list of whole numbers, got None"),
        ("z-lab", with_(hidden_act="gelu"), "must be like Llama's, with hidden_act 'silu'"),
    ],
)  # fmt: skip
def test_a_config_that_is_not_this_targets_dflash_is_one_message(
    target: Target, tmp_path: Path, layout: str, change: Callable[[dict[str, Any]], dict[str, Any]], message: str
) -> None:
    config, head = LAYOUTS[layout]
    with pytest.raises(UserError, match=message) as caught:
        read(target, save_head(tmp_path / "head", change(config), head))
    assert "; " in str(caught.value)


@pytest.mark.parametrize(
    ("added", "told"),
    [
        ({"partial_rotary_factor": 0.5}, "0.5"),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "0.5"),
        ({"partial_rotary_factor": [0.5]}, "[0.5]"),  # a traceback, though nothing reads it
    ],
)
def test_a_part_of_heads_to_turn_is_told_not_to_be_read(
    target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture, added: dict[str, Any], told: str
) -> None:
    config, head = LAYOUTS["z-lab"]
    read(target, save_head(tmp_path / "plain", config, head))
    assert "partial_rotary_factor" not in caplog.text
    read(target, save_head(tmp_path / "head", {**config, **added}, head))
    assert f"partial_rotary_factor={told} is not read" in caplog.text


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("z-lab", without("layers.1.self_attn.k_norm.weight"), r"missing: layers\.1\.self_attn\.k_norm\.weight;"),
        ("z-lab", without("fc.weight"), r"missing: fc\.weight;"),
        ("z-lab", with_(surplus=torch.zeros(1)), "unexpected: surplus;"),
        ("z-lab", with_(fc__weight=torch.zeros(32, 96)), r"another shape: fc\.weight \[32, 96\] for \[32, 64\]"),
        ("speculators, frequent tokens", without("d2t"), "missing: d2t"),
        ("speculators, frequent tokens", without("lm_head.weight"), "missing: lm_head.weight"),
        ("speculators, frequent tokens", with_(d2t=VOCABULARY["d2t"] + 40), "d2t must lead each token .* to a token"),
        ("speculators, frequent tokens", with_(t2d=torch.ones(VOCAB_SIZE).bool()), "t2d must mark the tokens .* 48 "),
    ],
)  # fmt: skip
def test_tensors_that_are_not_this_heads_are_one_message(
    target: Target, tmp_path: Path, layout: str, change: Callable[[Tensors], Tensors], message: str
) -> None:
    config, head = LAYOUTS[layout]
    with pytest.raises(UserError, match=message) as caught:
        read(target, save_head(tmp_path / "head", config, change(head)))
    assert str(caught.value).startswith("method.model=") and "; " in str(caught.value)


def test_a_mask_embedding_beside_the_weights_is_refused(target: Target, tmp_path: Path) -> None:
    head = save_head(tmp_path / "head", *LAYOUTS["z-lab"])
    torch.save(torch.zeros(HIDDEN_SIZE), tmp_path / "head" / "mask_embedding.pt")
    with pytest.raises(UserError, match=r"got a mask_embedding\.pt beside its weights, .*; choose a head without one"):
        read(target, head)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, (1, 2)),
        ({"target_layer_ids": [0, 1]}, (1, 2)),
        ({"dspark_target_layer_ids": [0, 1]}, (1, 2)),
        ({"dflash_config": {"layer_ids": [0, 1]}}, (0, 1)),
        ({}, (2, 10, 18, 26, 34)),  # z-lab's Qwen3-8B head names these very layers
        ({"transformer_layer_config": {}, "aux_hidden_state_layer_ids": [0, 1]}, (0, 1)),
    ],
)
def test_hidden_states_are_found_where_published_configs_name_them(
    keys: dict[str, Any], expected: tuple[int, ...]
) -> None:
    spread = spread_layer_ids(num_target_layers=36, num_layers=5)
    assert tap_layers(ModelSource(model="a-head"), keys, spread) == expected


def read(target: Target, head: str) -> None:
    load_dflash_head(ModelSource(model=head, name="method.model"), context_of(target), None, None)
