"""Suffix recycling: a match is a path of the tree, and recycled candidates fill the places that it leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.reference.likeliest_tree import Tree
from proposers.captured.match_in_tree import MatchInTree
from runner.config import SuffixRecyclingMethod
from runner.engine.draft_trees import tree_shape
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM
from runner.metrics import MetricsCollector
from runner.prompts import make_requests
from tests.conftest import Engines, complete
from tests.proposers_for_tests import set_corpus
from tests.test_method_config import method_of

PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8, 9, 10, 11]}, {"prompt_token_ids": [3, 4]}]
PARAMS = [
    SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=60, temperature=0.8, seed=3, ignore_eos=True),
]
METHOD = {"method": "suffix_recycling", "num_speculative_tokens": 6, "tree_depth": 3}


def teach(proposer: Any, texts: list[list[int]], every: int) -> None:
    """A corpus of the texts in which every so many tokens one is wrong; nothing else is known."""
    corpus = [
        [token if place % every else (token + 1) % 60 for place, token in enumerate(text, start=1)] for text in texts
    ]
    set_corpus(proposer, corpus)
    proposer.restart()


@pytest.fixture(scope="module")
def texts(engines: Engines) -> list[list[int]]:
    return [request.output_token_ids for request in complete(engines(), PROMPTS, PARAMS)[0]]


def num_steps(llm: LLM, *, texts: list[list[int]]) -> int:
    """Of the requests one after another; their texts are what they were."""
    count = 0
    for prompt, params, text in zip(PROMPTS, PARAMS, texts, strict=True):
        (request,), metrics = complete(llm, [prompt], [params])
        assert request.output_token_ids == text
        count += len(metrics.step_points)
    return count


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["whole", "in parts"])
def test_together_they_need_fewer_steps_than_either_of_them(
    engines: Engines, texts: list[list[int]], enforce_eager: bool
) -> None:
    """The corpus is wrong every eighth token, where the tree's other candidates help."""
    alone = {"method": "suffix", "num_speculative_tokens": 6}
    counts = []
    for method, known in ((METHOD, texts), (METHOD, []), (alone, texts)):
        llm = engines(method, enforce_eager=enforce_eager)
        teach(llm.engine.proposer, known, every=8)
        counts.append(num_steps(llm, texts=texts))
    together, without_matches, matches_alone = counts
    assert together < min(without_matches, matches_alone)


def test_a_match_may_be_longer_than_recycled_paths_and_take_all_places(
    engines: Engines, texts: list[list[int]]
) -> None:
    llm = engines(METHOD)
    teach(llm.engine.proposer, texts, every=1000)
    _, metrics = complete(llm, PROMPTS[:1], PARAMS[:1])
    (record,) = metrics.records
    assert max(record.draft_depths or ()) == 6 and max(record.num_accepted_tokens) == 6
    assert all(count <= 6 for count in record.num_draft_tokens)


def test_without_a_match_the_tree_is_token_recyclings(engines: Engines, texts: list[list[int]]) -> None:
    """No match is convincing enough: the same drafts, the same steps."""
    counts = list[list[Any]]()
    for method in ({**METHOD, "min_match_score": 9.0}, {**METHOD, "method": "token_recycling"}):
        llm = engines(method)
        llm.engine.proposer.restart()
        requests, metrics = complete(llm, PROMPTS, PARAMS)
        assert [request.output_token_ids for request in requests] == texts
        counts.append([(record.num_draft_tokens, record.num_accepted_tokens) for record in metrics.records])
    assert counts[0] == counts[1]


def test_steps_of_any_batch_run_whole(engines: Engines) -> None:
    """Their places are full whatever the matches are; suffix decoding's own run in parts from three requests on."""
    llm = engines(METHOD, max_num_seqs=5)
    params = [SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)] * 5
    requests = make_requests([[n, n + 1, n + 2] for n in range(5, 10)], params, llm.engine.tokenizer, 0)
    metrics = MetricsCollector()
    llm.run(requests, llm.engine.proposer, metrics)
    assert metrics.num_decoding_steps > 5 and not metrics.steps_in_parts


def test_a_captured_tree_has_the_match_that_the_host_placed(
    engines: Engines, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its first places, whichever place of the batch its request has."""
    llm = engines(METHOD, max_num_seqs=2, enable_prefix_caching=False)  # an engine of its own: nothing is captured yet
    teach(llm.engine.proposer, texts, every=8)
    seen, draft = list[tuple[torch.Tensor, Tree]](), MatchInTree.draft

    def noted(drafter: MatchInTree, batch: Any) -> Any:
        drafted = draft(drafter, batch)
        seen.append((drafter._matches.of(batch).clone(), Tree(drafted.token_ids.clone(), drafted.parents.clone())))
        return drafted

    monkeypatch.setattr(MatchInTree, "draft", noted)
    complete(llm, PROMPTS, PARAMS)
    assert any(bool((match >= 0).any()) for match, _ in seen)
    for match, tree in seen:
        is_matched = match >= 0
        assert torch.equal(tree.token_ids[is_matched], match[is_matched])
        for token_ids, parents in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
            num_nodes = sum(token >= 0 for token in token_ids)
            assert tree_shape(parents[:num_nodes]).depth <= 6 and all(token < 0 for token in token_ids[num_nodes:])


def test_a_match_score_that_is_out_of_reach_is_noted() -> None:
    method = method_of({**METHOD, "min_match_score": 20.0})
    assert isinstance(method, SuffixRecyclingMethod)
    assert any("min_match_score=20 is out of reach" in note for note in method.notes())
