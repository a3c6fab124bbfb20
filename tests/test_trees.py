"""Draft trees through the whole engine: plain decoding's tokens, logprobs and cached bits, in the steps they imply.

The proposers know the text and hide it in trees (tests/proposers_for_tests.py). What a rule makes of a tree is told in
tests/test_tree_rules.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proposers.trees.draft_tree import depth_first
from runner.engine.constrained_drafts import keep_first_paths
from runner.engine.draft_trees import tree_shape
from runner.engine.launch import Part
from runner.engine.model_runner import ModelRunner
from runner.engine.request import DraftTokens, Request
from runner.engine.sampling_params import SamplingParams
from runner.outputs import Vector
from tests.conftest import Engines, complete
from tests.decoding_steps import schedule_of
from tests.test_logprobs import PARAMS as LOGPROB_PARAMS
from tests.test_logprobs import told
from tests.test_losslessness import PARAMS, PROMPTS, ROOMY, SCHEDULES, answers, counts, tell_test_proposers
from tests.test_row_invariance import DTYPES, MODELS, clear, part, requests_with_blocks, runner_of
from tests.test_structured_outputs import PARAMS as FORM_PARAMS
from tests.test_structured_outputs import WORKLOAD, Tiny
from verifier.accepted_path import row_order, slot_moves


def known(proposer: str, num_speculative_tokens: int, **keys: Any) -> dict[str, Any]:
    model = f"tests.proposers_for_tests.{proposer}"
    return {"method": "custom_class", "model": model, "num_speculative_tokens": num_speculative_tokens, **keys}


@pytest.fixture
def reference(plain: list[Request]) -> list[tuple[Any, ...]]:
    tell_test_proposers(plain)
    return answers(plain)


# --- the text -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_speculative_tokens", [4, 16])
@pytest.mark.parametrize("proposer", ["RandomTreeProposer", "BushProposer"])
def test_trees_change_no_token(
    engines: Engines, reference: list[tuple[Any, ...]], proposer: str, num_speculative_tokens: int
) -> None:
    requests, metrics = complete(engines(known(proposer, num_speculative_tokens), **ROOMY), PROMPTS, PARAMS)
    assert answers(requests) == reference
    drafted, accepted = counts(metrics)
    assert 0 < accepted < drafted or (proposer, num_speculative_tokens) == ("BushProposer", 2)


LARGE = {
    "few blocks, large trees": {"num_gpu_blocks_override": 8, **ROOMY},
    "few blocks, large trees, chunks": {
        "num_gpu_blocks_override": 8, "max_num_seqs": 6, "max_num_batched_tokens": 102,
    },
}  # fmt: skip


@pytest.mark.parametrize("schedule", [*SCHEDULES, *LARGE])
def test_under_no_schedule_do_trees_change_a_token(
    engines: Engines, reference: list[tuple[Any, ...]], schedule: str
) -> None:
    num_nodes = 16 if schedule in LARGE else 4
    llm = engines(known("RandomTreeProposer", num_nodes), **{**SCHEDULES, **LARGE}[schedule])
    requests, metrics = complete(llm, PROMPTS, PARAMS)
    assert answers(requests) == reference
    assert any(request.num_preemptions for request in requests) == ("few blocks" in schedule)
    assert counts(metrics)[1] > 0


@pytest.mark.parametrize("architecture", ["sliding window", "hidden size 96, qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trees_change_no_token_of_other_models(engines: Engines, architecture: str, dtype: str) -> None:
    args: dict[str, Any] = {"architecture": {**MODELS[architecture], "vocab_size": 64}, "dtype": dtype}
    expected, _ = complete(engines(**args, **ROOMY), PROMPTS, PARAMS)
    tell_test_proposers(expected)
    llm = engines(known("RandomTreeProposer", 16), **args, num_gpu_blocks_override=8, **ROOMY)
    requests, metrics = complete(llm, PROMPTS, PARAMS)
    assert answers(requests) == answers(expected)
    assert counts(metrics)[1] > 0 and any(request.num_preemptions for request in requests)


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_at_temperature_zero_every_lossless_rule_says_the_same(engines: Engines, rule: str) -> None:
    """Greedy requests follow the argmax under every rule."""
    greedy = [SamplingParams(temperature=0.0, max_tokens=20, frequency_penalty=0.1 * i) for i in range(len(PROMPTS))]
    expected, _ = complete(engines(**ROOMY), PROMPTS, greedy)
    tell_test_proposers(expected)
    llm = engines(known("RandomTreeProposer", 8, rejection_sample_method=rule), **ROOMY)
    requests, metrics = complete(llm, PROMPTS, greedy)
    assert answers(requests) == answers(expected)
    assert counts(metrics)[1] > 0


def test_candidates_without_distributions_keep_the_very_tokens_under_the_probabilistic_rule(
    engines: Engines, reference: list[tuple[Any, ...]]
) -> None:
    """Bushes always branch, so they are verified by the target's own draws; short ends without a tree have none."""
    llm = engines(known("BushProposer", 8, rejection_sample_method="probabilistic"), **ROOMY)
    requests, metrics = complete(llm, PROMPTS, PARAMS)
    assert answers(requests) == reference
    assert counts(metrics)[1] > 0


