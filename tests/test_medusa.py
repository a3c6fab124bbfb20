"""Medusa's heads: every published layout read as it is, logits and drafts those of an independent rewrite."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from proposers.heads.medusa import MedusaHeads, load_medusa_heads
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from tests.conftest import Engines, complete
from tests.last_state_reference import (
    HIDDEN_SIZE,
    VOCAB_SIZE,
    Target,
    drafts_of_a_run,
    random_tensors,
    save_head,
    save_target,
)
from tests.test_losslessness import PARAMS, PROMPTS, ROOMY, method_config
from tests.transformers_reference import CPU, assert_as_accurate, load

NUM_HEADS, NUM_LAYERS = 3, 2
NUM_MAPPED = 20
TOKEN_MAP = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))[:NUM_MAPPED]
SQUARE, PROJECTION, SHORT_PROJECTION = (HIDDEN_SIZE, HIDDEN_SIZE), (VOCAB_SIZE, HIDDEN_SIZE), (NUM_MAPPED, HIDDEN_SIZE)
PUBLISHED = {"medusa_num_heads": 2, "medusa_num_layers": NUM_LAYERS, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
VLLM = {
    "model_type": "medusa",
    "hidden_size": HIDDEN_SIZE,
    "vocab_size": VOCAB_SIZE,
    "num_heads": NUM_HEADS,
    "num_hidden_layers": NUM_LAYERS,
}


def published_tensors(
    *, prefix: str = "", num_layers: int = NUM_LAYERS, has_projections: bool = True
) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(NUM_HEADS):
        for layer in range(num_layers):
            shapes[f"{prefix}{head}.{layer}.linear.weight"] = SQUARE
            shapes[f"{prefix}{head}.{layer}.linear.bias"] = (HIDDEN_SIZE,)
        if has_projections:
            shapes[f"{prefix}{head}.{num_layers}.weight"] = PROJECTION
    return random_tensors(shapes)


def vllm_tensors(
    *, num_projections: int = NUM_HEADS, has_bias: bool = False, is_cut: bool = False
) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(NUM_HEADS):
        for layer in range(NUM_LAYERS):
            shapes[f"blocks.{head}.layers.{layer}.weight"] = SQUARE
            if has_bias:
                shapes[f"blocks.{head}.layers.{layer}.bias"] = (HIDDEN_SIZE,)
    shapes |= {f"lm_heads.{head}.weight": SHORT_PROJECTION if is_cut else PROJECTION for head in range(num_projections)}
    return random_tensors(shapes)


MAPPED = {**VLLM, "truncated_vocab_size": NUM_MAPPED}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Tensor], str]] = {
    "FasterDecoding": (PUBLISHED, published_tensors(), "medusa_lm_head.pt"),
    "FasterDecoding, safetensors": (PUBLISHED, published_tensors(), "medusa_lm_head.safetensors"),
    "FasterDecoding, named from the model": (PUBLISHED, published_tensors(prefix="medusa_head."), "model.safetensors"),
    "version 2": (
        {**PUBLISHED, "medusa_num_heads": 4, "version": "2"},
        published_tensors(has_projections=False),
        "medusa_lm_head.pt",
    ),
    "FasterDecoding, projections alone": (
        {**PUBLISHED, "medusa_num_layers": 0},
        published_tensors(num_layers=0),
        "medusa_lm_head.pt",
    ),
    "vLLM": (VLLM, vllm_tensors(), "model.safetensors"),
    "vLLM, biases and a scale": (
        {**VLLM, "medusa_fc_bias": True, "logit_scale": 0.5},
        vllm_tensors(has_bias=True),
        "pytorch_model.bin",
    ),
    "vLLM, one projection": (
        {**VLLM, "original_lm_head": True},
        vllm_tensors(num_projections=1),
        "model.safetensors",
    ),
    "vLLM, frequent tokens": (MAPPED, {**vllm_tensors(is_cut=True), "token_map": TOKEN_MAP}, "model.safetensors"),
    "vLLM, frequent tokens of whole projections": (
        MAPPED,
        {**vllm_tensors(), "token_map": TOKEN_MAP},
        "model.safetensors",
    ),
    "vLLM, a token map of all tokens": (VLLM, {**vllm_tensors(), "token_map": TOKEN_MAP}, "model.safetensors"),
}


def reference_logits(layout: str, head: int, states: Tensor, target_head: Tensor) -> Tensor:
    """Head `head` of a layout over states [num_rows, hidden], in their dtype; -inf where a token is never drafted."""
    config, tensors, _ = LAYOUTS[layout]
    tensors = {name.removeprefix("medusa_head."): tensor.to(states.dtype) for name, tensor in tensors.items()}
    num_layers = config.get("medusa_num_layers", NUM_LAYERS)
    for layer in range(num_layers):
        of_layer = [
            name for name in tensors if re.fullmatch(rf"(blocks\.)?{head}\.(layers\.)?{layer}\.(\w+\.)?\w+", name)
        ]
        (weight,) = [tensors[name] for name in of_layer if name.endswith("weight")]
        inner = states @ weight.T
        for name in of_layer:
            inner = inner + tensors[name] if name.endswith("bias") else inner
        states = states + inner * torch.sigmoid(inner)
    names = (f"{head}.{num_layers}.weight", f"lm_heads.{head}.weight", "lm_heads.0.weight")
    projection = next((tensors[name] for name in names if name in tensors), target_head.to(states.dtype))
    scale = config.get("logit_scale", 1.0)
    if "truncated_vocab_size" not in config:
        return states @ projection.T * scale
    projection = projection[TOKEN_MAP] if len(projection) == VOCAB_SIZE else projection
    logits = torch.full((len(states), VOCAB_SIZE), float("-inf"), dtype=states.dtype)
    logits[:, TOKEN_MAP] = states @ projection.T * scale
    return logits


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def read(target: Target, tmp_path: Path) -> Callable[..., MedusaHeads]:
    """Saves heads and reads them for the target."""

    def save_and_read(config: dict[str, Any], tensors: dict[str, Tensor], file: str) -> MedusaHeads:
        source = ModelSource(model=str(save_head(tmp_path / "head", config, tensors, file)), name="method.model")
        loaded = load(ModelSource(model=str(target.directory)))
        return load_medusa_heads(source, loaded, device=CPU, dtype=torch.float32)

    return save_and_read


@pytest.mark.parametrize("tile", [None, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_as_accurate_as_a_rewrites(
    read: Callable[..., MedusaHeads], target: Target, layout: str, tile: int | None
) -> None:
    heads = read(*LAYOUTS[layout])
    assert heads.shape.num_heads == NUM_HEADS, "counted in the file, for configs lie"
    states = torch.randn(10, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
    target_head = target.model.lm_head.weight.detach()
    for head in range(NUM_HEADS):
        ours = heads.logits(states, head, tile)
        theirs, exact = (reference_logits(layout, head, s, target_head) for s in (states, states.double()))
        is_drafted = exact.isfinite()
        assert ours.dtype == torch.float32 and ours.shape == (10, VOCAB_SIZE)
        assert_as_accurate(ours[is_drafted], theirs[is_drafted], exact[is_drafted])
        assert is_drafted.all() or (ours.softmax(dim=1)[~is_drafted] == 0).all()


@pytest.mark.parametrize("layout", ["FasterDecoding", "version 2", "vLLM, frequent tokens"])
def test_every_step_drafts_what_the_heads_guess_from_the_state_before_the_last_token(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """Head d guesses the token d + 1 places behind the last one: x_{n-1} is the guess of the target's own head."""
    directory = save_head(tmp_path / "head", *LAYOUTS[layout])
    method = {"method": "medusa", "model": str(directory), "num_speculative_tokens": NUM_HEADS}
    drafts = [draft for draft in drafts_of_a_run(target, monkeypatch, method) if draft.drafted]
    assert len(drafts) > 20 and {len(draft.drafted) for draft in drafts} == {1, 2, 3}
    target_head = target.model.lm_head.weight.detach()
    for draft in drafts:
        state = target.exact_state(draft.token_ids[:-1])[None]
        exact = [reference_logits(layout, head, state, target_head).argmax().item() for head in range(NUM_HEADS)]
        assert draft.drafted == exact[: len(draft.drafted)]


