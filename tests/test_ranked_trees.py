"""Trees over ranked candidates, drafted by Medusa: nodes are those of a rewrite, text and distribution stay."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from proposers.drafting.ranked_trees import RankedTrees
from runner.engine.draft_trees import tree_shape
from runner.engine.errors import UserError
from runner.engine.request import DraftTokens, Request
from runner.engine.row_sampling import GREEDY_SHARPNESS
from runner.engine.sampling_params import SamplingParams
from runner.engine.schedule import Schedule
from runner.llm import LLM
from tests.conftest import Engines, complete
from tests.last_state_reference import PROMPTS as TARGET_PROMPTS
from tests.last_state_reference import Target, save_head, save_target
from tests.test_every_cell import ALPHA, NUM_REQUESTS, PROMPT, exact_distribution, p_value, sampling_params
from tests.test_every_cell import engine as six_token_engine
from tests.test_losslessness import (
    PARAMS,
    PROMPTS,
    ROOMY,
    SCHEDULES,
    answers,
    counts,
    method_config,
)
from tests.test_medusa import LAYOUTS, NUM_HEADS, reference_logits
from tests.test_structured_outputs import PARAMS as FORM_PARAMS
from tests.test_structured_outputs import WORKLOAD

CHOICES = ((0,), (0, 0), (1,), (0, 1), (0, 0, 0), (2,), (1, 0), (3,), (0, 0, 1), (2, 0))
GAPS = ((1,), (3,), (1, 2), (3, 0), (3, 2))  # ranks are left out
TINY: dict[str, Any] = {"device": "cpu", "num_gpu_blocks_override": 320}  # 30 MB of KV, not 400
TREES: dict[str, Any] = {"static": CHOICES, "gaps": GAPS, "dynamic": "dynamic"}


def medusa(tree: str | None, num_speculative_tokens: int, **keys: Any) -> dict[str, Any]:
    keys["speculative_token_tree"] = None if tree is None else TREES[tree]
    return method_config("medusa", num_speculative_tokens, **keys)


# --- the nodes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tree:
    """What a step drafted for a request."""

    token_ids: list[int]  # committed
    paths: list[tuple[int, ...]]  # tokens on the way to each node


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return save_target(tmp_path_factory.mktemp("target"))


def trees_of_a_run(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: str, num_nodes: int
) -> list[Tree]:
    """All trees of greedy requests."""
    directory = save_head(tmp_path / "head", *LAYOUTS["FasterDecoding"])
    method = {"model": str(directory), **medusa(tree, num_nodes)}
    llm = LLM(str(target.directory), enforce_eager=True, device="cpu", speculative_config=method, max_num_seqs=3)
    recorded: list[Tree] = []
    propose = llm.engine.proposer.propose

    def recording_propose(schedule: Schedule) -> DraftTokens:
        drafts = propose(schedule)
        for item, start, parents in zip(schedule.decoding, drafts.cu_num_draft_tokens, drafts.parents, strict=False):
            tokens = drafts.token_ids.tolist()[start:]
            paths = [tuple(tokens[node] for node in path) for path in tree_shape(parents or ()).paths]
            committed = item.request.tokens_between(0, item.request.num_tokens)
            recorded.append(Tree(token_ids=committed, paths=paths))
        return drafts

    monkeypatch.setattr(llm.engine.proposer, "propose", recording_propose)
    complete(llm, TARGET_PROMPTS, [SamplingParams(temperature=0.0, max_tokens=18, ignore_eos=True)] * 4)
    return [own for own in recorded if own.paths]


def exact_probs(target: Target, token_ids: list[int]) -> list[torch.Tensor]:
    """Of every head, [vocab] float64, as greedy requests' trees take them."""
    state = target.exact_state(token_ids[:-1])[None]
    target_head = target.model.lm_head.weight.detach()
    logits = [reference_logits("FasterDecoding", h, state, target_head)[0] for h in range(NUM_HEADS)]
    return [(GREEDY_SHARPNESS * own).softmax(0) for own in logits]


