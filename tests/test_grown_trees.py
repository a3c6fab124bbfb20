"""Trees of heads over hidden states: the nodes that EAGLE-2 and static choices mean, and the target's own text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.reference.philox import Stream, gumbel
from runner.engine.errors import UserError
from runner.engine.request import Request
from runner.engine.row_sampling import GREEDY_SHARPNESS
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM
from tests.conftest import Engines, complete
from tests.eagle_reference import ReferenceHead
from tests.test_eagle import LAYOUTS, PARAMS, PROMPTS, SCHEDULES, make_head, target_states
from tests.test_eagle import target as target
from tests.test_every_cell import NUM_REQUESTS, PROMPT, exact_distribution, p_value, sampling_params
from tests.test_every_cell import engine as small_engine
from tests.test_losslessness import PARAMS as MIXED_PARAMS
from tests.test_losslessness import PROMPTS as MIXED_PROMPTS
from tests.test_losslessness import ROOMY, answers, counts
from tests.test_losslessness import SCHEDULES as MIXED_SCHEDULES
from tests.transformers_reference import KeepFloat64, in_float64

METHODS = ("eagle", "eagle3", "mtp")
STATIC = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]]
TREES: dict[str, dict[str, Any]] = {
    "static": {"speculative_token_tree": STATIC, "num_speculative_tokens": 8},
    "dynamic": {"speculative_token_tree": "dynamic", "tree_depth": 3, "tree_top_k": 3, "num_speculative_tokens": 8},
}
ONE_LEVEL = {"speculative_token_tree": "dynamic", "tree_depth": 1, "tree_top_k": 3, "num_speculative_tokens": 4}
Nodes = tuple[int, ...]  # tokens from a child of the pending token to a node

Distributions = Callable[[Nodes], torch.Tensor]  # path -> [vocab], what candidates behind it are ranked by


def static_nodes(probs: Distributions, num_nodes: int) -> set[Nodes]:
    nodes = {}
    for path in map(tuple, STATIC[:num_nodes]):
        before = nodes[path[:-1]] if len(path) > 1 else ()
        nodes[path] = (*before, int(probs(before).sort(descending=True).indices[path[-1]]))
    return set(nodes.values())


def dynamic_nodes(probs: Distributions, num_nodes: int) -> set[Nodes]:
    """EAGLE-2: expand the best of each level, then take the best of all (arXiv 2406.16858)."""
    depth, top_k = TREES["dynamic"]["tree_depth"], TREES["dynamic"]["tree_top_k"]
    score: dict[Nodes, float] = {(): 0.0}
    frontier: list[Nodes] = [()]
    for _ in range(min(depth, num_nodes)):
        level = {}
        for path in frontier:
            best = probs(path).log_softmax(-1).sort(descending=True)
            for value, token in zip(best.values[:top_k].tolist(), best.indices[:top_k].tolist(), strict=True):
                if value > -torch.inf:
                    level[*path, token] = score[path] + value
        score |= level
        frontier = sorted(level, key=lambda path: -level[path])[:top_k]
    del score[()]
    return set(sorted(score, key=lambda path: -score[path])[:num_nodes])


@pytest.mark.parametrize("schedule", ["room for everything", "chunks, few blocks"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", ["EAGLE of vLLM, two layers", "EAGLE-3 of SafeAILab"])
def test_the_nodes_are_those_of_a_whole_recompute_in_float64(
    target: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, tree: str, schedule: str
) -> None:
    """Every path is a text of its own there; candidates of sampled requests are ranked with the target's noise."""
    layout, (directory, model) = LAYOUTS[name], target
    head = make_head(layout, model, tmp_path).to(torch.float64)
    keys = {"max_num_batched_tokens": 27} if "chunks" in schedule else {}
    llm = LLM(
        str(directory),
        speculative_config={"method": layout.method, "model": str(tmp_path), **TREES[tree]},
        device="cpu",
        dtype="float32",
        enforce_eager=True,
        **SCHEDULES[schedule] | keys,
    )
    drafted: list[tuple[Request, list[int], set[Nodes]]] = []
    propose = llm.engine.proposer.propose

    def propose_and_keep(schedule: Any) -> Any:
        drafts = propose(schedule)
        chunks = drafts.token_ids.split(drafts.num_draft_tokens)
        for item, ids, shape in zip(schedule.decoding, chunks, drafts.shapes, strict=True):
            nodes = {tuple(ids[list(path)].tolist()) for path in shape.paths}
            assert len(nodes) == len(ids) == item.max_draft_tokens
            drafted.append((item.request, item.request.tokens_between(0, item.request.num_tokens), nodes))
        return drafts

    monkeypatch.setattr(llm.engine.proposer, "propose", propose_and_keep)
    requests, metrics = complete(llm, PROMPTS, PARAMS)
    assert any(request.num_preemptions for request in requests) == ("few blocks" in schedule)
    plain, _ = complete(LLM(str(directory), device="cpu", dtype="float32"), PROMPTS, PARAMS)
    assert answers(requests) == answers(plain)
    states = {}
    with KeepFloat64():
        for request in requests:
            token_ids = request.tokens_between(0, request.num_tokens)
            states[request.request_id] = target_states(in_float64(model), token_ids, layout)
    for request, token_ids, nodes in drafted[::3]:
        probs = ranked_by(head, request, token_ids, states[request.request_id][: len(token_ids) - 1])
        expected = (static_nodes if tree == "static" else dynamic_nodes)(probs, len(nodes))
        assert nodes == expected
    assert metrics.num_accepted_tokens > 0


