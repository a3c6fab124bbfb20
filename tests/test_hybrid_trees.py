"""The hybrid with a drafter of trees: a match is a path of the tree, beside what the drafter holds likely."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from proposers.captured import host_drafts
from proposers.captured.match_in_tree import MatchInTree
from proposers.captured.matched import Form
from proposers.drafting.matches_in_trees import MATCHED
from proposers.lookup.suffix_cache import SuffixCache
from runner.config import ConfigError, DflashMethod, Eagle3Method, HybridMethod, parse_method
from runner.engine.request import DraftTokens
from runner.engine.sampling_params import SamplingParams
from runner.metrics.rates import by_source
from tests.conftest import Engines, complete
from tests.proposers_for_tests import set_corpus
from tests.test_hybrid import (
    DRAFTERS,
    TRAFFIC,
    accepted_in_whole_steps,
    count_forms,
    facts,
    hybrid,
    teach,
    texts,
)
from tests.test_whole_steps import GREEDY, Build, Traffic, build, by_definition, play

__all__ = ["build", "by_definition"]  # fixtures

TREE = {"speculative_token_tree": "dynamic", "tree_top_k": 2}


@pytest.mark.parametrize("keys", [{}, {"num_drafter_tokens": 7}], ids=["small trees", "trees of all nodes"])
@pytest.mark.parametrize("drafter", ["eagle", "dflash", "medusa", "dspark"])
def test_whole_steps_draft_and_accept_what_steps_in_parts_do_and_no_text_changes(
    build: Build, monkeypatch: pytest.MonkeyPatch, drafter: str, keys: dict[str, Any]
) -> None:
    """Whoever guessed right before: the drafter's cache is as good behind accepted matches as behind its own drafts."""
    llm, proposer = hybrid(build, monkeypatch, drafter, keys={**TREE, **keys})
    forms = count_forms(monkeypatch, MatchInTree)
    accepted = accepted_in_whole_steps(llm, proposer)
    assert forms[Form.BOTH] > 1
    assert (forms[Form.DRAFTED] > 1) == (not keys), "the drafter's own trees, where they have fewer nodes"
    assert max(accepted[MATCHED]) == 7 > min(accepted[MATCHED]), "matches were accepted to the last, and were not"
    assert accepted[DRAFTERS[drafter]].total() > accepted[DRAFTERS[drafter]][0] > 0


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_under_rules_that_read_probabilities_even_sampled_texts_stay(
    build: Build, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """Nobody draws the candidates, so the target's own token is looked for among them."""
    llm, proposer = hybrid(build, monkeypatch, "eagle", keys={**TREE, "rejection_sample_method": rule})
    _, untaught, _ = play(llm, TRAFFIC, whole=False)
    teach(proposer, untaught)
    _, in_parts, _ = play(llm, TRAFFIC, whole=False)
    _, whole, num_launched = play(llm, TRAFFIC, whole=True)
    assert num_launched > 20
    assert facts(whole) == facts(in_parts)
    assert texts(whole) == texts(untaught)


def test_loads_that_allow_fewer_drafts_cut_the_tree(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    by_load = {"num_speculative_tokens_per_batch_size": [[1, 1, 7], [2, 2, 2], [3, 9, 0]]}
    llm, proposer = hybrid(build, monkeypatch, "eagle", keys={**TREE, **by_load})
    _, untaught, _ = play(llm, TRAFFIC, whole=False)
    teach(proposer, untaught)
    runs = [play(llm, TRAFFIC, whole=whole)[1] for whole in (False, True)]
    for records in runs:
        assert texts(records) == texts(untaught)
    assert {7, 2, 0} <= {count for record in runs[1] for count in record.num_draft_tokens}


def test_who_may_not_draft_gets_neither_match_nor_tree(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, proposer = hybrid(build, monkeypatch, "eagle", keys=TREE)
    params = (replace(GREEDY, max_tokens=60), replace(GREEDY, max_tokens=60, speculative_sampling=False))
    traffic = Traffic(arrivals=((0, 5), (0, 6)), params=params, cancelled={}, max_num_seqs=2)
    _, untaught, _ = play(llm, traffic, whole=True)
    set_corpus(proposer, [record.token_ids for record in untaught])
    facts_of = [facts(play(llm, traffic, whole=whole)[1]) for whole in (False, True)]
    assert facts_of[0] == facts_of[1]
    drafted, silent = sorted((fact[2] for fact in facts_of[1].values()), key=sum, reverse=True)
    assert max(drafted) == 7 and sum(silent) == 0


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["whole", "in parts"])
def test_together_they_need_fewer_steps_than_a_tree_or_a_chain_of_either(engines: Engines, enforce_eager: bool) -> None:
    """The corpus is wrong every sixth token, where the head's other candidates help."""
    prompts = [{"prompt_token_ids": [5, 6, 7, 8, 9, 10, 11]}]
    params = [SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)]
    text = complete(engines(), prompts, params)[0][0].output_token_ids
    keys = {"num_speculative_tokens": 6, "method": "hybrid", "drafter": "eagle3", "num_drafter_tokens": 6}
    counts = []
    for method in ({**keys, **TREE}, keys, {**keys, **TREE, "min_match_score": 9.0}):
        llm = engines(method, enforce_eager=enforce_eager)
        proposer = cast(Any, llm.engine.proposer)
        set_corpus(proposer, [[token if place % 6 else (token + 1) % 60 for place, token in enumerate(text, 1)]])
        proposer.restart()
        (request,), metrics = complete(llm, prompts, params)
        assert request.output_token_ids == text
        counts.append(len(metrics.step_points))
    together, chains, without_matches = counts
    assert together < min(chains, without_matches)


def test_a_summary_tells_trees_with_matches_from_those_without(engines: Engines) -> None:
    keys = {"method": "hybrid", "drafter": "eagle", "num_drafter_tokens": 3, "min_match_score": 0.4, **TREE}
    llm = engines(keys)
    prompt = {"prompt_token_ids": [5, 9, 2, 5, 9, 2, 5, 9]}
    llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    assert by_source(llm.metrics.records).keys() == {MATCHED, "eagle"}


def test_the_tree_is_the_drafters_and_its_keys_reach_it() -> None:
    keys: dict[str, Any] = {"method": "hybrid", "speculative_token_tree": "dynamic", "tree_depth": 7, "tree_top_k": 3}
    own = {key: keys[key] for key in ("speculative_token_tree", "tree_depth", "tree_top_k")}
    for asked, expected in (({}, 8), ({"num_drafter_tokens": 5}, 5), ({"num_drafter_tokens": 9}, 8)):
        method, _ = parse_method({**keys, "drafter": "eagle3", **asked})
        assert isinstance(method, HybridMethod)
        assert method.drafter_method() == Eagle3Method(num_speculative_tokens=expected, **own)
    method, _ = parse_method({**keys, "drafter": "dflash", "rejection_sample_method": "block"})
    assert isinstance(method, HybridMethod)
    assert method.drafter_method() == DflashMethod(num_speculative_tokens=8, draft_sample_method="greedy", **own)


@pytest.mark.parametrize("drafter", ["draft_model", "pard", "mlp_speculator"])
def test_a_drafter_of_chains_is_asked_for_no_tree(drafter: str) -> None:
    owners = "drafter=eagle or eagle3 or mtp or medusa or dflash or dspark"
    with pytest.raises(ConfigError, match=f"speculative_token_tree is a key of {owners}, got 'dynamic' with"):
        parse_method({"method": "hybrid", "drafter": drafter, "speculative_token_tree": "dynamic"})


def test_trees_of_one_shape_leave_a_match_no_place() -> None:
    with pytest.raises(ConfigError, match=r"speculative_token_tree must be one of dynamic, got \[\[0\]"):
        parse_method({"method": "hybrid", "drafter": "eagle3", "speculative_token_tree": [[0], [1]]})


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["whole", "in parts"])
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_a_short_response_is_remembered_too(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, max_tokens: int, enforce_eager: bool
) -> None:
    """Where nobody might draft any more, requests in parts were not looked at, and their text was not learned."""
    llm, inserted = engines({"method": "hybrid", "drafter": "eagle", **TREE}, enforce_eager=enforce_eager), []
    monkeypatch.setattr(SuffixCache, "insert", lambda _, tokens: inserted.append(list(tokens)))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": [5, 9, 2]}], params)
    assert inserted == [list(output.outputs[0].token_ids)]


def test_where_matches_are_cut_to_the_drafters_places_steps_have_one_layout(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, proposer = hybrid(build, monkeypatch, "eagle", keys=TREE)
    params = (replace(GREEDY, max_tokens=60),) * 4
    traffic = Traffic(arrivals=tuple((0, 5 + index) for index in range(4)), params=params, cancelled={}, max_num_seqs=4)
    _, untaught, _ = play(llm, traffic, whole=False)
    teach(proposer, untaught, every=7)
    monkeypatch.setattr(host_drafts, "MAX_ROWS", 16)  # of two requests, as on a CPU
    layouts, place = Counter[tuple[int, bool, Form]](), MatchInTree.place

    def noted(drafter: MatchInTree, drafts: DraftTokens, places: Sequence[int]) -> int:
        width = place(drafter, drafts, places)
        layouts[width, any(drafts.num_draft_tokens), cast(Form, drafter.form)] += len(places) > 2
        return width

    monkeypatch.setattr(MatchInTree, "place", noted)
    play(llm, traffic, whole=True)
    of_many = {layout for layout, count in layouts.items() if count}
    assert of_many == {(3, True, Form.BOTH), (3, False, Form.BOTH)}
