"""Steps that run whole on the device say what steps in parts say, whatever comes, goes or runs out meanwhile.

As on a GPU, over models that hash what they find (tests/hashing_models.py), with kernels replaced by their definitions
(the kernels themselves run in tests/test_emulated_gpu.py); and as they are on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.recording import Pool
from kernels.reference import rejection as rejection_ops
from kernels.reference import sampling as sampling_ops
from kernels.reference.chain_rows import chain_rows
from kernels.reference.fit_drafts import fit_drafts
from kernels.reference.follow_verified import follow_verified
from kernels.reference.likeliest_tree import add_level, likeliest_tree
from kernels.reference.mask_and_penalise import mask_and_penalise
from kernels.reference.match_in_tree import match_in_tree
from kernels.reference.move_kv import move_kv
from kernels.reference.ngram_match import ngram_match
from kernels.reference.perturb import perturb
from kernels.reference.philox import Stream, uniforms
from kernels.reference.remember_candidates import remember_candidates
from kernels.reference.top_candidates import top_candidates
from kernels.reference.top_logprobs import top_logprobs
from kernels.reference.tree_rows import tree_rows
from kernels.reference.walk_tree import walk_tree
from proposers.captured.drafter import CapturedDrafter, NoDrafts
from runner.engine import programs
from runner.engine.device_batch import DeviceBatch
from runner.engine.forward_batch import ForwardBatch
from runner.engine.graphs import Compute, Graph, Tensors
from runner.engine.paged_shape import PagedAttention, PagedShape
from runner.engine.request import Request, RequestStatus
from runner.engine.sampling_params import SamplingParams
from runner.engine.schedule import CommittedTokens, Schedule
from runner.llm import LLM
from runner.measure import measure
from runner.metrics import InParts, MetricsCollector, RequestRecord
from runner.prompts import make_requests
from runner.step_loop import StepLoop
from runner.trace import RequestTraces
from runner.whole_steps import LaunchedStep, WholeSteps
from runner.workload import WorkloadItem
from tests.conftest import Engines, complete
from tests.hashing_models import (
    VOCAB_SIZE,
    HashingBlocks,
    HashingBlocksAndSequel,
    HashingHead,
    HashingLastStates,
    HashingMaskableHead,
    HashingMaskModel,
    HashingModel,
    HashingRecurrence,
)

pytest.importorskip("triton")
import kernels.chain_rows
import kernels.fit_drafts
import kernels.follow_verified
import kernels.likeliest_tree
import kernels.mask_and_penalise
import kernels.match_in_tree
import kernels.move_kv
import kernels.ngram_match
import kernels.perturb
import kernels.rejection
import kernels.remember_candidates
import kernels.sampling
import kernels.top_candidates
import kernels.top_logprobs
import kernels.tree_rows
import kernels.uniforms
import kernels.walk_tree

GREEDY = SamplingParams(temperature=0.0, max_tokens=14)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=11)
CHOICES = [[0], [0, 0], [1], [0, 1], [0, 0, 0], [1, 0]]
METHODS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 3},
    "draft_model_greedy": {"method": "draft_model", "num_speculative_tokens": 1, "draft_sample_method": "greedy"},
    "eagle": {"method": "eagle", "num_speculative_tokens": 3},
    "p_eagle": {"method": "eagle3", "num_speculative_tokens": 3},
    "pard": {"method": "pard", "num_speculative_tokens": 3},
    "dflash": {"method": "dflash", "num_speculative_tokens": 3},
    "dspark": {"method": "dspark", "num_speculative_tokens": 3},
    "medusa": {"method": "medusa", "num_speculative_tokens": 3},
    "mlp_speculator": {"method": "mlp_speculator", "num_speculative_tokens": 3},
    "early_exit": {"method": "early_exit", "num_speculative_tokens": 3},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2},
    "suffix": {"method": "suffix", "num_speculative_tokens": 3},
    "suffix_dynamic": {"method": "suffix", "num_speculative_tokens": 5, "speculative_token_tree": "dynamic"},
    "token_recycling": {"method": "token_recycling", "num_speculative_tokens": 6, "tree_depth": 3},
    "token_recycling_block": {
        "method": "token_recycling",
        "num_speculative_tokens": 6,
        "tree_depth": 3,
        "rejection_sample_method": "block",
    },
    "token_recycling_and_suffix": {
        "method": "suffix_recycling",
        "num_speculative_tokens": 6,
        "tree_depth": 3,
        "min_match_score": 0.5,
    },
    "token_recycling_chain": {
        "method": "token_recycling",
        "num_speculative_tokens": 3,
        "speculative_token_tree": None,
    },
    "ngram_gpu": {"method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2},
    **{
        f"draft_model_{rule}": {
            "method": "draft_model",
            "num_speculative_tokens": 3,
            "rejection_sample_method": rule,
            "draft_sample_method": "probabilistic",
        }
        for rule in ("probabilistic", "block", "typical")
    },
    "eagle_block": {"method": "eagle", "num_speculative_tokens": 3, "rejection_sample_method": "block"},
    "medusa_block": {"method": "medusa", "num_speculative_tokens": 3, "rejection_sample_method": "block"},
    "ngram_block": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 2,
        "rejection_sample_method": "block",
    },
    **{
        f"{method}_{kind}": {"method": method, "num_speculative_tokens": 6, "speculative_token_tree": tree}
        for method in ("eagle", "medusa", "dflash", "dspark")
        for kind, tree in (("dynamic", "dynamic"), ("static", CHOICES))
    },
    **{
        f"{method}_{rule}_{kind}": {
            "method": method,
            "num_speculative_tokens": 6,
            "speculative_token_tree": tree,
            "rejection_sample_method": rule,
            "draft_sample_method": "greedy",
        }
        for method, rule, kind, tree in (
            ("eagle", "probabilistic", "dynamic", "dynamic"),
            ("medusa", "block", "dynamic", "dynamic"),
            ("eagle", "block", "static", CHOICES),
        )
    },
}


def draw(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, **parameters: Any) -> torch.Tensor:
    drawn = sampling_ops.gumbel_argmax(
        logits, seeds, positions.clamp(min=0), parameters.get("stream", Stream.TARGET), 0
    )
    if (is_greedy := parameters.get("is_greedy")) is not None:
        drawn = torch.where(is_greedy, sampling_ops.greedy_argmax(logits), drawn)
    return torch.where(positions >= 0, drawn, -1)


def take_the_argmax(logits: torch.Tensor, positions: torch.Tensor, token_ids: None = None) -> torch.Tensor:
    return torch.where(positions >= 0, sampling_ops.greedy_argmax(logits), -1)


def verify_strict(
    drawn: torch.Tensor, drafts: torch.Tensor, cu: torch.Tensor, *, max_num_draft_tokens: int
) -> kernels.rejection.Verified:
    token_ids = torch.full((len(cu) - 1, max_num_draft_tokens + 1), -1)
    counts = torch.zeros(2, len(cu) - 1, dtype=torch.int64)
    rows = zip(drawn.split((cu.diff() + 1).tolist()), drafts.split(cu.diff().tolist()), strict=True)
    for own, (row, guesses) in enumerate(rows):
        if row[0] >= 0:
            counts[0, own] = rejection_ops.count_accepted((row[:-1] == guesses).unsqueeze(0))
            counts[1, own] = (guesses >= 0).sum()
            token_ids[own, : counts[0, own] + 1] = row[: counts[0, own] + 1]
    return kernels.rejection.Verified(token_ids, *counts)


def uniforms_of(
    seeds: torch.Tensor, positions: torch.Tensor, draft_steps: torch.Tensor | None = None, *, stream: int, **shape: int
) -> torch.Tensor:
    return uniforms(seeds, positions, stream, 0 if draft_steps is None else draft_steps, **{"num_entries": 1, **shape})


@pytest.fixture
def by_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.chain_rows, "chain_rows", chain_rows)
    monkeypatch.setattr(kernels.fit_drafts, "fit_drafts", fit_drafts)
    monkeypatch.setattr(kernels.ngram_match, "ngram_match", ngram_match)
    monkeypatch.setattr(kernels.follow_verified, "follow_verified", follow_verified)
    monkeypatch.setattr(kernels.mask_and_penalise, "mask_and_penalise", mask_and_penalise)
    monkeypatch.setattr(kernels.move_kv, "move_kv", lambda *args, widest: move_kv(*args))
    monkeypatch.setattr(kernels.sampling, "sample", draw)
    monkeypatch.setattr(kernels.sampling, "greedy", take_the_argmax)
    monkeypatch.setattr(kernels.rejection, "verify_strict", verify_strict)
    monkeypatch.setattr(kernels.remember_candidates, "remember_candidates", remember_candidates)
    monkeypatch.setattr(kernels.perturb, "perturb", perturb)
    monkeypatch.setattr(kernels.likeliest_tree, "add_level", add_level)
    monkeypatch.setattr(kernels.likeliest_tree, "likeliest_tree", likeliest_tree)
    monkeypatch.setattr(kernels.match_in_tree, "match_in_tree", match_in_tree)
    monkeypatch.setattr(kernels.top_candidates, "top_candidates", top_candidates)
    monkeypatch.setattr(kernels.top_logprobs, "top_logprobs", top_logprobs)
    monkeypatch.setattr(kernels.tree_rows, "tree_rows", tree_rows)
    monkeypatch.setattr(kernels.uniforms, "uniforms", uniforms_of)
    monkeypatch.setattr(kernels.walk_tree, "walk_tree", walk_tree)


@pytest.fixture(autouse=True)
def learns_in_turns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recycling learns from all steps, so its drafts are compared where none is launched ahead of a stop."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if str(params.get("method")).startswith("token_recycling"):
        monkeypatch.setattr(WholeSteps, "runs_ahead", False)


Build = Callable[..., LLM]  # (method, **engine_args)


@pytest.fixture(params=["on a GPU", "on a CPU"])
def build(request: pytest.FixtureRequest) -> Build:
    """Engines whose steps run whole: as on a GPU, over models that hash, or compiled and recorded, over real ones."""
    if request.param == "on a CPU":
        own = request.getfixturevalue("engines")
        return lambda method, **engine_args: own(METHODS[method], **engine_args)
    request.getfixturevalue("by_definition")
    return partial(hashing, request.getfixturevalue("interpreted"))


def hashing(engines: Engines, method: str, **engine_args: Any) -> LLM:
    engine_args = {"architecture": {"num_hidden_layers": 1}, "batch_invariant": False, **engine_args}
    llm = engines(METHODS[method], **engine_args)
    llm.engine.target.model = HashingModel()  # type: ignore[assignment]
    engine, proposer = llm.engine, cast(Any, getattr(llm.engine.proposer, "drafter", llm.engine.proposer))
    heads = {
        "eagle": HashingHead,
        "p_eagle": HashingMaskableHead,
        "dflash": HashingBlocks,
        "dspark": HashingBlocksAndSequel,
    }
    base = method.removeprefix("hybrid_")
    for suffix in ("_dynamic", "_static", "_probabilistic", "_block", "_typical"):
        base = base.removesuffix(suffix)
    if base in heads:
        proposer.head = proposer.runner.head = heads[base](proposer.head)
    elif base == "medusa":
        proposer.heads = HashingLastStates()
    elif base == "mlp_speculator":
        proposer.speculator = HashingRecurrence()
    elif base in ("draft_model", "draft_model_greedy", "early_exit"):
        proposer.runner.model = HashingModel(is_draft=True)
    elif base == "pard":
        proposer.runner.model = HashingMaskModel(proposer.mask_token_id)
    for steps in engine.whole_steps.values():
        steps.cache_clear()  # they were captured over the models from before
    return llm


@dataclass(frozen=True, kw_only=True)
class Traffic:
    arrivals: tuple[tuple[int, int], ...]  # of each request: the step before which it comes, length of its prompt
    params: tuple[SamplingParams, ...]
    cancelled: dict[int, int]  # step -> which of those that run
    max_num_seqs: int


def play(llm: LLM, traffic: Traffic, *, whole: bool) -> tuple[list[Request], list[RequestRecord], int]:
    """Requests in the order of their arrival, what was recorded of them, and how many whole steps were launched."""
    engine, metrics = llm.engine, MetricsCollector()
    engine.proposer.restart()
    scheduler = llm.scheduler_for(engine.proposer)
    scheduler.max_num_seqs = traffic.max_num_seqs
    loop = StepLoop(engine, scheduler, engine.proposer, metrics, RequestTraces(lambda ids, _: str(list(ids)), {}))
    if not whole:
        loop._steps_by_load = None
    prompts = [
        {"prompt_token_ids": [(7 * index + place) % VOCAB_SIZE for place in range(length)]}
        for index, (_, length) in enumerate(traffic.arrivals)
    ]
    requests = make_requests(prompts, [replace(p, bad_words=()) for p in traffic.params], engine.tokenizer, 0)
    for request, params in zip(requests, traffic.params, strict=True):  # there is no tokenizer to spell words
        request.sampling_params, request.bad_words_token_ids = params, BAD_WORDS if params.bad_words else ()
    num_launched = 0
    launch = WholeSteps._launch

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_launched
        num_launched += 1
        return launch(*args, **kwargs)

    arriving = sorted(zip((step for step, _ in traffic.arrivals), requests, strict=True), key=lambda pair: pair[0])
    step = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WholeSteps, "_launch", counted)
        while arriving or scheduler.has_unfinished:
            while arriving and arriving[0][0] <= step:
                scheduler.add(arriving.pop(0)[1])
            if step in traffic.cancelled and scheduler.running:
                victim = scheduler.running[traffic.cancelled[step] % len(scheduler.running)]
                scheduler.abort(victim)
                engine.proposer.release(victim.request_id)
            if scheduler.has_unfinished:
                loop.step()
            step += 1
    engine.block_manager.check_integrity([])
    return requests, metrics.records, num_launched


def assert_same_steps(found: Sequence[RequestRecord], expected: Sequence[RequestRecord]) -> None:
    by_id = {record.request_id: record for record in expected}
    for record in found:
        for name in ("token_ids", "tokens_per_step", "num_draft_tokens", "draft_depths", "num_accepted_tokens"):
            assert getattr(record, name) == getattr(by_id[record.request_id], name), name


@st.composite
def traffics(draw: st.DrawFn) -> Traffic:
    count = draw(st.integers(2, 5))
    asked = replace(SAMPLED, presence_penalty=0.5, logprobs=2), replace(SAMPLED, min_tokens=6, bad_words=("x y",))
    in_parts = replace(GREEDY, logprobs=-1)
    no_drafts = replace(SAMPLED, speculative_sampling=False)
    choices = st.sampled_from([GREEDY, SAMPLED, *asked, no_drafts, in_parts])
    return Traffic(
        arrivals=tuple(draw(st.tuples(st.integers(0, 9), st.integers(9, 24))) for _ in range(count)),
        params=tuple(replace(draw(choices), max_tokens=draw(st.integers(9, 30))) for _ in range(count)),
        cancelled=draw(st.dictionaries(st.integers(0, 20), st.integers(0, 4), max_size=2)),
        max_num_seqs=draw(st.integers(1, 4)),
    )


@pytest.mark.parametrize(
    ("method", "num_blocks"),
    [
        ("none", 4),
        ("draft_model", 400),
        ("draft_model", 4),
        ("early_exit", 4),
        ("eagle", 4),
        ("eagle_dynamic", 4),
        ("dflash", 4),
        ("ngram_gpu", 4),
        ("ngram", 4),
    ],
)
def test_no_traffic_changes_a_text(build: Build, method: str, num_blocks: int) -> None:
    """With blocks for all, and with so few that requests are preempted between two runs of whole steps."""
    llm = build(method, num_gpu_blocks_override=num_blocks)
    num_whole_steps = num_preemptions = 0

    @settings(max_examples=8)
    @given(traffics())
    def check(traffic: Traffic) -> None:
        nonlocal num_whole_steps, num_preemptions
        in_parts, _, _ = play(llm, traffic, whole=False)
        whole, _, num_launched = play(llm, traffic, whole=True)
        num_whole_steps += num_launched
        for expected, found in zip(in_parts, whole, strict=True):
            num_preemptions += found.num_preemptions
            if expected.status is found.status is RequestStatus.FINISHED:
                assert found.output_token_ids == expected.output_token_ids
                assert found.finish_reason == expected.finish_reason

    check()
    assert num_whole_steps > 20
    assert (num_preemptions > 0) == (num_blocks < 400)


@pytest.mark.parametrize("method", METHODS)
def test_every_step_drafts_and_accepts_what_it_does_in_parts(build: Build, method: str) -> None:
    """The drafter's cache is as good as in parts, and drafts that cannot be committed are not counted."""
    llm = build(method)
    lengths = (90, 23, 1, 2, 1, 5, 2, 3)
    params = tuple(replace(SAMPLED if length == 23 else GREEDY, max_tokens=length) for length in lengths)
    arrivals = tuple((4 * index, 3 + index) for index in range(len(lengths)))  # whole steps end with each of them
    traffic = Traffic(arrivals=arrivals, params=params, cancelled={}, max_num_seqs=3)
    _, in_parts, _ = play(llm, traffic, whole=False)
    _, whole, num_launched = play(llm, traffic, whole=True)
    assert num_launched > 10
    assert_same_steps(whole, in_parts)
    by_chance = ("ngram", "token_recycling_chain")  # a model that hashes says the same again so seldom that none may be
    if any(name in method for name in by_chance):
        assert sum(count for record in whole for count in record.num_draft_tokens) > 0
    if not method.startswith(("none", "suffix", *by_chance)) and method not in (
        "draft_model_greedy",
        "medusa_block_dynamic",
    ):
        accepted = [count for record in whole for count in record.num_accepted_tokens]
        all_of_them = 2 if "_static" in method or "_dynamic" in method else 3
        if method.startswith("token_recycling"):
            all_of_them = 1  # a model that hashes says the same behind a token by chance only
        assert {0, all_of_them} <= set(accepted), "drafts were rejected, and accepted to the last"


