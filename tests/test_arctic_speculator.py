"""Arctic's speculators: each published layout read as it is, logits and drafts those of an independent rewrite.

The rewrite follows the trainer: a gate after another, a layer after another, where ours multiplies all gates at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.quantized_weight import QuantizedWeight
from proposers.heads.quantized import quantize_head
from runner.engine.checkpoint import ModelSource
from runner.engine.sampling_params import SamplingParams
from tests.conftest import Engines, complete
from tests.emulated_device import EmulatedDevice
from tests.heads_for_tests import HEADS
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
from tests.test_whole_steps import Traffic, play
from tests.transformers_reference import CPU, assert_as_accurate

NUM_STEPS, WIDTH, LAST_WIDTH = 3, 24, 16
PICKLE, FILE = "pytorch_model.bin", "model.safetensors"
GATES = ("forget", "input", "output", "cell")


def lstm_config(**changes: Any) -> dict[str, Any]:
    """As the published ones, which have 4096 for every width."""
    return {
        "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
        "base_model_archs": ["LlamaForCausalLM"],
        "model_type": "mlp_speculator",
        "method": "sum_lstm",
        "input_hidden_dim": HIDDEN_SIZE,
        **dict.fromkeys(("inner_dim", "proj_dim", "emb_dim"), str(WIDTH)),
        "n_predict": NUM_STEPS,
        "n_candidates": NUM_STEPS,
        "top_k_tokens_per_head": [1] * NUM_STEPS,
        "vocab_size": VOCAB_SIZE,
        "scale_input": True,
        "tie_weights": True,
        "tie_lstm_embs": True,
        **changes,
    }


def rnn_config(**changes: Any) -> dict[str, Any]:
    own = {"method": "sum_rnn", "scale_input": False, "tie_lstm_embs": False}
    return lstm_config(**{**own, **changes})


def mlp_config(**changes: Any) -> dict[str, Any]:
    common = {
        key: lstm_config()[key] for key in ("model_type", "n_predict", "vocab_size", "scale_input", "tie_weights")
    }
    sizes = {"emb_dim": HIDDEN_SIZE, "inner_dim": WIDTH}
    return {"architectures": ["ArcticMLPSpeculatorPreTrainedModel"], **common, **sizes, **changes}


def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def lstm_tensors(*, ties_gates: bool) -> dict[str, Tensor]:
    """Under all names that the trainer's module has: shared tensors too."""
    shapes: dict[str, tuple[int, ...]] = {**norm("cell_ln.0", WIDTH), **norm("state_ln.0", WIDTH)}
    shapes |= {f"{gate}_emb.0.weight": (VOCAB_SIZE, WIDTH) for gate in GATES}
    for step, size in enumerate((HIDDEN_SIZE, WIDTH)):
        shapes |= {f"{gate}_proj.{step}.weight": (WIDTH, size) for gate in GATES}
    tensors = random_tensors({**shapes, "head.0.weight": (VOCAB_SIZE, WIDTH)}, std=0.5)
    if ties_gates:
        tensors |= {f"{gate}_emb.0.weight": tensors["forget_emb.0.weight"].clone() for gate in GATES}
    return tensors | {f"head.{step}.weight": tensors["head.0.weight"].clone() for step in (1, 2)}


def flat_rnn_tensors() -> dict[str, Tensor]:
    """A layer of each kind, each step its own; they are sequences all the same."""
    shapes: dict[str, tuple[int, ...]] = {}
    for step in range(NUM_STEPS):
        shapes |= norm(f"ln.{step}.0", WIDTH) | {
            f"emb.{step}.0.weight": (VOCAB_SIZE, WIDTH),
            f"proj.{step}.0.weight": (WIDTH, WIDTH if step else HIDDEN_SIZE),
            f"head.{step}.weight": (VOCAB_SIZE, WIDTH),
        }
    return random_tensors(shapes, std=0.5)