def test_a_static_tree_holds_the_ranks_that_its_choices_name(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = trees_of_a_run(target, tmp_path, monkeypatch, "static", 10)
    assert {len(own.paths) for own in trees} >= {10, 3}, "whole ones, and short ones before max_tokens"
    for own in trees:
        ranked = [row.argsort(descending=True).tolist() for row in exact_probs(target, own.token_ids)]
        expected = [
            tuple(ranked[depth][rank] for depth, rank in enumerate(choice)) for choice in CHOICES[: len(own.paths)]
        ]
        assert set(own.paths) == set(expected)


def test_a_dynamic_tree_holds_the_most_probable_nodes(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By brute force over the float64 distributions; the shape differs from step to step."""
    trees = trees_of_a_run(target, tmp_path, monkeypatch, "dynamic", 9)
    assert len({tuple(sorted(map(len, own.paths))) for own in trees if len(own.paths) == 9}) > 1
    for own in trees:
        probs = [row.tolist() for row in exact_probs(target, own.token_ids)]
        likely = [sorted(range(len(row)), key=lambda token, row=row: -row[token])[:9] for row in probs]  # type: ignore[misc]
        nodes = {
            path: math.prod(probs[depth][token] for depth, token in enumerate(path))
            for length in range(1, NUM_HEADS + 1)
            for path in itertools.product(*likely[:length])
        }
        expected = sorted(nodes, key=lambda path: -nodes[path])[: len(own.paths)]
        assert set(own.paths) == set(expected)


def test_choices_deeper_than_the_heads_or_wider_than_the_vocabulary_are_refused(engines: Engines) -> None:
    deep = tuple((0,) * depth for depth in range(1, 7))
    with pytest.raises(UserError, match=r"must be at most 5 deep with this drafter, got \[0, 0, 0, 0, 0, 0\]; "):
        engines(method_config("medusa", 6, speculative_token_tree=deep), **ROOMY)
    with pytest.raises(UserError, match="must hold ranks below 64, the vocabulary's size, got 64; "):
        engines(method_config("medusa", 6, speculative_token_tree=((64,),)), **ROOMY)


def test_a_dynamic_tree_of_drawn_candidates_is_refused_under_a_rule_that_reads_draft_probs(engines: Engines) -> None:
    rule = {"rejection_sample_method": "probabilistic", "draft_sample_method": "probabilistic"}
    with pytest.raises(UserError, match=r"draft_sample_method must be greedy .* got 'probabilistic': the shape"):
        engines(medusa("dynamic", 4, **rule), **ROOMY)
    rule = {"rejection_sample_method": "probabilistic"}
    assert engines(medusa("dynamic", 4, **rule), **ROOMY).config.method.draft_sample_method == "greedy", "left open"


# --- the text -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft_sample_method", "num_speculative_tokens"),
    [("greedy", 7), ("probabilistic", 7), ("coupled", 2), ("coupled", 16)],
)
@pytest.mark.parametrize("tree", TREES)
def test_a_tree_changes_no_token(
    engines: Engines, plain: list[Request], tree: str, draft_sample_method: str, num_speculative_tokens: int
) -> None:
    rule = {"rejection_sample_method": "strict", "draft_sample_method": draft_sample_method}
    config = medusa(tree, num_speculative_tokens, **rule)
    requests, metrics = complete(engines(config, **ROOMY), PROMPTS, PARAMS)
    assert answers(requests) == answers(plain)
    drafted, accepted = counts(metrics)
    assert 0 < accepted < drafted


@pytest.mark.parametrize("schedule", ["one request at a time", "few blocks of 32, small chunks"])
@pytest.mark.parametrize("tree", TREES)
def test_under_no_schedule_does_a_tree_change_a_token(
    engines: Engines, plain: list[Request], tree: str, schedule: str
) -> None:
    num_nodes = 4 if "chunks" in schedule else 7
    requests, _ = complete(engines(medusa(tree, num_nodes), **SCHEDULES[schedule]), PROMPTS, PARAMS)
    assert answers(requests) == answers(plain)


@pytest.mark.parametrize(("tree", "draft_sample_method"), [("static", "probabilistic"), ("dynamic", "greedy")])
def test_at_temperature_zero_a_tree_under_the_probabilistic_rule_changes_no_token(
    engines: Engines, tree: str, draft_sample_method: str
) -> None:
    greedy = [SamplingParams(temperature=0.0, max_tokens=20, frequency_penalty=0.1 * i) for i in range(len(PROMPTS))]
    expected, _ = complete(engines(**ROOMY), PROMPTS, greedy)
    rule = {"rejection_sample_method": "probabilistic", "draft_sample_method": draft_sample_method}
    requests, _ = complete(engines(medusa(tree, 7, **rule), num_gpu_blocks_override=11, **ROOMY), PROMPTS, greedy)
    assert answers(requests) == answers(expected)


@pytest.mark.parametrize("tree", ["static", "dynamic"])
def test_a_tree_takes_fewer_steps_than_the_chain_it_holds(engines: Engines, tree: str) -> None:
    """Of greedy requests: the static tree's first path is the chain of three; the dynamic one is better than that."""
    greedy = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)] * len(PROMPTS)
    num_steps = {}
    for name, config in (("chain", medusa(None, 3)), ("tree", medusa(tree, 10))):
        _, metrics = complete(engines(config, **ROOMY), PROMPTS, greedy)
        num_steps[name] = sum(len(record.tokens_per_step) for record in metrics.records)
    assert num_steps["tree"] < num_steps["chain"]


