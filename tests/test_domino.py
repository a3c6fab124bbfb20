"""Domino: heads in SpecForge's layouts read as they are; logits, chains and trees those of torch's GRU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu.panels import Panels
from proposers.heads.domino import load_domino_head
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from tests import test_emulated_gpu as gpu
from tests import test_losslessness as lossless
from tests.conftest import Engines, complete
from tests.emulated_device import EmulatedDevice
from tests.heads_for_tests import CORRECTING
from tests.one_pass_reference import HIDDEN_SIZE, VOCAB_SIZE, Target, context_of, passes_of_a_run, save_target
from tests.test_dflash import BLOCK, ZLAB, Tensors, reference_rows, save_head, tensors
from tests.test_dflash2 import CHAIN, TREE, assert_whole_steps_are_those_in_parts
from tests.test_dspark import check_dynamic_trees, check_static_trees
from tests.transformers_reference import KeepFloat64, assert_as_accurate, in_float64

STATE, RANK = 7, 5
OWN = {**ZLAB["dflash_config"], "projector_type": "domino", "emb_dim": RANK, "gru_hidden_dim": STATE}
SHAPES = {
    "prefix_gru__weight_ih_l0": (3 * STATE, HIDDEN_SIZE),
    "prefix_gru__weight_hh_l0": (3 * STATE, STATE),
    "embed_proj__0__weight": (RANK, HIDDEN_SIZE + STATE),
    "embed_proj__2__weight": (VOCAB_SIZE, RANK),
}
ENDS = {"embed_tokens__weight": (VOCAB_SIZE, HIDDEN_SIZE), "lm_head__weight": (VOCAB_SIZE, HIDDEN_SIZE)}
SHIFTED = {**OWN, "pure_draft_prefix_len": 1, "shift_label": True}
LAYOUTS: dict[str, tuple[dict[str, Any], Tensors]] = {
    "shifted": ({**ZLAB, "architectures": ["DominoDraftModel"], "dflash_config": SHIFTED}, tensors(**SHAPES)),
    "in place": ({**ZLAB, "dflash_config": OWN}, tensors(**SHAPES)),
    "in place, two guesses uncorrected, own ends": (
        {**ZLAB, "dflash_config": {**OWN, "pure_draft_prefix_len": 2}},
        tensors(**ENDS, **SHAPES),
    ),
}


class Reference:
    """A head as SpecForge's code has it, in the target's dtype."""

    @torch.inference_mode()
    def __init__(self, layout: str, target: Any, token_ids: list[int], num_tokens: int) -> None:
        config, weights = LAYOUTS[layout]
        told = config["dflash_config"]
        num_silent, self.num_pure = 1 - told.get("shift_label", False), told.get("pure_draft_prefix_len", 0)
        self.rows = reference_rows(config, weights, target, token_ids, num_tokens, [1, 2], num_silent=num_silent)
        self.weights = {name: w.to(self.rows.dtype) for name, w in weights.items()}
        self.base = self.rows @ self.weights.get("lm_head.weight", target.lm_head.weight).T
        self.embedding = self.weights.get("embed_tokens.weight", target.model.embed_tokens.weight)
        self.gru = torch.nn.GRU(HIDDEN_SIZE, STATE, bias=False, dtype=self.rows.dtype)
        self.gru.load_state_dict({name: self.weights[f"prefix_gru.{name}"] for name in self.gru.state_dict()})

    @torch.inference_mode()
    def logits(self, path: list[int]) -> Tensor:
        """[len(path), vocab]: of each place behind the tokens up to it, the pending one first."""
        states, _ = self.gru(self.embedding[path])
        inner = torch.cat((self.rows[: len(path)], states), dim=1) @ self.weights["embed_proj.0.weight"].T
        added = (inner * torch.sigmoid(inner)) @ self.weights["embed_proj.2.weight"].T
        added[: self.num_pure] = 0
        return self.base[: len(path)] + added


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_guess_has_the_logits_of_a_rewrite_behind_the_guesses_before(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    config, weights = LAYOUTS[layout]
    if layout == "in place":  # as older ones keep what is not the block's
        own = ("prefix_gru.", "embed_proj.")
        weights = {f"logit_head.{name}" if name.startswith(own) else name: tensor for name, tensor in weights.items()}
    method = {"method": "dflash", "model": save_head(tmp_path / "head", config, weights), "num_speculative_tokens": 5}
    passes, _ = passes_of_a_run(target, monkeypatch, method)
    assert len(passes) > 20 and {1, 5} < {len(one.drafted) for one in passes}

    def logits(model: Any) -> Tensor:
        paths = [[one.token_ids[-1], *one.drafted[:-1]] for one in passes]
        return torch.cat(
            [
                Reference(layout, model, one.token_ids, len(path)).logits(path)
                for one, path in zip(passes, paths, strict=True)
            ]
        )

    theirs = logits(target.model)
    with KeepFloat64():
        exact = logits(in_float64(target.model))
    assert_as_accurate(torch.cat([one.logits for one in passes]), theirs, exact)
    assert [token for one in passes for token in one.drafted] == exact.argmax(dim=-1).tolist()


def test_trees_grow_by_what_each_node_says_behind_its_own_path(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = save_head(tmp_path / "head", *LAYOUTS["shifted"])
    check_dynamic_trees(target, head, monkeypatch, "dflash", partial(Reference, "shifted"))
    check_static_trees(target, head, monkeypatch, "dflash", partial(Reference, "shifted"))


@pytest.mark.parametrize(("layout", "most"), [("shifted", BLOCK), ("in place", BLOCK - 1)])
def test_a_block_holds_as_many_guesses_as_its_rows_make(target: Target, tmp_path: Path, layout: str, most: int) -> None:
    source = ModelSource(model=save_head(tmp_path / "head", *LAYOUTS[layout]), name="method.model")
    assert load_domino_head(source, context_of(target), None, None).config.max_draft_tokens == most


@pytest.mark.parametrize(
    "keys",
    [CHAIN, {**TREE, "speculative_token_tree": "dynamic"}, {**CHAIN, "quantization": "int8"}],
    ids=["a chain", "a dynamic tree", "a chain in 8 bits"],
)
def test_whole_steps_draft_and_accept_what_steps_in_parts_do_and_no_text_changes(
    engines: Engines, keys: dict[str, Any]
) -> None:
    llm = engines(keys, of_drafters=CORRECTING, **lossless.SCHEDULES["few blocks"])
    assert_whole_steps_are_those_in_parts(llm)
    products = llm.engine.proposer.head.sequel.of_state, llm.engine.proposer.head.sequel.mixer  # type: ignore[attr-defined]
    assert all(isinstance(own, Panels) and (own.scales is not None) == ("quantization" in keys) for own in products)
    plain, _ = complete(engines(**lossless.ROOMY), lossless.PROMPTS, lossless.PARAMS)
    requests, metrics = complete(llm, lossless.PROMPTS, lossless.PARAMS)
    assert lossless.answers(requests) == lossless.answers(plain)
    drafted, accepted = lossless.counts(metrics)
    assert 0 < accepted < drafted


def test_an_emulated_gpu_says_what_the_cpu_says(engines: Engines, emulated_gpu: EmulatedDevice) -> None:
    own = {"of_drafters": {**gpu.SMALL["architecture"], **CORRECTING}}
    params = [gpu.GREEDY, gpu.DRAWN]
    (expected, on_cpu), (found, on_gpu) = (
        complete(llm, gpu.PROMPTS, params)
        for llm in (engines(CHAIN, **own, **gpu.SMALL), Engines()(CHAIN, **own, **gpu.GPU))
    )
    assert [request.output_token_ids for request in found] == [request.output_token_ids for request in expected]
    for count in ("num_draft_tokens", "num_accepted_tokens"):
        assert [getattr(r, count) for r in on_gpu.records] == [getattr(r, count) for r in on_cpu.records]
    assert emulated_gpu.num_replays > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gru_hidden_dim": None}, "gru_hidden_dim in its config must be a whole number >= 1, got None"),
        ({"pure_draft_prefix_len": -1}, "pure_draft_prefix_len in its config must be a whole number >= 0, got -1"),
        ({"draft_vocab_size": 30}, r"draft_vocab_size in its config must be its vocabulary \(48\) .*, got 30"),
        ({"emb_dim": 6}, r"embed_proj\.0\.weight \[5, 39\] for \[6, 39\]"),
        ({"markov_rank": 4}, r"must be a plain Domino head, got markov_rank=4 \(DSpark\)"),
        ({"speculators_model_type": "dflash"}, "must be a plain Domino head, got speculators_model_type='dflash'"),
    ],
)
def test_a_checkpoint_that_is_no_domino_head_of_this_target_is_one_message(
    target: Target, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config, head = LAYOUTS["shifted"]
    config = {**config, **changes, "dflash_config": {**SHIFTED, **changes}}
    source = ModelSource(model=save_head(tmp_path / "head", config, head), name="method.model")
    with pytest.raises(UserError, match=message) as caught:
        load_domino_head(source, context_of(target), None, None)
    assert "; " in str(caught.value)