BAD_WORDS = ((21,), (5, 9), (9, 30, 31), *((token, token + 1) for token in range(40, 60)))
ASKED = {
    "penalties": replace(GREEDY, repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=-0.2),
    "repetition": replace(SAMPLED, repetition_penalty=0.8),
    "bias": replace(SAMPLED, logit_bias={5: 1.5, 9: -2.0}),
    "a part of the tokens": replace(GREEDY, allowed_token_ids=tuple(range(2, 60)), logit_bias={61: 50.0}),
    "min_tokens": replace(GREEDY, min_tokens=9, stop_token_ids=(*range(3, 30), 45)),
    "bad words": replace(SAMPLED, bad_words=("x",)),
    "logprobs": replace(SAMPLED, logprobs=3),
    "the chosen token's logprobs": replace(GREEDY, logprobs=0, presence_penalty=0.7),
    "fewer drafts": replace(SAMPLED, speculative_ratio=1),
    "two drafts": replace(GREEDY, speculative_ratio=2),
    "no drafts": replace(GREEDY, speculative_sampling=False),
    "no drafts at a temperature": replace(SAMPLED, speculative_ratio=0),
    "any number of drafts": replace(SAMPLED, speculative_ratio=2**64),
    "nothing": SAMPLED,
}


# By itself a request asks one drafter of a kind: launches of one request are those of several, and shorter.
ALONE = (
    "none",
    "draft_model",
    "eagle_dynamic",
    "dspark_static",
    "medusa_block",
    "suffix",
    "token_recycling",
    "ngram_gpu",
)