def deep_rnn_tensors() -> dict[str, Tensor]:
    """Two layers for a token, three for the state, two behind their sum; tied, each tensor once."""
    shapes: dict[str, tuple[int, ...]] = {
        **norm("emb.0.1", WIDTH),
        **norm("ln.0.0", WIDTH),
        **norm("ln.0.3", LAST_WIDTH),
        "emb.0.0.weight": (VOCAB_SIZE, WIDTH),
        "emb.0.3.weight": (WIDTH, WIDTH),
        "ln.0.2.weight": (LAST_WIDTH, WIDTH),
        "head.0.weight": (VOCAB_SIZE, LAST_WIDTH),
    }
    for step, size in enumerate((HIDDEN_SIZE, LAST_WIDTH)):
        shapes |= {**norm(f"proj.{step}.1", WIDTH), **norm(f"proj.{step}.4", WIDTH)}
        shapes |= {f"proj.{step}.{place}.weight": (WIDTH, WIDTH) for place in (3, 6)}
        shapes[f"proj.{step}.0.weight"] = (WIDTH, size)
    return random_tensors(shapes, std=0.5)


def mlp_tensors() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        **norm("ln.0", WIDTH),
        **{f"{part}.0.weight": (VOCAB_SIZE, WIDTH) for part in ("emb", "head")},
        **{f"proj.{step}.weight": (WIDTH, WIDTH if step else HIDDEN_SIZE) for step in (0, 1)},
    }
    return random_tensors(shapes, std=0.5)


def prefixed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"speculator.{name}": tensor for name, tensor in tensors.items()}


DEEP = {"emb_dim": "24.24", "proj_dim": "24.24.24", "inner_dim": [WIDTH, LAST_WIDTH]}
VARIANT = {"architectures": ["MLPVariantSpeculatorPreTrainedModel"]}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Tensor], str]] = {
    "lstm": (lstm_config(), lstm_tensors(ties_gates=True), PICKLE),
    "lstm, each gate its embedding": (
        lstm_config(tie_lstm_embs=False, scale_input=False, num_lookahead_tokens=5),
        prefixed(lstm_tensors(ties_gates=False)),
        FILE,
    ),
    "rnn": (rnn_config(tie_weights=False, num_lookahead_tokens=7), flat_rnn_tensors(), FILE),
    "rnn of layers": (rnn_config(**DEEP, **VARIANT, scale_input=True), deep_rnn_tensors(), FILE),
    "mlp": (mlp_config(num_lookahead_tokens=2), mlp_tensors(), FILE),
}
DEPTHS = {"lstm": 3, "lstm, each gate its embedding": 5, "rnn": 3, "rnn of layers": 3, "mlp": 2}


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


class Reference:
    """A recurrence by its published tensors, in the dtype of the states."""

    def __init__(self, layout: str, dtype: torch.dtype) -> None:
        self.config, tensors, _ = LAYOUTS[layout]
        self.tensors = {name.removeprefix("speculator."): tensor.to(dtype) for name, tensor in tensors.items()}
        state_weight = 0.5 ** (0.5 / NUM_STEPS)
        self.alpha = math.sqrt((1 - state_weight**2) * (WIDTH / 2)) / state_weight

    def logits(self, state: Tensor, tokens: list[Tensor]) -> list[Tensor]:
        """[num_rows, vocab] of the steps over states [num_rows, hidden]; step i reads tokens[i] [num_rows]."""
        if self.config["scale_input"]:
            state = rms_normed(state) / 2**0.5
        is_lstm, found = self.config.get("method") == "sum_lstm", []
        cell = state.new_zeros(len(state), WIDTH)
        for step, previous in enumerate(tokens):
            if is_lstm:
                state, cell = self.lstm(state, cell, min(step, 1), previous)
            else:
                state = self.rnn(state, step, previous)
            head = self.tensors[f"head.{0 if self.config['tie_weights'] else step}.weight"]
            found.append(state @ head.T)
        return found

    def lstm(self, state: Tensor, cell: Tensor, step: int, previous: Tensor) -> tuple[Tensor, Tensor]:
        told = {
            gate: state @ self.tensors[f"{gate}_proj.{step}.weight"].T
            + self.alpha * self.tensors[f"{gate}_emb.0.weight"][previous]
            for gate in GATES
        }
        fresh = gelu(self.normed(told["cell"], "cell_ln.0"))
        cell = sigmoid(told["forget"]) * cell + sigmoid(told["input"]) * fresh
        return sigmoid(told["output"]) * gelu(self.normed(cell, "state_ln.0")), cell

    def rnn(self, state: Tensor, step: int, previous: Tensor) -> Tensor:
        own = 0 if self.config["tie_weights"] else step
        projecting = min(step, 1) if self.config["tie_weights"] else step
        is_flat = "method" not in self.config  # no sequences of layers
        told = self.tensors[f"emb.{own}.weight" if is_flat else f"emb.{own}.0.weight"][previous]
        projected = state @ self.tensors[f"proj.{projecting}.weight" if is_flat else f"proj.{projecting}.0.weight"].T
        told = self.through(told, f"emb.{own}", [(1, 3)])
        projected = self.through(projected, f"proj.{projecting}", [(1, 3), (4, 6)])
        state = gelu(self.normed(projected + self.alpha * told, f"ln.{own}" if is_flat else f"ln.{own}.0"))
        if f"ln.{own}.2.weight" in self.tensors:
            state = gelu(self.normed(state @ self.tensors[f"ln.{own}.2.weight"].T, f"ln.{own}.3"))
        return state

    def through(self, x: Tensor, name: str, layers: list[tuple[int, int]]) -> Tensor:
        for normed, product in layers:
            if f"{name}.{product}.weight" in self.tensors:
                x = gelu(self.normed(x, f"{name}.{normed}")) @ self.tensors[f"{name}.{product}.weight"].T
        return x

    def normed(self, x: Tensor, name: str) -> Tensor:
        return rms_normed(x) * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def read(target: Target, tmp_path: Path) -> Read:
    return reader(target, tmp_path / "head")


