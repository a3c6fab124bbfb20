"""IBM's MLP speculator: the accelerators' layout read as it is, logits and drafts those of an independent rewrite."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.last_state_reference import (
    HIDDEN_SIZE,
    VOCAB_SIZE,
    Read,
    Target,
    assert_drafted_by,
    assert_refused,
    changed,
    logits_of,
    random_tensors,
    reader,
    rms_normed,
    save_head,
    save_target,
    states_and_tokens,
    with_,
    without,
)
from tests.transformers_reference import assert_as_accurate

NUM_STEPS, INNER_SIZE = 3, 24
FILE = "model.safetensors"


def config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": HIDDEN_SIZE,
        "inner_dim": INNER_SIZE,
        "n_predict": NUM_STEPS,
        "n_candidates": 5,
        "top_k_tokens_per_head": [4, 3, 2],
        "vocab_size": VOCAB_SIZE,
        "tie_weights": False,
        "scale_input": False,
        **changes,
    }


def all_tensors(inner_size: int = INNER_SIZE) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for step in range(NUM_STEPS):
        shapes |= {
            f"speculator.emb.{step}.weight": (VOCAB_SIZE, inner_size),
            f"speculator.proj.{step}.weight": (inner_size, inner_size if step else HIDDEN_SIZE),
            f"speculator.head.{step}.weight": (VOCAB_SIZE, inner_size),
            f"speculator.ln.{step}.weight": (inner_size,),
            f"speculator.ln.{step}.bias": (inner_size,),
        }
    return random_tensors(shapes, std=0.5)


def tied_tensors(*, has_copies: bool) -> dict[str, Tensor]:
    """As a tied module's state dict has them, or as safetensors keeps them: each tensor under its first name."""
    tensors = all_tensors()
    for name in list(tensors):
        _, part, step, kind = name.split(".")
        first = min(int(step), 1) if part == "proj" else 0
        if int(step) != first:
            if has_copies:
                tensors[name] = tensors[f"speculator.{part}.{first}.{kind}"].clone()
            else:
                del tensors[name]
    return tensors


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Tensor], str]] = {
    "each step its own": (config(), all_tensors(), FILE),
    "scaled input": (config(scale_input=True), all_tensors(), FILE),
    "as wide as the target": (config(inner_dim=0), all_tensors(HIDDEN_SIZE), FILE),
    "tied": (config(tie_weights=True, scale_input=True), tied_tensors(has_copies=False), FILE),
    "tied, all names": (config(tie_weights=True), tied_tensors(has_copies=True), "pytorch_model.bin"),
}


def reference_logits(layout: str, state: Tensor, tokens: list[Tensor]) -> list[Tensor]:
    """Logits [num_rows, vocab] of the steps over states [num_rows, hidden]; step i reads tokens[i] [num_rows]."""
    values, tensors, _ = LAYOUTS[layout]
    width = values["inner_dim"] or HIDDEN_SIZE
    state_weight = 0.5 ** (0.5 / NUM_STEPS)
    emb_weight = math.sqrt((1 - state_weight**2) * (width / 2))

    def weight(part: str, step: int, kind: str = "weight") -> Tensor:
        name = f"speculator.{part}.{step}.{kind}"
        if name not in tensors:  # tied
            name = f"speculator.{part}.{min(step, 1) if part == 'proj' else 0}.{kind}"
        return tensors[name].to(state.dtype)

    if values["scale_input"]:
        state = rms_normed(state) / 2**0.5
    logits = []
    for step, previous in enumerate(tokens):
        mixed = state @ weight("proj", step).T + emb_weight / state_weight * weight("emb", step)[previous]
        mixed = rms_normed(mixed) * weight("ln", step) + weight("ln", step, "bias")
        state = 0.5 * mixed * (1 + torch.erf(mixed / 2**0.5))
        logits.append(state @ weight("head", step).T)
    return logits


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def read(target: Target, tmp_path: Path) -> Read:
    return reader(target, tmp_path / "head")


@pytest.mark.parametrize("tile", [None, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_as_accurate_as_a_rewrites(read: Read, layout: str, tile: int | None) -> None:
    states, tokens = states_and_tokens(NUM_STEPS)
    theirs, exact = (reference_logits(layout, own, tokens) for own in (states, states.double()))
    for ours, their, should in zip(logits_of(read(*LAYOUTS[layout]), states, tokens, tile), theirs, exact, strict=True):
        assert_as_accurate(ours, their, should)


@pytest.mark.parametrize("layout", ["scaled input", "tied"])
def test_every_step_drafts_what_the_recurrence_says_from_the_last_state_and_token(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    directory = save_head(tmp_path / "head", *LAYOUTS[layout])
    method = {"method": "mlp_speculator", "model": str(directory), "num_speculative_tokens": 5}
    assert_drafted_by(partial(reference_logits, layout), target, monkeypatch, method)


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("each step its own", without("speculator.ln.1.bias"), r"missing: speculator\.ln\.1\.bias"),
        ("each step its own", with_("speculator.ln0.weight", (32,)), r"unexpected: speculator\.ln0\.weight"),
        ("each step its own", with_("speculator.head.0.weight", (48, 8)), r"another shape: .*\[48, 8\] for \[48, 24\]"),
        ("each step its own", changed(n_predict=2), r"unexpected: speculator\.emb\.2\.weight.* and 1 more"),
        ("each step its own", changed(emb_dim=64), "made for .*, got hidden_size 64 for 32"),
        ("each step its own", changed(vocab_size=49, emb_dim=8), "got hidden_size 8 for 32 and vocabulary 49 for 48"),
        ("each step its own", changed(tie_weights=True), r"says tie_weights, and speculator\.emb\.1\.weight differs"),
        ("tied", without("speculator.proj.1.weight"), r"missing: speculator\.proj\.1\.weight"),
        ("tied", changed(n_predict=0), "n_predict in its config must be a whole number >= 1, got 0"),
        ("tied", changed(architectures=["MedusaModel"]), "of MLPSpeculatorPreTrainedModel, .*, got MedusaModel; name"),
    ],
)  # fmt: skip
def test_what_is_not_this_targets_speculator_is_one_message(
    read: Read, layout: str, change: Callable[..., Any], message: str
) -> None:
    values, tensors, file = LAYOUTS[layout]
    assert_refused(read, change(values, tensors), file, message)
