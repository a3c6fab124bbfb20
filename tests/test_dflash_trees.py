"""Trees from one DFlash block: the most probable nodes by a rewrite's probs (DDTree, arXiv 2604.12989), or choices."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.engine.draft_trees import tree_shape
from runner.engine.request import DraftTokens, Request
from runner.engine.row_sampling import GREEDY_SHARPNESS
from runner.engine.schedule import Schedule
from runner.llm import LLM
from tests import test_losslessness as lossless
from tests import test_ranked_trees as ranked
from tests.conftest import Engines, complete
from tests.one_pass_reference import PARAMS, PROMPTS, TIGHT, Target, save_target
from tests.test_dflash import BLOCK, LAYOUTS, reference_logits, save_head
from tests.test_every_cell import ALPHA, NUM_REQUESTS, PROMPT, engine, exact_distribution, p_value, sampling_params
from tests.transformers_reference import KeepFloat64, in_float64

CHOICES = ((0,), (1,), (0, 0), (0, 1), (2,), (1, 0), (0, 0, 0), (0, 0, 1))


@dataclass(frozen=True, kw_only=True)
class Tree:
    """What a step drafted for a request."""

    token_ids: list[int]  # committed
    paths: list[tuple[int, ...]]  # tokens on the way to each node


def trees_of_a_run(
    target: Target, head: str, monkeypatch: pytest.MonkeyPatch, num_nodes: int, tree: Any, *, keys: Any = None
) -> list[Tree]:
    """All trees of greedy requests, whose text is checked to be plain decoding's."""
    options = {"device": "cpu", **TIGHT, "max_num_batched_tokens": 53}
    plain, _ = complete(LLM(str(target.directory), device="cpu"), PROMPTS, PARAMS)
    method = {"method": "dflash", "model": head, "num_speculative_tokens": num_nodes, "speculative_token_tree": tree}
    method |= keys or {}
    llm = LLM(str(target.directory), enforce_eager=True, speculative_config=method, **options)
    recorded: list[Tree] = []
    propose = llm.engine.proposer.propose

    def recording_propose(schedule: Schedule) -> DraftTokens:
        drafts = propose(schedule)
        tokens = drafts.token_ids.tolist()
        for item, start, parents in zip(schedule.decoding, drafts.cu_num_draft_tokens, drafts.parents, strict=False):
            if parents:
                paths = [tuple(tokens[start + node] for node in path) for path in tree_shape(parents).paths]
                committed = item.request.tokens_between(0, item.request.num_tokens)
                recorded.append(Tree(token_ids=committed, paths=paths))
        return drafts

    monkeypatch.setattr(llm.engine.proposer, "propose", recording_propose)
    requests, _ = complete(llm, PROMPTS, PARAMS)
    assert [request.output_token_ids for request in requests] == [request.output_token_ids for request in plain]
    assert any(request.num_preemptions for request in requests)
    assert len(recorded) > 20 and max(len(own.paths) for own in recorded) == num_nodes
    return recorded


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def head(tmp_path: Path) -> str:
    return save_head(tmp_path / "head", *LAYOUTS["z-lab"])


def exact_probs(model: Any, token_ids: list[int], num_rows: int) -> list[list[float]]:
    """Of every depth, [num_rows][vocab], as greedy requests' trees take them; model: the target in float64."""
    with KeepFloat64():
        logits = reference_logits("z-lab", model, token_ids, num_rows, [1, 2])
        probs = (GREEDY_SHARPNESS * logits).softmax(dim=-1)
    assert probs.dtype is torch.float64
    return probs.tolist()  # type: ignore[no-any-return]


def test_a_dynamic_tree_holds_the_most_probable_nodes_of_one_block(
    target: Target, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By brute force over the distributions of a float64 rewrite; a block is as long as a tree can be deep."""
    num_nodes = 7
    trees = trees_of_a_run(target, head, monkeypatch, num_nodes, "dynamic")
    model = in_float64(target.model)
    depths = set()
    for own in trees:
        probs = exact_probs(model, own.token_ids, min(len(own.paths), BLOCK - 1))
        likely = [sorted(range(len(row)), key=row.__getitem__, reverse=True)[: len(own.paths)] for row in probs]
        nodes = {
            path: math.prod(probs[depth][token] for depth, token in enumerate(path))
            for length in range(1, len(probs) + 1)
            for path in itertools.product(*likely[:length])
        }
        assert set(own.paths) == set(sorted(nodes, key=nodes.__getitem__, reverse=True)[: len(own.paths)])
        depths.add(max(map(len, own.paths)))
    assert len(depths) > 1


def test_a_static_tree_holds_the_ranks_that_its_choices_name(
    target: Target, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = trees_of_a_run(target, head, monkeypatch, len(CHOICES), CHOICES)
    model = in_float64(target.model)
    for own in trees:
        choices = CHOICES[: len(own.paths)]
        probs = exact_probs(model, own.token_ids, max(map(len, choices)))
        ranked = [sorted(range(len(row)), key=row.__getitem__, reverse=True) for row in probs]
        assert set(own.paths) == {tuple(ranked[depth][rank] for depth, rank in enumerate(path)) for path in choices}


def dflash(tree: str, num_speculative_tokens: int, **keys: Any) -> dict[str, Any]:
    shape = ranked.TREES[tree]
    return lossless.method_config("dflash", num_speculative_tokens, speculative_token_tree=shape, **keys)


@pytest.mark.parametrize(
    ("draft_sample_method", "num_nodes", "schedule"),
    [
        ("greedy", 16, lossless.ROOMY),
        ("coupled", 9, lossless.ROOMY),
        ("probabilistic", 4, lossless.SCHEDULES["few blocks of 32, small chunks"]),
        ("coupled", 7, lossless.SCHEDULES["few blocks"]),
    ],
)
@pytest.mark.parametrize("tree", ranked.TREES)
def test_a_tree_changes_no_token(
    engines: Engines,
    plain: list[Request],
    tree: str,
    draft_sample_method: str,
    num_nodes: int,
    schedule: dict[str, Any],
) -> None:
    """Of greedy and sampled requests of every kind, in one batch."""
    config = dflash(tree, num_nodes, rejection_sample_method="strict", draft_sample_method=draft_sample_method)
    llm = engines(config, **schedule)
    requests, metrics = complete(llm, lossless.PROMPTS, lossless.PARAMS)
    assert lossless.answers(requests) == lossless.answers(plain)
    drafted, accepted = lossless.counts(metrics)
    assert 0 < accepted < drafted


@pytest.mark.parametrize(
    ("candidates", "sampler"),
    [
        ("drawn without replacement", "penalties, bias"),
        ("drawn with the target's noise", "top-k, top-p, min-p"),
        ("a set whose shape is dynamic", "temperature"),
    ],
)
def test_under_the_probabilistic_rule_a_tree_keeps_the_distribution(
    engines: Engines, candidates: str, sampler: str
) -> None:
    """Over several steps: the joint distribution of three tokens, by chi-square."""
    tree, draft_sample_method = ranked.RULES[candidates]
    rule = {"rejection_sample_method": "probabilistic", "draft_sample_method": draft_sample_method}
    llm = engine(engines, dflash(tree, 7, **rule))
    params = sampling_params(sampler, NUM_REQUESTS // 2)
    requests, metrics = complete(llm, [PROMPT], [params])
    assert 0 < metrics.num_accepted_tokens < sum(point.num_draft_tokens for point in metrics.step_points)
    assert p_value(requests, exact_distribution(llm, params)) > ALPHA