# What is asked for is read where rows are laid out and sampled, by a CPU's kernels in one way for all drafters of a
# kind; that each of them drafts there as in parts is told above.
OF_EVERY_KIND = (*ALONE, "eagle", "dflash", "draft_model_probabilistic", "token_recycling_block")


@pytest.mark.parametrize(
    ("build", "method", "max_num_seqs"),
    [
        *(("on a GPU", method, 4) for method in METHODS),
        *(("on a CPU", method, 4) for method in OF_EVERY_KIND),
        *((device, method, 1) for device in ("on a GPU", "on a CPU") for method in ALONE),
    ],
    indirect=["build"],
)
def test_whatever_requests_ask_their_steps_are_whole_and_what_they_are_in_parts(
    build: Build, method: str, max_num_seqs: int
) -> None:
    """Each by itself, and in company that asks for something else; the bits of logprobs too."""
    llm = build(method)
    params = tuple(replace(asked, max_tokens=10) for asked in ASKED.values())
    traffic = Traffic(
        arrivals=tuple((0, 3 + index) for index in range(len(params))),
        params=params,
        cancelled={},
        max_num_seqs=max_num_seqs,
    )
    in_parts, expected, _ = play(llm, traffic, whole=False)
    whole, found, num_launched = play(llm, traffic, whole=True)
    assert num_launched > (20 if max_num_seqs == 1 else 2)
    for request, like in zip(whole, in_parts, strict=True):
        assert request.output_token_ids == like.output_token_ids and request.logprobs == like.logprobs
        assert len(request.logprobs) == (
            len(request.output_token_ids) if like.sampling_params.logprobs is not None else 0
        )
    assert_same_steps(found, expected)