def test_trees_change_no_bit_of_a_logprob(engines: Engines) -> None:
    asking = PROMPTS[: len(LOGPROB_PARAMS)]
    expected, _ = complete(engines(**ROOMY), asking, LOGPROB_PARAMS)
    tell_test_proposers(expected)
    for proposer in ("RandomTreeProposer", "BushProposer"):
        requests, metrics = complete(engines(known(proposer, 11), **ROOMY), asking, LOGPROB_PARAMS)
        assert told(requests) == told(expected)
        assert counts(metrics)[1] > 0


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return Tiny()


def test_trees_change_no_token_of_constrained_outputs_and_of_their_neighbours(tiny: Tiny) -> None:
    """A request with a grammar keeps the first path of its tree; bad words see the ancestors of their own branch."""
    params = [
        SamplingParams(
            temperature=p.temperature, top_p=p.top_p, top_k=p.top_k, max_tokens=30, seed=index,
            bad_words=["re", " x", "="], structured_outputs=p.structured_outputs, logit_bias=p.logit_bias,
        )
        for index, p in enumerate(FORM_PARAMS)
    ]  # fmt: skip
    expected, _ = complete(tiny(), WORKLOAD, params)
    tell_test_proposers(expected)
    requests, metrics = complete(tiny(known("RandomTreeProposer", 8)), WORKLOAD, params)
    assert answers(requests) == answers(expected)
    assert counts(metrics)[1] > 0


# --- the steps ------------------------------------------------------------------------------------------------------

STEP_PARAMS = [
    SamplingParams(temperature=0.9 * (i % 2), max_tokens=count, seed=i, ignore_eos=True)
    for i, count in enumerate((1, 5, 17, 23, 40))
]


@pytest.mark.parametrize("num_speculative_tokens", [4, 9, 16])
def test_a_bush_yields_its_depth_and_one_more(engines: Engines, num_speculative_tokens: int) -> None:
    """Each depth's right token is the last of three siblings; a wrong one has the right token for a child in vain."""
    prompts = PROMPTS[: len(STEP_PARAMS)]
    expected, _ = complete(engines(**ROOMY), prompts, STEP_PARAMS)
    tell_test_proposers(expected)
    llm = engines(known("BushProposer", num_speculative_tokens), **ROOMY)
    requests, metrics = complete(llm, prompts, STEP_PARAMS)
    assert answers(requests) == answers(expected)
    for record in metrics.records:
        said = 0
        depths = record.draft_depths
        assert depths is not None
        steps = zip(record.tokens_per_step, record.num_draft_tokens, depths, record.num_accepted_tokens, strict=True)
        for place, (yielded, drafted, depth, accepted) in enumerate(steps):
            room = min(num_speculative_tokens, len(record.token_ids) - said - 1) if place else 0
            assert (drafted, depth) == (4 * (room // 4), room // 4 + (room >= 4))  # in vain it goes one deeper
            assert accepted == room // 4 and yielded == accepted + 1
            said += yielded


def test_positions_are_depths_and_drafted_tokens_are_nodes(engines: Engines) -> None:
    """Bushes of eight nodes, three deep, of which two are accepted, and at the end of a text of four, two deep."""
    prompts = PROMPTS[:3]
    params = [SamplingParams(temperature=0.0, max_tokens=28, ignore_eos=True)] * 3
    expected, _ = complete(engines(**ROOMY), prompts, params)
    tell_test_proposers(expected)
    llm = engines(known("BushProposer", 8), **ROOMY)
    _, metrics = complete(llm, prompts, params)
    summary = metrics.summary(method="custom_class", num_speculative_tokens=8)
    drafts = [draft for record in metrics.records for draft in record.drafts]
    large, small = drafts.count((8, 3, 2)), drafts.count((4, 2, 1))
    assert min(large, small) > 0 and large + small == len(drafts) == summary["num_drafts"]
    assert summary["num_draft_tokens"] == 8 * large + 4 * small
    assert summary["acceptance_rate"] == 0.25
    assert summary["acceptance_per_position"][:4] == [1.0, large / len(drafts), 0.0, 0.0]
    assert summary["conditional_acceptance_per_position"][:4] == [1.0, large / len(drafts), 0.0, None]
    llm.metrics.records[:] = metrics.records
    (accepted,) = (metric for metric in llm.get_metrics() if metric.name.endswith("per_pos"))
    assert isinstance(accepted, Vector) and accepted.values == [len(drafts), large, *[0] * 6]


# --- the bits -------------------------------------------------------------------------------------------------------


def random_parents(draw: st.DrawFn, max_nodes: int) -> list[int]:
    parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(1, max_nodes)))]
    return depth_first(parents)[1] if draw(st.booleans()) else parents


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[int, list[int], list[int], int]]:
    """(prompt length, parents, tokens, the node that ends the accepted path or -1) of some requests."""
    requests = []
    for _ in range(draw(st.integers(1, 3))):
        parents = random_parents(draw, 12)
        tokens = draw(st.lists(st.integers(0, 63), min_size=len(parents), max_size=len(parents)))
        length = draw(st.sampled_from([3, 14, 31, 55, 62, 63, 64, 120]))  # around blocks of 16 and contexts of 64
        requests.append((length, parents, tokens, draw(st.integers(-1, len(parents) - 1))))
    return requests