def test_more_tokens_than_heads_are_not_drafted_and_a_note_says_so(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = save_head(tmp_path / "head", *LAYOUTS["FasterDecoding"])
    method = {"method": "medusa", "model": str(directory), "num_speculative_tokens": 6}
    with caplog.at_level(logging.WARNING):
        drafts = drafts_of_a_run(target, monkeypatch, method)
    assert max(len(draft.drafted) for draft in drafts) == NUM_HEADS
    assert f"6 tokens are asked of {directory}, which guesses 3 ahead" in caplog.text


def test_texts_longer_than_max_model_len_get_no_drafts(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_head(tmp_path / "head", *LAYOUTS["FasterDecoding"])
    method = {"method": "medusa", "model": str(directory), "num_speculative_tokens": 3, "max_model_len": 16}
    drafts = drafts_of_a_run(target, monkeypatch, method)
    assert all(len(draft.token_ids) + len(draft.drafted) <= 16 for draft in drafts if draft.drafted)
    assert any(draft.drafted for draft in drafts) and any(len(draft.token_ids) > 16 for draft in drafts)


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {other: tensor for other, tensor in tensors.items() if other != name}


def with_(**added: Tensor) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {**tensors, **added}


def narrowed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor[..., :16] if "bias" not in name else tensor[:16] for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("FasterDecoding", without("1.1.linear.bias"), r"missing: 1\.1\.linear\.bias"),
        ("FasterDecoding", without("2.2.weight"), r"missing: 2\.2\.weight"),
        ("FasterDecoding", with_(surplus=torch.zeros(1)), "unexpected: surplus"),
        ("FasterDecoding", with_(**{"1.0.linear.weight": torch.zeros(32, 31)}), r"another shape: .*\[32, 31\] for \["),
        ("FasterDecoding", narrowed, "made for .*, got hidden_size 16 for 32"),
        ("FasterDecoding", with_(**{"0.2.weight": torch.zeros(50, 32)}), "made for .*, got vocabulary 50 for 48"),
        ("FasterDecoding", lambda _: {"midlayer.weight": torch.zeros(1)}, "must hold Medusa heads .*midlayer.weight"),
        ("vLLM", without("blocks.1.layers.0.weight"), r"missing: blocks\.1\.layers\.0\.weight"),
        ("vLLM, frequent tokens", without("token_map"), "missing: token_map"),
        ("vLLM, frequent tokens", with_(token_map=TOKEN_MAP + VOCAB_SIZE), r"token_map must hold tokens in \[0, 47\]"),
        ("vLLM, frequent tokens", with_(token_map=TOKEN_MAP[:7]), r"another shape: .*token_map \[7\] for \[20\]"),
    ],
)  # fmt: skip
def test_tensors_that_are_not_this_targets_heads_are_one_message(
    read: Callable[..., MedusaHeads],
    layout: str,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    message: str,
) -> None:
    config, tensors, file = LAYOUTS[layout]
    with pytest.raises(UserError, match=message) as caught:
        read(config, change(tensors), file)
    assert str(caught.value).startswith("method.model=") and "; " in str(caught.value)


