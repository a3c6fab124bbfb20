"""DFlash 2: heads in their published layouts read as they are; logits, chains, trees and q those of a rewrite."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu.panels import Panels
from kernels.reference.softcap import softcap
from proposers.drafting.token_by_token import Draw
from proposers.heads.candidate_selector import CandidateSelector
from proposers.heads.dflash2 import load_dflash2_head
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.request import DraftTokens, Request
from runner.engine.sampling_rows import SamplingRows
from runner.engine.schedule import Schedule
from runner.llm import LLM
from tests import test_emulated_gpu as gpu
from tests import test_losslessness as lossless
from tests import test_ranked_trees as ranked
from tests.conftest import Engines, complete
from tests.emulated_device import EmulatedDevice
from tests.heads_for_tests import SELECTING
from tests.one_pass_reference import (
    HIDDEN_SIZE,
    PARAMS,
    PROMPTS,
    TIGHT,
    VOCAB_SIZE,
    Target,
    context_of,
    passes_of_a_run,
    reference_logits,
    save_target,
)
from tests.other_families import GEMMA
from tests.test_dflash import (
    BLOCK,
    NUM_HEAD_LAYERS,
    SPECULATORS,
    WINDOWED,
    ZLAB,
    Tensors,
    reference_rows,
    save_head,
    tensors,
)
from tests.test_dspark import check_dynamic_trees, check_static_trees
from tests.test_every_cell import ALPHA, NUM_REQUESTS, PROMPT, engine, exact_distribution, p_value, sampling_params
from tests.test_whole_steps import GREEDY, SAMPLED, Traffic, assert_same_steps, play
from tests.transformers_reference import KeepFloat64, assert_as_accurate, in_float64

GROUP, RANK, TOP_K = 8, 5, 6
SIZES = {"conv_kernel_size": 2, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": TOP_K}
SCALES = {"input_embedding_scale": 1.7, "output_multiplier": 0.6, "final_logit_softcapping": 3.0}
OWN = {**ZLAB["dflash_config"], **SIZES, "block_size": BLOCK}


def parts(num_taps: int = 2) -> dict[str, tuple[int, ...]]:
    """Shapes of what a head has beside a DFlash one's, __ for a dot."""
    projected = 2 * num_taps * (HIDDEN_SIZE // GROUP)
    shapes: dict[str, tuple[int, ...]] = {
        "candidate_selector__predecessor_codebook": (VOCAB_SIZE, RANK),
        "candidate_selector__successor_codebook": (VOCAB_SIZE, RANK),
        "candidate_selector__hidden_projection__weight": (RANK, HIDDEN_SIZE),
    }
    for layer in range(NUM_HEAD_LAYERS):
        for part in ("attention_conv", "mlp_conv"):
            shapes[f"layers__{layer}__{part}__base_kernel"] = (2, num_taps, HIDDEN_SIZE)
            shapes[f"layers__{layer}__{part}__kernel_projection__weight"] = (projected, HIDDEN_SIZE)
    return shapes


ENDS = {"embed_tokens__weight": (VOCAB_SIZE, HIDDEN_SIZE), "lm_head__weight": (VOCAB_SIZE, HIDDEN_SIZE)}
LAYOUTS: dict[str, tuple[dict[str, Any], Tensors]] = {
    "z-lab": ({**ZLAB, "architectures": ["DFlash2DraftModel"], "dflash_config": OWN}, tensors(**parts())),
    "z-lab, three taps, windows, scales, a cap, own ends": (
        {**ZLAB, **WINDOWED, "dflash_config": {**OWN, **SCALES, "causal": False, "conv_kernel_size": 3}},
        tensors(**ENDS, **parts(num_taps=3)),
    ),
    "speculators": ({**SPECULATORS, "speculators_model_type": "dflash2", **SIZES}, tensors(**parts())),
}


def convolved(own: Tensors, name: str, compute: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """A layer's part between its two convolutions, tap by tap; a block begins with the first row."""
    base, weight = own[f"{name}_conv.base_kernel"], own[f"{name}_conv.kernel_projection.weight"]
    num_rows, num_taps = len(rows), base.shape[1]
    deltas = (rows @ weight.T).view(num_rows, 2, num_taps, HIDDEN_SIZE // GROUP).repeat_interleave(GROUP, dim=3)

    def convolve(x: Tensor, side: int) -> Tensor:
        found = torch.zeros_like(x)
        for row in range(num_rows):
            for tap in range(min(num_taps, row + 1)):
                found[row] += (base[side, tap] + deltas[row, side, tap]) * x[row - tap]
        return found

    return convolve(compute(convolve(rows, 0)), 1)


class Reference:
    """A head as vLLM's code has it, in the target's dtype."""

    @torch.inference_mode()
    def __init__(self, layout: str, target: Any, token_ids: list[int], num_tokens: int) -> None:
        config, weights = LAYOUTS[layout]
        self.rows = reference_rows(
            config, weights, target, token_ids, num_tokens, [1, 2], num_silent=1, around=convolved
        )
        dtype = self.rows.dtype
        self.weights = {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}
        self.base = self.rows @ self.weights.get("lm_head.weight", target.lm_head.weight).T
        self.told = {**config, **config.get("dflash_config", {})}

    @torch.inference_mode()
    def logits(self, path: list[int]) -> Tensor:
        """[len(path), vocab]: of each place behind the tokens up to it, the pending one first; -inf: no candidate."""
        w = {name.removeprefix("candidate_selector."): tensor for name, tensor in self.weights.items()}
        found = torch.full((len(path), VOCAB_SIZE), float("-inf"), dtype=self.rows.dtype)
        for place, before in enumerate(path):
            values, candidates = self.base[place].topk(TOP_K)
            values = values * self.told.get("output_multiplier", 1.0)
            if cap := self.told.get("final_logit_softcapping"):
                values = cap * torch.tanh(values / cap)
            latent = w["predecessor_codebook"][before] * (w["hidden_projection.weight"] @ self.rows[place])
            found[place, candidates] = values + w["successor_codebook"][candidates] @ latent
        return found


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_guess_has_the_logits_of_a_rewrite_behind_the_guess_before(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """From its own cache, in launches that hold blocks of several lengths; other tokens have no chance at all."""
    method = {"method": "dflash", "model": save_head(tmp_path / "head", *LAYOUTS[layout]), "num_speculative_tokens": 5}
    passes, _ = passes_of_a_run(target, monkeypatch, method)
    assert len(passes) > 20 and {1, 5} < {len(one.drafted) for one in passes}
    theirs = torch.cat(reference_logits(Reference, layout, target.model, passes))
    with KeepFloat64():
        exact = torch.cat(reference_logits(Reference, layout, in_float64(target.model), passes))
    ours, is_candidate = torch.cat([one.logits for one in passes]), exact.isfinite()
    assert_as_accurate(ours[is_candidate], theirs[is_candidate], exact[is_candidate])
    assert (ours.softmax(dim=1)[~is_candidate] == 0).all()
    assert [token for one in passes for token in one.drafted] == exact.argmax(dim=-1).tolist()


def test_draft_probs_are_those_of_the_logits_and_0_of_all_that_are_no_candidates_of_the_rewrite(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, temperature = "z-lab", 0.8
    head, options = save_head(tmp_path / "head", *LAYOUTS[layout]), {**TIGHT, "num_gpu_blocks_override": None}
    method = {"method": "dflash", "model": head, "num_speculative_tokens": 4}
    method |= {"rejection_sample_method": "block", "draft_sample_method": "probabilistic"}
    llm = LLM(str(target.directory), device="cpu", enforce_eager=True, speculative_config=method, **options)
    proposer: Any = llm.engine.proposer
    model, propose, walk = in_float64(target.model), proposer.propose, proposer.walk
    logits, probs, expected = list[Tensor](), list[Tensor](), list[Tensor]()
    seen: dict[int, list[Tensor]] = {}  # of the last pass, by the place of the request

    def recording_walk(requests: Sequence[Request], counts: Sequence[int], draw: Draw) -> Tensor:
        seen.clear()

        def recording_draw(rows: Tensor, sampling: SamplingRows, step: int, active: list[int]) -> Tensor:
            for place, own in zip(active, rows.clone(), strict=True):
                seen.setdefault(place, []).append(own)
            return draw(rows, sampling, step, active)

        drafted: Tensor = walk(requests, counts, recording_draw)
        return drafted

    def recording_propose(schedule: Schedule) -> DraftTokens:
        drafts = propose(schedule)
        ends = pairwise(drafts.cu_num_draft_tokens)
        for place, (item, (start, end)) in enumerate(zip(schedule.decoding, ends, strict=True)):
            if start < end:
                committed = item.request.tokens_between(0, item.request.num_tokens)
                before = [committed[-1], *drafts.token_ids[start : end - 1].tolist()]
                with KeepFloat64():
                    expected.append(Reference(layout, model, committed, end - start).logits(before))
                assert drafts.probs is not None
                logits.extend(seen[place])
                probs.append(drafts.probs[start:end].clone())
        return drafts

    monkeypatch.setattr(proposer, "walk", recording_walk)
    monkeypatch.setattr(proposer, "propose", recording_propose)
    complete(llm, PROMPTS, [replace(own, temperature=temperature, seed=3) for own in PARAMS])
    ours, said = torch.cat(probs), torch.stack(logits)  # which temperature has divided
    assert len(ours) > 40 and torch.equal(ours > 0, torch.cat(expected).isfinite())
    assert_as_accurate(ours, said.softmax(dim=1), said.double().softmax(dim=1))


def test_trees_grow_by_what_each_node_says_behind_the_one_above(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = "z-lab, three taps, windows, scales, a cap, own ends"
    head = save_head(tmp_path / "head", *LAYOUTS[layout])
    check_dynamic_trees(target, head, monkeypatch, "dflash", partial(Reference, layout))
    check_static_trees(target, head, monkeypatch, "dflash", partial(Reference, layout))


def test_of_candidates_that_tie_the_lowest_ids_are_taken() -> None:
    selector = CandidateSelector(
        num_candidates=3, rank=2, hidden_size=4, vocab_size=7, logit_scale=1.0, logit_cap=None, dtype=torch.float32
    )
    selector.projection.weight = torch.zeros(2, 4)
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 0.0, 1.0], [0.0] * 7])
    unary, candidates, _ = selector.places(torch.zeros(2, 4), logits, None)
    assert candidates.tolist() == [[1, 3, 0], [0, 1, 2]] and unary.tolist() == [[2.0, 2.0, 1.0], [0.0] * 3]


def selecting(engines: Engines, **keys: Any) -> Any:
    """Engines, whose dflash head is such a one."""

    def build(*arguments: Any, architecture: Any = None, **engine_args: Any) -> LLM:
        of_drafters = {**(architecture or {}), **SELECTING, **keys}
        return engines(*arguments, architecture=architecture, of_drafters=of_drafters, **engine_args)

    return build


def dflash2(num_speculative_tokens: int, **keys: Any) -> dict[str, Any]:
    return lossless.method_config("dflash", num_speculative_tokens, **keys)


@pytest.mark.parametrize(
    ("draft_sample_method", "num_tokens", "tree", "schedule"),
    [
        ("coupled", 4, None, "few blocks of 32, small chunks"),
        ("probabilistic", 3, None, "few blocks"),
        ("coupled", 7, "dynamic", "few blocks"),
    ],
)
def test_no_draft_changes_a_token(
    engines: Engines, draft_sample_method: str, num_tokens: int, tree: Any, schedule: str
) -> None:
    """Of greedy and sampled requests of every kind, in one batch, preempted and in chunks."""
    plain, _ = complete(engines(**lossless.ROOMY), lossless.PROMPTS, lossless.PARAMS)
    keys = {"draft_sample_method": draft_sample_method, "speculative_token_tree": tree}
    config = dflash2(num_tokens, rejection_sample_method="strict", **keys)
    llm = selecting(engines)(config, **lossless.SCHEDULES[schedule])
    requests, metrics = complete(llm, lossless.PROMPTS, lossless.PARAMS)
    assert lossless.answers(requests) == lossless.answers(plain)
    drafted, accepted = lossless.counts(metrics)
    assert 0 < accepted < drafted


@pytest.mark.parametrize(
    ("rule", "keys", "sampler"),
    [
        ("probabilistic", {"draft_sample_method": "probabilistic"}, "temperature"),
        ("block", {"draft_sample_method": "probabilistic"}, "penalties, bias"),
        (
            "probabilistic",
            {"draft_sample_method": "probabilistic", "speculative_token_tree": ranked.TREES["static"]},
            "temperature",
        ),
    ],
)
def test_drafts_from_a_part_of_the_tokens_keep_the_distribution(
    engines: Engines, rule: str, keys: dict[str, Any], sampler: str
) -> None:
    """Over several steps: the joint distribution of three tokens, by chi-square."""
    config = dflash2(7 if "speculative_token_tree" in keys else 3, rejection_sample_method=rule, **keys)
    llm = engine(selecting(engines, selector_top_k=3), config)
    params = sampling_params(sampler, NUM_REQUESTS // 2)
    requests, metrics = complete(llm, [PROMPT], [params])
    assert 0 < metrics.num_accepted_tokens < sum(point.num_draft_tokens for point in metrics.step_points)
    assert p_value(requests, exact_distribution(llm, params)) > ALPHA


CHAIN = {"method": "dflash", "num_speculative_tokens": 3}
TREE = {"method": "dflash", "num_speculative_tokens": 6, "tree_top_k": 3}


@pytest.mark.parametrize(
    "keys",
    [
        CHAIN,
        {**CHAIN, "rejection_sample_method": "block", "draft_sample_method": "probabilistic"},
        {**TREE, "speculative_token_tree": "dynamic"},
        {**TREE, "speculative_token_tree": ranked.TREES["static"]},
        {"method": "hybrid", "drafter": "dflash", "num_speculative_tokens": 4},
    ],
    ids=["a chain", "a chain with its probs", "a dynamic tree", "a static tree", "beside matches"],
)
def test_whole_steps_draft_and_accept_what_steps_in_parts_do(engines: Engines, keys: dict[str, Any]) -> None:
    """Where these have blocks of several lengths in a launch, and those of one."""
    assert_whole_steps_are_those_in_parts(selecting(engines)(keys))


def assert_whole_steps_are_those_in_parts(llm: LLM) -> None:
    lengths = (60, 23, 1, 2, 5, 3)
    params = tuple(replace(SAMPLED if length == 23 else GREEDY, max_tokens=length) for length in lengths)
    arrivals = tuple((4 * index, 3 + index) for index in range(len(lengths)))
    traffic = Traffic(arrivals=arrivals, params=params, cancelled={}, max_num_seqs=3)
    _, in_parts, _ = play(llm, traffic, whole=False)
    _, whole, num_launched = play(llm, traffic, whole=True)
    assert num_launched > 10
    assert_same_steps(whole, in_parts)
    assert {0, 1} <= {count for record in whole for count in record.num_accepted_tokens}


def test_an_emulated_gpu_says_what_the_cpu_says(engines: Engines, emulated_gpu: EmulatedDevice) -> None:
    for keys in (CHAIN, {**CHAIN, "speculative_token_tree": "dynamic", "tree_depth": 2, "tree_top_k": 2}):
        own = selecting(engines)(keys, **gpu.SMALL)
        (expected, on_cpu), (found, on_gpu) = (
            complete(llm, gpu.PROMPTS, [gpu.GREEDY, gpu.DRAWN]) for llm in (own, selecting(Engines())(keys, **gpu.GPU))
        )
        assert [request.output_token_ids for request in found] == [request.output_token_ids for request in expected]
        for count in ("num_draft_tokens", "num_accepted_tokens"):
            assert [getattr(r, count) for r in on_gpu.records] == [getattr(r, count) for r in on_cpu.records]
    assert emulated_gpu.graph_sizes and emulated_gpu.num_replays > 0


def test_a_head_held_in_8_bits_changes_no_token(engines: Engines) -> None:
    plain, _ = complete(engines(**lossless.ROOMY), lossless.PROMPTS, lossless.PARAMS)
    llm = selecting(engines)({**CHAIN, "quantization": "int8"}, **lossless.ROOMY)
    head = llm.engine.proposer.head  # type: ignore[attr-defined]
    weights = [head.sequel.projection.weight, *(layer.mlp_conv.projection.weight for layer in head.layers)]
    assert all(isinstance(weight, Panels) and weight.scales is not None for weight in weights)
    requests, metrics = complete(llm, lossless.PROMPTS, lossless.PARAMS)
    assert lossless.answers(requests) == lossless.answers(plain)
    drafted, accepted = lossless.counts(metrics)
    assert 0 < accepted < drafted


def test_what_a_target_does_beside_its_tables_is_not_done_to_a_head_with_scales_of_its_own(
    engines: Engines,
) -> None:
    """As Gemma does, which scales embeddings and caps logits."""
    llm = selecting(engines, input_embedding_scale=0.5, final_logit_softcapping=None)(CHAIN, architecture=GEMMA)
    head, model = llm.engine.proposer.head, llm.engine.target.model  # type: ignore[attr-defined]
    ids, rows = torch.tensor([3, 9]), torch.ones(2, model.hidden_size)
    assert model.embedding_scale is not None and model.logits_softcap is not None
    assert torch.equal(head.embed(ids), 0.5 * model.embed_tokens[ids])
    capped = softcap(head.logits(rows, 1), float(model.logits_softcap))
    assert not torch.equal(head.logits(rows, 1), capped)
    torch.testing.assert_close(model.logits(rows, 1), capped)


def test_keys_of_growth_are_for_trees_of_such_heads(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    keys = {**TREE, "speculative_token_tree": "dynamic", "tree_depth": 2}
    with caplog.at_level(logging.WARNING):
        llm = selecting(engines)(keys)
    assert llm.engine.proposer.tree_depth == 2 and not caplog.records  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING):
        engines(keys)
    assert "method.tree_depth=2 and tree_top_k=3 bound no tree of dummy-dflash, a plain DFlash" in caplog.text


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("z-lab", {"conv_group_size": 5}, r"conv_group_size in its config must divide its hidden_size \(32\), got 5"),
        ("z-lab", {"conv_kernel_size": 0}, "conv_kernel_size in its config must be a whole number >= 1, got 0"),
        ("z-lab", {"selector_rank": None}, "selector_rank in its config must be a whole number >= 1, got None"),
        ("z-lab", {"selector_top_k": 49}, r"selector_top_k and draft_vocab_size must be .* \(48\), got 49 and 48"),
        ("z-lab", {"draft_vocab_size": 30}, r"must be <= its vocabulary and all of it \(48\), got 6 and 30"),
        ("z-lab", {"output_multiplier": "1"}, "output_multiplier in its config must be a number >= 0, got '1'"),
        ("z-lab", {"markov_rank": 8}, r"must be a plain DFlash 2 head, got markov_rank=8 \(DSpark\)"),
        ("z-lab", {"conv_kernel_size": 3}, r"layers\.0\.attention_conv\.base_kernel \[2, 2, 32\] for \[2, 3, 32\]"),
        ("z-lab", {"selector_rank": 4}, r"hidden_projection\.weight \[5, 32\] for \[4, 32\]"),
        ("speculators", {"speculators_model_type": "dflash"}, "got speculators_model_type='dflash'"),
    ],
)
def test_a_checkpoint_that_is_no_dflash2_head_of_this_target_is_one_message(
    target: Target, tmp_path: Path, layout: str, changes: dict[str, Any], message: str
) -> None:
    config, head = LAYOUTS[layout]
    own = config.get("dflash_config", {})
    inside = {key: changes.get(key, value) for key, value in own.items()}
    config = {**config, **changes, **({"dflash_config": inside} if own else {})}
    source = ModelSource(model=save_head(tmp_path / "head", config, head), name="method.model")
    with pytest.raises(UserError, match=message) as caught:
        load_dflash2_head(source, context_of(target), None, None)
    assert "; " in str(caught.value)


@pytest.mark.parametrize("name", ["candidate_selector.successor_codebook", "layers.1.mlp_conv.base_kernel"])
def test_a_tensor_that_is_missing_is_one_message(target: Target, tmp_path: Path, name: str) -> None:
    config, head = LAYOUTS["z-lab"]
    path = save_head(tmp_path / "head", config, {key: own for key, own in head.items() if key != name})
    with pytest.raises(UserError, match=f"not those of a DFlash 2 head .*; missing: {re.escape(name)};"):
        load_dflash2_head(ModelSource(model=path, name="method.model"), context_of(target), None, None)