@pytest.fixture(scope="module")
def plain_forms() -> list[Request]:
    return complete(LLM("tiny", **TINY), WORKLOAD, FORM_PARAMS)[0]


@pytest.mark.parametrize("tree", ["static", "dynamic"])
def test_constrained_outputs_keep_their_text_and_have_chains(
    plain_forms: list[Request], tree: str, tmp_path: Path
) -> None:
    """On the tiny target, through heads that guess what it has just said."""
    tensors = {f"{h}.0.linear.{part}": torch.zeros((256, 256) if part == "weight" else 256)
               for h in range(4) for part in ("weight", "bias")}  # fmt: skip
    config = {"medusa_num_heads": 4, "medusa_num_layers": 1, "version": "2"}
    head = save_head(tmp_path / "head", config, tensors, "medusa_lm_head.pt")
    llm = LLM("tiny", **TINY, speculative_config={**medusa(tree, 10), "model": str(head)})
    requests, metrics = complete(llm, WORKLOAD, FORM_PARAMS)
    assert answers(requests) == answers(plain_forms)
    assert counts(metrics)[1] > 0


# --- the distribution ------------------------------------------------------------------------------------------------

RULES = {
    "drawn without replacement": ("static", "probabilistic"),
    "drawn, with ranks left out": ("gaps", "probabilistic"),  # distributions are given the draws before, drafted or not
    "drawn with the target's noise": ("static", "coupled"),
    "a set of candidates": ("static", "greedy"),
    "a set whose shape is dynamic": ("dynamic", "greedy"),
}


@pytest.mark.parametrize(
    ("candidates", "sampler"),
    [
        ("drawn without replacement", "penalties, bias"),
        ("drawn, with ranks left out", "top-k, top-p, min-p"),
        ("drawn with the target's noise", "penalties, bias"),
        ("a set of candidates", "penalties, bias"),
        ("a set whose shape is dynamic", "temperature"),
    ],
)
def test_under_the_probabilistic_rule_a_tree_keeps_the_distribution(
    engines: Engines, candidates: str, sampler: str
) -> None:
    """Over several steps: the joint distribution of three tokens; ancestors beside the first branch are penalised.

    Behind the first token there is room for the whole tree: drafts are counted in nodes.
    """
    tree, draft_sample_method = RULES[candidates]
    keys = {"rejection_sample_method": "probabilistic", "draft_sample_method": draft_sample_method}
    llm = six_token_engine(engines, medusa(tree, 7, **keys))
    params = sampling_params(sampler, NUM_REQUESTS, num_tokens=9)
    requests, metrics = complete(llm, [PROMPT], [params])
    assert 0 < metrics.num_accepted_tokens < sum(point.num_draft_tokens for point in metrics.step_points)
    assert p_value(requests, exact_distribution(llm, params)) > ALPHA


def test_siblings_bring_the_distributions_they_were_drawn_from(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node's distribution is its depth's without its earlier siblings; check_drafts looks at it in every step."""
    seen: list[DraftTokens] = []
    propose = RankedTrees.propose

    def recording(self: RankedTrees, schedule: Schedule) -> DraftTokens:
        seen.append(propose(self, schedule))
        return seen[-1]

    monkeypatch.setattr(RankedTrees, "propose", recording)
    complete(engines(medusa("static", 7, rejection_sample_method="probabilistic"), **ROOMY), PROMPTS, PARAMS)
    num_compared = 0
    for drafts in seen:
        if drafts.probs is None:
            continue
        for start, shape in zip(drafts.cu_num_draft_tokens, drafts.shapes, strict=False):
            for siblings in shape.children:
                probs = [drafts.probs[start + node].double() for node in siblings]
                tokens = [int(drafts.token_ids[start + node]) for node in siblings]
                for rank in range(1, len(probs)):
                    rest = probs[0].clone()
                    rest[tokens[:rank]] = 0
                    if rest.sum() > 1e-3:
                        assert torch.allclose(probs[rank], rest / rest.sum(), atol=1e-5)
                        num_compared += 1
    assert num_compared > 50