@pytest.mark.parametrize("tile", [None, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_as_accurate_as_a_rewrites(read: Read, layout: str, tile: int | None) -> None:
    speculator = read(*LAYOUTS[layout])
    assert speculator.max_depth == DEPTHS[layout]
    states, tokens = states_and_tokens(speculator.max_depth)
    theirs, exact = (Reference(layout, own.dtype).logits(own, tokens) for own in (states, states.double()))
    for ours, their, should in zip(logits_of(speculator, states, tokens, tile), theirs, exact, strict=True):
        assert_as_accurate(ours, their, should)


@pytest.mark.parametrize("layout", ["lstm", "rnn of layers"])
def test_every_step_drafts_what_the_recurrence_says_from_the_last_state_and_token(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """Each step begins with an empty cell, whatever was drafted before."""
    directory = save_head(tmp_path / "head", *LAYOUTS[layout])
    method = {"model": str(directory), "num_speculative_tokens": 5}  # its files say which method
    assert_drafted_by(Reference(layout, torch.float64).logits, target, monkeypatch, method)


@pytest.mark.parametrize("layout", ["lstm", "rnn of layers"])
def test_all_that_is_multiplied_by_can_be_held_in_8_bits(read: Read, layout: str) -> None:
    speculator = read(*LAYOUTS[layout])
    states, tokens = states_and_tokens(NUM_STEPS)
    dense = logits_of(speculator, states, tokens, 1)
    quantize_head(speculator, ModelSource(model="m", quantization="int8"), CPU)
    assert all(isinstance(weight, QuantizedWeight) for weight in speculator.product_weights)
    for before, after in zip(dense, logits_of(speculator, states, tokens, 1), strict=True):
        assert 0 < (before - after).abs().max() < 0.1 * before.abs().max()


# --- whole steps ----------------------------------------------------------------------------------------------------

# Lossy: the text is what was drafted, so that equal texts have equal drafts.
ALL_ACCEPTED = {
    "method": "mlp_speculator",
    "num_speculative_tokens": 3,
    "draft_sample_method": "greedy",
    "rejection_sample_method": "typical",
    "posterior_threshold": 1e-4,
}
STRICT = {"rejection_sample_method": "strict", "draft_sample_method": "coupled"}
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)


@pytest.fixture
def of_lstm(monkeypatch: pytest.MonkeyPatch) -> Engines:
    """Engines of targets to whom all tokens are probable; weights of the speculator are random."""

    def config(target: Mapping[str, Any]) -> dict[str, Any]:
        return lstm_config(input_hidden_dim=target["hidden_size"], vocab_size=target["vocab_size"])

    monkeypatch.setitem(HEADS, "mlp_speculator", config)
    return Engines()


def test_whole_steps_draft_what_steps_in_parts_do(of_lstm: Engines) -> None:
    llm = of_lstm(ALL_ACCEPTED, weight_scale=1.0)
    traffic = Traffic(  # in company of one to three
        arrivals=tuple((3 * index, 3 + index) for index in range(4)),
        params=tuple(replace(SAMPLED, seed=seed, max_tokens=40 - 5 * seed) for seed in range(4)),
        cancelled={},
        max_num_seqs=3,
    )
    in_parts, _, _ = play(llm, traffic, whole=False)
    whole, records, num_launched = play(llm, traffic, whole=True)
    assert num_launched > 10 and sum(sum(record.num_accepted_tokens) for record in records) > 60
    assert [request.output_token_ids for request in whole] == [request.output_token_ids for request in in_parts]


def test_speculating_changes_no_token(of_lstm: Engines) -> None:
    prompts = [{"prompt_token_ids": [(7 * i + 5 * j) % 64 for j in range(3 + 4 * i)]} for i in range(3)]
    params = [replace(SAMPLED, temperature=0.5 * i, seed=i) for i in range(3)]
    plain, _ = complete(of_lstm(weight_scale=1.0), prompts, params)
    requests, metrics = complete(of_lstm({**ALL_ACCEPTED, **STRICT}, weight_scale=1.0), prompts, params)
    assert [request.output_token_ids for request in requests] == [request.output_token_ids for request in plain]
    assert 0 < metrics.num_accepted_tokens < sum(sum(record.num_draft_tokens) for record in metrics.records)


def test_captured_steps_draft_on_a_gpu_what_the_cpu_does(of_lstm: Engines, emulated_gpu: EmulatedDevice) -> None:
    small: dict[str, Any] = {"architecture": {"num_hidden_layers": 1}, "num_gpu_blocks_override": 64}
    gpu: dict[str, Any] = {"device": "cuda", "dtype": "float32", "batch_invariant": False}
    prompts = [{"prompt_token_ids": [5, 6, 7, 8, 9]}, {"prompt_token_ids": [3, 4]}]
    params = [replace(SAMPLED, max_tokens=8)] * 2
    engines = (
        of_lstm(ALL_ACCEPTED, weight_scale=1.0, **small),
        Engines()(ALL_ACCEPTED, weight_scale=1.0, **small, **gpu),
    )
    (expected, _), (found, metrics) = (complete(llm, prompts, params) for llm in engines)
    assert [request.output_token_ids for request in found] == [request.output_token_ids for request in expected]
    assert emulated_gpu.num_replays > 0 and metrics.num_accepted_tokens >= 8


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("lstm", without("cell_proj.1.weight"), r"those of an LSTM speculator .*missing: cell_proj\.1\.weight"),
        ("lstm", with_("qhead.0.weight", (48, 24)), r"unexpected: qhead\.0\.weight"),
        ("lstm", with_("input_proj.0.weight", (24, 8)), r"another shape: input_proj.* \[24, 8\] for \[24, 32\]"),
        ("lstm", with_("output_emb.0.weight", (48, 24)), r"says tie_lstm_embs, and output_emb\.0\.weight differs"),
        ("lstm", with_("head.2.weight", (48, 24)), r"says tie_weights, and head\.2\.weight differs from head\.0"),
        ("lstm", changed(tie_weights=False), "tie_weights in its config must be true with method=sum_lstm"),
        ("lstm", changed(method="sum_gru"), "method in its config must be sum_rnn or sum_lstm, got 'sum_gru'"),
        ("lstm", changed(proj_dim="24.16"), r"be one width with method=sum_lstm, got emb_dim=24, proj_dim=24\.16, inn"),
        ("lstm", changed(emb_dim="wide"), "emb_dim in its config must be whole numbers >= 1, such as .*, got 'wide'"),
        ("lstm", changed(input_hidden_dim=64, vocab_size=9), "got hidden_size 64 for 32 and vocabulary 9 for 48"),
        ("rnn", changed(method=None), "method in its config must be sum_rnn or sum_lstm, got None"),
        ("rnn of layers", changed(emb_dim="24.16"), "what inner_dim starts with in its config must be one width"),
        ("rnn of layers", changed(inner_dim=24), r"unexpected: ln\.0\.2\.weight"),
        ("mlp", changed(num_lookahead_tokens=0), "num_lookahead_tokens in its config must be a whole number >= 1"),
        ("mlp", without("proj.1.weight"), r"those of an MLP speculator .*missing: proj\.1\.weight"),
    ],
)  # fmt: skip
def test_what_is_not_this_targets_speculator_is_one_message(
    read: Read, layout: str, change: Callable[..., Any], message: str
) -> None:
    values, tensors, file = LAYOUTS[layout]
    assert_refused(read, change(values, tensors), file, message)