@pytest.mark.parametrize("value", [-1, "5", None, True])
def test_a_config_without_a_number_of_layers_is_one_message(read: Callable[..., MedusaHeads], value: Any) -> None:
    _, tensors, file = LAYOUTS["FasterDecoding"]
    with pytest.raises(UserError, match=r"medusa_num_layers in its config must be a whole number >= 0, got "):
        read({**PUBLISHED, "medusa_num_layers": value}, tensors, file)


@pytest.mark.parametrize("value", ["0.5", [1], {"a": 1}, -1, True])
def test_a_scale_that_is_no_number_is_one_message(read: Callable[..., MedusaHeads], value: Any) -> None:
    """It ended in a traceback of float(), or was taken for the number that Python makes of it."""
    config, tensors, file = LAYOUTS["vLLM"]
    with pytest.raises(UserError, match=r"logit_scale in its config must be a number >= 0, got "):
        read({**config, "logit_scale": value}, tensors, file)


def test_a_request_that_never_drafts_is_not_remembered_and_none_is_when_all_are_done(engines: Engines) -> None:
    llm = engines(method_config("medusa", 4), **ROOMY)
    proposer: Any = llm.engine.proposer
    remembered: list[set[str]] = []
    update = proposer.update

    def watching(*args: Any) -> None:
        update(*args)
        remembered.append(set(proposer._states))

    proposer.update = watching
    try:
        params = [*PARAMS[:2], *(p.__class__(temperature=0.0, speculative_sampling=False) for p in PARAMS[:2])]
        complete(llm, PROMPTS[:4], params)
    finally:
        del proposer.update
    assert set.union(*remembered) == {"0", "1"}
    assert proposer._states == {}