def drafts_of(records: list[RequestRecord]) -> dict[tuple[str, int, int], int]:
    """(request, tokens before the step, drafts) -> accepted drafts."""
    return {
        (record.request_id, before, drafted): accepted
        for record in records
        for before, drafted, accepted in zip(
            accumulate(record.tokens_per_step, initial=0),
            record.num_draft_tokens,
            record.num_accepted_tokens,
            strict=False,
        )
    }


# Where the rule keeps only the distribution, texts follow the drafts.
LOADS = {
    name: spec
    for name, spec in METHODS.items()
    if spec is not None
    and "greedy" not in name
    and "rejection_sample_method" not in spec
    # It drafts what it learned from all steps, and a step that is launched ahead under another load teaches other rows.
    and "recycling" not in spec["method"]
}


@pytest.mark.parametrize("method", LOADS)
def test_under_load_steps_are_whole_too_and_drafts_go_on_as_in_parts(
    build: Build, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request drafts all it may, two draft two tokens each, three none."""
    by_load = {"num_speculative_tokens_per_batch_size": [[1, 1, 9], [2, 2, 2], [3, 9, 0]]}
    monkeypatch.setitem(METHODS, method, {**LOADS[method], **by_load})
    llm = build(method)
    lengths = (120, 70, 40, 40, 20)
    params = tuple(replace(SAMPLED if length == 70 else GREEDY, max_tokens=length) for length in lengths)
    arrivals = ((0, 3), (4, 4), (8, 5), (24, 6), (30, 7))
    traffic = Traffic(arrivals=arrivals, params=params, cancelled={}, max_num_seqs=4)
    drafting: list[int] = []
    launch = WholeSteps._launch
    monkeypatch.setattr(
        WholeSteps,
        "_launch",
        lambda steps, *args, **kwargs: (drafting.append(steps.max_draft_tokens), launch(steps, *args, **kwargs))[1],
    )
    _, in_parts, _ = play(llm, traffic, whole=False)
    _, whole, _ = play(llm, traffic, whole=True)
    texts = [{record.request_id: record.token_ids for record in records} for records in (in_parts, whole)]
    assert texts[0] == texts[1]
    # A load shows a step later where the next step is launched already, so few steps begin alike.
    expected, found = drafts_of(in_parts), drafts_of(whole)
    alike = [key for key in expected.keys() & found.keys() if key[2] > 0]
    assert all(found[key] == expected[key] for key in alike)
    assert alike or method == "suffix"  # which finds little in texts without repetitions
    assert set(drafting) == {0, 2, llm.engine.proposer.num_speculative_tokens}


def test_whatever_the_load_allows_an_engine_has_its_requests_on_the_device_once(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with each number of drafts had tables of their own: of max_num_seqs vocabularies, where requests ask."""
    by_load = {"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 2, 2], [3, 9, 0]]}
    llm = engines({"method": "draft_model", "num_speculative_tokens": 3, **by_load})
    drafting, tables = set[int](), set[int]()
    launch = WholeSteps._launch

    def noted(steps: WholeSteps, *args: Any, **kwargs: Any) -> LaunchedStep:
        batch = steps._on_device.processors.of_batch(1, steps._sampling_flags.processors, 1)
        assert batch is not None
        drafting.add(steps.max_draft_tokens)
        tables.update((batch.bias.data_ptr(), batch.said.data_ptr()))
        return launch(steps, *args, **kwargs)

    asked = replace(SAMPLED, presence_penalty=0.5, logit_bias={3: 1.0}, ignore_eos=True)
    lengths, arrivals = (120, 70, 40), ((0, 3), (4, 4), (8, 5))
    params = tuple(replace(asked, max_tokens=length) for length in lengths)
    traffic = Traffic(arrivals=arrivals, params=params, cancelled={}, max_num_seqs=4)
    expected = [request.output_token_ids for request in play(llm, traffic, whole=False)[0]]
    with monkeypatch.context() as patch:
        patch.setattr(WholeSteps, "_launch", noted)
        found = [request.output_token_ids for request in play(llm, traffic, whole=True)[0]]
    assert found == expected
    assert drafting == {0, 2, 3} and len(tables) == 2


@pytest.mark.parametrize(
    ("build", "method"),
    [*(("on a GPU", method) for method in METHODS), *(("on a CPU", method) for method in OF_EVERY_KIND)],
    indirect=["build"],
)
def test_who_wants_no_drafts_takes_nobody_into_parts_and_by_itself_runs_no_drafter(
    build: Build, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = build(method)
    reasons, drafters = list[InParts](), list[CapturedDrafter]()
    in_parts, launch = StepLoop._in_parts, WholeSteps._launch

    def noted_parts(loop: StepLoop, schedule: Schedule, reason: InParts, started: float) -> list[CommittedTokens]:
        reasons.append(reason)
        return in_parts(loop, schedule, reason, started)

    def noted_launch(steps: WholeSteps, *args: Any, **kwargs: Any) -> LaunchedStep:
        drafters.append(steps.drafter)
        return launch(steps, *args, **kwargs)

    monkeypatch.setattr(StepLoop, "_in_parts", noted_parts)
    monkeypatch.setattr(WholeSteps, "_launch", noted_launch)
    lengths = (40, 55, 90)  # the last one asks for no drafts
    params = tuple(
        replace(GREEDY, ignore_eos=True, speculative_sampling=length != 90, max_tokens=length) for length in lengths
    )
    traffic = Traffic(arrivals=((0, 3), (0, 4), (0, 5)), params=params, cancelled={}, max_num_seqs=3)
    found, _, _ = play(llm, traffic, whole=True)
    assert tuple(len(request.output_token_ids) for request in found) == lengths
    by_design = {InParts.PROMPT, InParts.CATCH_UP}
    if method.startswith(("ngram", "suffix")) and method != "ngram_gpu":
        by_design.add(InParts.HOST_DRAFTS)  # on a CPU, three requests
    assert set(reasons) <= by_design
    kinds = [type(drafter) for drafter in drafters]
    assert kinds[-1] is NoDrafts and (method == "none" or kinds[0] is not NoDrafts)


@pytest.fixture
def room(interpreted: Engines, by_definition: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], LLM]:
    """Engines by method, every launch of which must have room for the keys that its rows see, and has no more."""
    monkeypatch.setattr(PagedShape, "context_bucket", lambda shape, context: context)
    launch, tree_launch = DeviceBatch.launch, DeviceBatch.tree_launch

    def check(batch: ForwardBatch) -> ForwardBatch:
        segments = cast(PagedAttention, batch.attention).segments
        last = torch.minimum(segments.tile_positions + segments.tile_sizes - 1, segments.last_keys)
        assert int(last.max()) < segments.max_context
        return batch

    def checked(*args: Any, **kwargs: Any) -> Any:
        batch, predicted = launch(*args, **kwargs)
        return check(batch), predicted

    monkeypatch.setattr(DeviceBatch, "launch", checked)
    monkeypatch.setattr(DeviceBatch, "tree_launch", lambda *args, **kwargs: check(tree_launch(*args, **kwargs)))

    def build(method: str) -> LLM:
        llm = hashing(interpreted, method)
        decode = cast(PagedShape, llm.engine.target.shapes["decode"])
        llm.engine.target.shapes["decode"] = replace(decode, split_keys=None)
        return llm

    return build


@pytest.mark.parametrize("method", [method for method in METHODS if method not in ("none", "ngram_gpu")])
def test_no_row_stands_behind_what_its_launch_has_room_for(room: Callable[[str], LLM], method: str) -> None:
    """Rows behind the last mask did: merging their splits read memory of nobody, wherever a text crossed a bucket."""
    complete(room(method), [{"prompt_token_ids": [5, 6]}], [replace(GREEDY, max_tokens=60)])


@pytest.mark.parametrize("method", ["draft_model", "eagle", "p_eagle", "pard", "dflash", "eagle_dynamic"])
def test_who_has_ended_has_no_rows_where_only_shorter_texts_have_room(room: Callable[[str], LLM], method: str) -> None:
    """A drafter still had the rows of its last step to compute, at the end of a context that nobody else had."""
    lengths = (12, 40, 40, 40)
    params = tuple(replace(GREEDY, ignore_eos=True, max_tokens=length) for length in lengths)
    arrivals = ((0, 100), (0, 3), (0, 4), (0, 5))
    traffic = Traffic(arrivals=arrivals, params=params, cancelled={}, max_num_seqs=4)
    found, _, num_whole = play(room(method), traffic, whole=True)
    assert tuple(len(request.output_token_ids) for request in found) == lengths and num_whole > 10


def test_a_draft_keeps_what_prompt_kernels_stored_of_a_prompt(
    interpreted: Engines, by_definition: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first whole step stored the prompt's last token anew: its bits told whether that step had been whole."""
    llm = hashing(interpreted, "draft_model")
    prompt = list(range(1, 12))
    stored = set[int]()
    compute = HashingModel.__call__

    def noted(model: HashingModel, batch: ForwardBatch, *args: Any) -> Any:
        if model.is_draft and batch.family == "decode":
            kept = batch.slot_mapping >= llm.engine.block_manager.block_size  # the others are in the null block
            stored.update(batch.positions[kept].tolist())
        return compute(model, batch, *args)

    monkeypatch.setattr(HashingModel, "__call__", noted)
    complete(llm, [{"prompt_token_ids": prompt}], [replace(GREEDY, max_tokens=9)])
    assert min(stored) == len(prompt)


def test_the_step_behind_is_launched_before_a_step_is_read(
    interpreted: Engines, by_definition: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = hashing(interpreted, "draft_model")
    events: list[str] = []
    launch, read = WholeSteps._launch, LaunchedStep.read
    monkeypatch.setattr(WholeSteps, "_launch", lambda *a, **k: (events.append("launch"), launch(*a, **k))[1])
    monkeypatch.setattr(LaunchedStep, "read", lambda *a: (events.append("read"), read(*a))[1])
    complete(llm, [{"prompt_token_ids": [5, 6]}], [replace(GREEDY, max_tokens=20)])
    assert events[:4] == ["launch", "launch", "read", "launch"]
    assert events.count("launch") - events.count("read") in (0, 1), "at most one was launched for nothing"


@pytest.mark.parametrize("method", ["draft_model", "eagle", "ngram_gpu"])
def test_who_ends_leaves_a_gap_until_there_are_many(
    interpreted: Engines, by_definition: None, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight two may be missing; then the others begin again in a batch of their own.

    Who has ended has given its blocks back, so nothing may be stored there any more.
    """
    llm = hashing(interpreted, method)
    launch = DeviceBatch.launch

    def checked(batch: DeviceBatch, *args: Any, **kwargs: Any) -> Any:
        launched = launch(batch, *args, **kwargs)
        blocks = set((launched[0].slot_mapping // kwargs["block_size"]).tolist())
        assert blocks.isdisjoint(llm.engine.block_manager._free)
        return launched

    monkeypatch.setattr(DeviceBatch, "launch", checked)
    lengths = (60, 12, 60, 20, 60, 28, 60, 60)
    params = tuple(replace(SAMPLED, seed=None, max_tokens=length) for length in lengths)
    traffic = Traffic(arrivals=((0, 3),) * 8, params=params, cancelled={}, max_num_seqs=8)
    _, in_parts, _ = play(llm, traffic, whole=False)
    counts: list[int] = []
    start = WholeSteps.start
    monkeypatch.setattr(
        WholeSteps, "start", lambda steps, schedule: (counts.append(len(schedule.scheduled)), start(steps, schedule))[1]
    )
    _, whole, _ = play(llm, traffic, whole=True)
    expected = {record.request_id: record for record in in_parts}
    for record in whole:
        for name in ("token_ids", "tokens_per_step", "num_draft_tokens", "num_accepted_tokens"):
            assert getattr(record, name) == getattr(expected[record.request_id], name), name
    assert counts[0] == 8 and counts[1] < 6


def test_who_arrives_meanwhile_is_let_in_at_once(interpreted: Engines, by_definition: None) -> None:
    llm = hashing(interpreted, "draft_model")
    scheduler = llm.scheduler_for(llm.engine.proposer)
    loop = StepLoop(llm.engine, scheduler, llm.engine.proposer, MetricsCollector(), RequestTraces(lambda *_: "", {}))
    prompts = [{"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [7]}]
    params = [replace(GREEDY, max_tokens=60)] * 2
    first, second = make_requests(prompts, params, llm.engine.tokenizer, 0)
    scheduler.add(first)
    for _ in range(4):
        loop.step()
    scheduler.add(second)
    loop.step()  # reads the one that was under way
    assert second.status is RequestStatus.WAITING
    loop.step()
    assert second.output_token_ids and not first.is_finished
    for request in (first, second):
        scheduler.abort(request)
        llm.engine.proposer.release(request.request_id)


@pytest.mark.parametrize("method", ["none", "draft_model", "eagle", "medusa", "ngram_gpu", "token_recycling"])
def test_whoever_arrives_takes_nobody_into_parts(build: Build, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step in which a request arrived, or a long prompt went on, ran in parts for all that decoded."""
    llm = build(method, max_num_batched_tokens=28, max_num_seqs=4)
    decoding_in_parts, num_in_parts = list[InParts](), 0
    in_parts = StepLoop._in_parts

    def noted(loop: StepLoop, schedule: Schedule, reason: InParts, started: float) -> list[CommittedTokens]:
        nonlocal num_in_parts
        num_in_parts += 1
        if schedule.decoding:
            decoding_in_parts.append(reason)
        return in_parts(loop, schedule, reason, started)

    monkeypatch.setattr(StepLoop, "_in_parts", noted)
    arrivals = ((0, 3), (4, 60), (5, 4), (12, 80), (14, 2))
    traffic = Traffic(
        arrivals=arrivals, params=(replace(GREEDY, max_tokens=40, ignore_eos=True),) * 5, cancelled={}, max_num_seqs=4
    )
    found, _, num_whole = play(llm, traffic, whole=True)
    assert set(decoding_in_parts) <= {InParts.CATCH_UP} and len(decoding_in_parts) <= 1
    assert num_in_parts >= 6 and num_whole > 12, "prompts of one to three chunks, and those that decode between them"
    expected, _, _ = play(llm, traffic, whole=False)
    assert [request.output_token_ids for request in found] == [request.output_token_ids for request in expected]


CHAINS = ("draft_model", "eagle", "p_eagle", "pard", "dflash", "dspark", "medusa", "mlp_speculator", "early_exit")
TREES = ("eagle_dynamic", "eagle_static", "dflash_dynamic", "dflash_static", "dspark_dynamic", "dspark_static")
WITH_PASSES = {
    **{method: METHODS[method] for method in (*CHAINS, *TREES)},
    "eagle_one_draft": {"method": "eagle", "num_speculative_tokens": 1},
    "eagle_one_level": {"method": "eagle", "num_speculative_tokens": 2, "speculative_token_tree": [[0], [1]]},
    "sparse_kv": {"method": "sparse_kv", "num_speculative_tokens": 3},
}


@pytest.mark.parametrize("method", WITH_PASSES)
def test_memory_of_a_recorded_step_is_free_for_the_next_recording(
    engines: Engines, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafters kept what their last pass had given, and so its memory, until they drafted again."""
    llm = engines(WITH_PASSES[method])
    for steps in llm.engine.whole_steps.values():
        steps.cache_clear()
    record, said, num_recorded = programs.record_prepared, set[int](), 0

    def noted(compute: Compute, inputs: Tensors, *, pool: Pool) -> Graph:
        nonlocal num_recorded
        graph = record(compute, inputs, pool=pool)
        num_recorded += 1
        said.update(output.untyped_storage()._cdata for output in graph.outputs)
        assert {own.key for blocks in pool._blocks.values() for own in blocks if not own.is_free} <= said
        return graph

    monkeypatch.setattr(programs, "record_prepared", noted)
    complete(llm, [{"prompt_token_ids": [5, 6]}], [GREEDY])
    assert num_recorded > 0


def test_a_run_counts_its_whole_steps_and_notes_why_others_were_none(
    interpreted: Engines, by_definition: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HashingModel, "is_row_invariant", True, raising=False)
    llm = hashing(interpreted, "none")
    greedy = {"temperature": 0.0, "ignore_eos": True}
    measured = measure(
        llm,
        [
            WorkloadItem(prompt={"prompt_token_ids": [5, 6]}, sampling={**greedy, "max_tokens": 20}),
            WorkloadItem(prompt={"prompt_token_ids": [7]}, sampling={**greedy, "max_tokens": 5, "logprobs": -1}),
        ],
    )
    numbers, points = measured.summary, measured.metrics.step_points
    assert (numbers["num_steps"], numbers["num_decoding_steps"], numbers["num_whole_steps"]) == (20, 19, 15)
    assert numbers["steps_in_parts"] == {"logprobs": 4}
    assert numbers["whole_step_share"] == 15 / 19
    assert [point.is_whole for point in points] == [None, *[False] * 4, *[True] * 15]
    assert any("4 of 19 decoding steps ran in parts" in note and "logprobs" in note for note in numbers["notes"])