def ranked_by(head: ReferenceHead, request: Request, token_ids: list[int], states: torch.Tensor) -> Distributions:
    seen: dict[Nodes, torch.Tensor] = {}

    def probs(path: Nodes) -> torch.Tensor:
        if path not in seen:
            logits = head.draft_logits(token_ids, states, list(path))[-1]
            if (params := request.sampling_params).is_greedy:
                logits = GREEDY_SHARPNESS * logits
            else:
                position = torch.tensor([len(token_ids) + len(path)])
                noise = gumbel(torch.tensor([request.seed]), position, Stream.TARGET, vocab_size=len(logits))
                logits = logits / params.temperature + noise[0]
            seen[path] = logits
        return seen[path]

    return probs


@pytest.fixture(scope="module")
def plain(engines: Engines) -> list[tuple[Any, ...]]:
    return answers(complete(engines(**ROOMY), MIXED_PROMPTS, MIXED_PARAMS)[0])


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("method", METHODS)
def test_trees_change_no_token(engines: Engines, plain: list[tuple[Any, ...]], method: str, tree: str) -> None:
    """Requests of every kind, those with penalties among them, whose candidates see their own ancestors only."""
    for draft_sample_method in ("greedy", "coupled"):
        config = {"method": method, "draft_sample_method": draft_sample_method, **TREES[tree]}
        requests, metrics = complete(engines(config, **ROOMY), MIXED_PROMPTS, MIXED_PARAMS)
        assert answers(requests) == plain
        drafted, accepted = counts(metrics)
        assert 0 < accepted < drafted


@pytest.mark.parametrize("schedule", ["odd chunks", "few blocks"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_under_no_schedule_do_trees_change_a_token(
    engines: Engines, plain: list[tuple[Any, ...]], method: str, tree: str, schedule: str
) -> None:
    engine_args = dict(MIXED_SCHEDULES[schedule])
    engine_args["max_num_batched_tokens"] = max(engine_args["max_num_batched_tokens"], 9 * 7)
    requests, metrics = complete(engines({"method": method, **TREES[tree]}, **engine_args), MIXED_PROMPTS, MIXED_PARAMS)
    assert answers(requests) == plain
    assert any(request.num_preemptions for request in requests) == (schedule == "few blocks")
    assert counts(metrics)[1] > 0


@pytest.mark.parametrize("sampler", ["penalties, bias"])
@pytest.mark.parametrize(("tree", "draft_sample_method"), [("static", None), ("static", "coupled"), ("dynamic", None)])
def test_under_the_probabilistic_rule_trees_keep_the_distribution(
    engines: Engines, tree: str, draft_sample_method: str | None, sampler: str
) -> None:
    """Candidates of static trees are drawn without replacement and have probs; those of dynamic ones are not drawn."""
    config = {
        "method": "eagle3", "rejection_sample_method": "probabilistic", "draft_sample_method": draft_sample_method,
        **TREES[tree],
    }  # fmt: skip
    llm = small_engine(engines, config)
    params = sampling_params(sampler, NUM_REQUESTS // 2)
    requests, metrics = complete(llm, [PROMPT], [params])
    assert 0 < metrics.num_accepted_tokens < sum(point.num_draft_tokens for point in metrics.step_points)
    assert p_value(requests, exact_distribution(llm, params)) > 1e-4


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_levels_that_only_greedy_requests_come_to_are_drafted_among_random_ones(engines: Engines, rule: str) -> None:
    """A random request near its end has a shallow tree: behind it no candidate was drawn, and the step raised."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=most, ignore_eos=True)
        for temperature, most in ((0.0, 24), (1.0, 9))
    ]
    prompts = MIXED_PROMPTS[:2]
    (expected, _), _ = complete(engines(), prompts, params)
    config = {"method": "eagle", "rejection_sample_method": rule, "draft_sample_method": "probabilistic"}
    (found, random), metrics = complete(engines({**config, **TREES["static"]}), prompts, params)
    assert found.output_token_ids == expected.output_token_ids and len(random.output_token_ids) == 9
    assert counts(metrics)[1] > 0


def test_nodes_fed_to_the_head_leave_the_blocks_of_requests_alone(engines: Engines) -> None:
    """Many more nodes are fed than drafted: a second run, after other texts, drafts the very same."""
    config = {"method": "eagle", "speculative_token_tree": "dynamic", "tree_depth": 6, "tree_top_k": 8}
    llm = engines({**config, "num_speculative_tokens": 3}, max_num_seqs=3, max_num_batched_tokens=64)
    runs = [complete(llm, MIXED_PROMPTS, MIXED_PARAMS) for _ in range(2)]
    steps = [[(r.request_id, r.num_accepted_tokens) for r in metrics.records] for _, metrics in runs]
    assert steps[0] == steps[1] and llm.engine.proposer.max_fed_nodes == 40


@pytest.mark.parametrize("method", [*METHODS, "hybrid"])
def test_a_tree_of_one_level_feeds_no_node_and_changes_no_token(engines: Engines, method: str) -> None:
    (expected, _), (found, metrics) = (
        complete(engines(config, max_num_seqs=3), MIXED_PROMPTS, MIXED_PARAMS)
        for config in (None, {**ONE_LEVEL, "method": method, **({"drafter": "eagle"} if method == "hybrid" else {})})
    )
    assert answers(found) == answers(expected)
    assert counts(metrics)[1] > 0 and metrics.steps_in_parts.total() < metrics.num_decoding_steps


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"speculative_token_tree": [[0], [70]]}, r"ranks below 64, the vocabulary's size, got 70"),
        (
            {"speculative_token_tree": "dynamic", "rejection_sample_method": "probabilistic",
             "draft_sample_method": "coupled"},
            r"draft_sample_method must be greedy for speculative_token_tree=dynamic",
        ),
    ],
)  # fmt: skip
def test_trees_that_cannot_be_drafted_are_refused(engines: Engines, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        engines({"method": "eagle", **keys})