def kv_before(runner: ModelRunner, request: Request, end: int) -> torch.Tensor:
    assert runner.cache is not None
    places = torch.arange(end)
    slots = torch.tensor(request.block_table)[places // runner.block_size] * runner.block_size
    slots += places % runner.block_size
    return torch.cat([layer.flatten(0, 1)[slots] for layer in runner.cache.layers], dim=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model", ["grouped heads", "sliding window"])
def test_every_path_of_a_tree_has_the_bits_of_a_chain(engines: Engines, model: str, dtype: torch.dtype) -> None:
    """Logits and hidden states of every node, and the cache once an accepted path has moved into its place."""
    runner = runner_of(engines, model, dtype)
    assert runner.cache is not None
    cache = runner.cache
    taps = (0, runner.model.num_layers, -1)

    @settings(max_examples=25)
    @given(batches())
    def check(batch: list[tuple[int, list[int], list[int], int]]) -> None:
        requests = requests_with_blocks(runner, [length for length, *_ in batch], 1)
        block = max(block for request in requests for block in request.block_table)
        for request, (_, parents, *_) in zip(requests, batch, strict=True):
            while len(request.block_table) * runner.block_size < request.num_tokens + len(parents):
                request.block_table.append(block := block + 1)
        clear(runner)
        for request in requests:
            runner.run([part(request, 0, request.num_prompt_tokens)])
        drafts = DraftTokens(
            token_ids=torch.tensor([token for _, _, tokens, _ in batch for token in tokens]),
            cu_num_draft_tokens=[sum(len(b[1]) for b in batch[:count]) for count in range(len(batch) + 1)],
            parent_indices=[parent for _, parents, *_ in batch for parent in parents],
        )
        parts = [
            Part(
                request=request,
                start=request.num_tokens - 1,
                end=request.num_tokens,
                num_draft_tokens=len(parents),
                parent_indices=parents,
                num_logits=len(parents) + 1,
            )
            for request, (_, parents, *_) in zip(requests, batch, strict=True)
        ]
        output = runner.forward(parts, drafts.token_ids, None, taps)
        assert output.hidden_states is not None
        output = replace(output, logits=output.logits.clone())  # the next replay overwrites it
        shapes = [tree_shape(parents) for _, parents, *_ in batch]
        ends = [end for *_, end in batch]
        paths = [shape.paths[end] if end >= 0 else () for shape, end in zip(shapes, ends, strict=True)]
        deepest = max(1, *map(len, paths))
        path = torch.tensor([[*own, *[-1] * (deepest - len(own))] for own in paths])
        order = row_order(path, drafts.first_logits_rows, len(output.logits))
        cache.move(*slot_moves(path, drafts, requests, runner.block_size))
        moved = [
            kv_before(runner, request, request.num_tokens + len(own)).clone()
            for request, own in zip(requests, paths, strict=True)
        ]
        for index, (request, (_, _, tokens, end)) in enumerate(zip(requests, batch, strict=True)):
            first = drafts.first_logits_rows[index]
            for node, nodes in enumerate(shapes[index].paths):
                chain = Part(
                    request=request,
                    start=request.num_tokens - 1,
                    end=request.num_tokens,
                    num_draft_tokens=len(nodes),
                    num_logits=len(nodes) + 1,
                )
                expected = runner.forward([chain], torch.tensor([tokens[n] for n in nodes]), None, taps)
                assert expected.hidden_states is not None
                rows = torch.tensor([first, *(first + 1 + n for n in nodes)])
                assert torch.equal(output.logits[rows], expected.logits)
                assert torch.equal(output.hidden_states[rows], expected.hidden_states)
                if node == end:
                    assert torch.equal(order[first : first + 1 + len(nodes)], rows)
                    assert torch.equal(kv_before(runner, request, request.num_tokens + len(nodes)), moved[index])

    check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_level_behind_cached_levels_has_the_bits_of_a_chain(engines: Engines, dtype: torch.dtype) -> None:
    """As a drafter grows its tree: the nodes before are in the cache, and only the last ones are computed."""
    runner = runner_of(engines, "grouped heads", dtype)
    (request,) = requests_with_blocks(runner, [60], 1)
    request.block_table.append(len(request.block_table) + 1)
    parents, tokens = [-1, -1, 0, 1, 0, 3, 2, 4], [5, 9, 5, 7, 11, 3, 2, 60]
    clear(runner)
    runner.run([part(request, 0, request.num_tokens)])
    end = request.num_tokens
    rows = []
    for first, last in ((0, 2), (2, 5), (5, 8)):
        level = Part(
            request=request,
            start=end,
            end=end,
            num_draft_tokens=last - first,
            parent_indices=parents[:last],
            num_logits=last - first,
        )
        rows.append(runner.run([level], torch.tensor(tokens[first:last])).clone())
    logits = torch.cat(rows)
    for node, nodes in enumerate(tree_shape(parents).paths):
        chain = Part(request=request, start=end, end=end, num_draft_tokens=len(nodes), num_logits=1)
        assert torch.equal(runner.run([chain], torch.tensor([tokens[n] for n in nodes]))[0], logits[node])


def test_the_verifier_hands_over_hidden_states_of_the_accepted_path(engines: Engines, plain: list[Request]) -> None:
    """What a draft head reads after a step of a tree is what it would read after a chain of the accepted tokens."""
    llm = engines(**ROOMY)
    verifier, manager = llm.engine.verifier, llm.engine.block_manager
    request = Request(
        request_id="x",
        prompt_token_ids=plain[0].prompt_token_ids,
        output_token_ids=plain[0].output_token_ids[:4],
        sampling_params=SamplingParams(temperature=0.0),
        seed=0,
    )
    truth = plain[0].output_token_ids[4:7]
    end = request.num_tokens
    assert manager.grow(request.block_table, end + 8)
    llm.engine.target.run([Part(request=request, start=0, end=end - 1)])
    wrong = [(token + 1) % 64 for token in truth]
    tree = DraftTokens(
        token_ids=torch.tensor([wrong[0], truth[1], truth[0], wrong[1], truth[1], truth[2]]),
        cu_num_draft_tokens=[0, 6],
        parent_indices=[-1, 0, -1, 2, 2, 4],
    )
    chain = DraftTokens(token_ids=torch.tensor(truth), cu_num_draft_tokens=[0, 3])
    states = []
    for drafts in (tree, chain):
        output = verifier.verify(schedule_of(request, max_draft_tokens=8), drafts, None, (0, 1, -1))
        assert output.hidden_states is not None and int(output.num_accepted_tokens[0]) == 3
        states.append(output.hidden_states.of(0, 4))
    manager.release(request.block_table)
    assert torch.equal(states[0], states[1])


# --- shapes ---------------------------------------------------------------------------------------------------------


def test_a_tree_is_cut_to_its_first_path_and_its_neighbours_stay() -> None:
    drafts = DraftTokens(
        token_ids=torch.tensor([1, 2, 3, 4, 5, 6, 7]),
        cu_num_draft_tokens=[0, 4, 7],
        probs=torch.arange(7.0).unsqueeze(1).expand(-1, 8),
        parent_indices=[-1, -1, 0, 0, -1, 0, -1],
    )
    cut = keep_first_paths(drafts, {0})
    assert cut.token_ids.tolist() == [1, 3, 5, 6, 7] and cut.cu_num_draft_tokens == [0, 2, 5]
    assert cut.parent_indices == [-1, 0, -1, 0, -1]
    assert cut.probs is not None and cut.probs[:, 0].tolist() == [0, 2, 4, 5, 6]


@given(st.data())
def test_a_shape_is_what_its_parents_say(data: st.DataObject) -> None:
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(data.draw(st.integers(0, 12)))]
    shape = tree_shape(parents)
    for node, path in enumerate(shape.paths):
        assert path[-1] == node and [parents[n] for n in path] == [-1, *path[:-1]]
        assert shape.depths[node] == len(path) and node in shape.children[parents[node] + 1]
    assert sorted(node for own in shape.children for node in own) == list(range(len(parents)))
    runs = list(shape.runs())
    assert [node for start, end in runs for node in range(start, end)] == list(range(len(parents)))
    assert all(parents[node] == node - 1 for start, end in runs for node in range(start + 1, end))
    order, renumbered = depth_first(parents)
    assert sorted(order) == list(range(len(parents)))
    again = tree_shape(renumbered)
    assert [tuple(order[n] for n in path) for path in again.paths] == [shape.paths[node] for node in order]
    num_leaves = sum(not own for own in shape.children[1:])
    assert len(list(again.runs())) == num_leaves, "depth first, there is one run for each leaf"
