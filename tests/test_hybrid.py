"""The hybrid drafts matches where they are convincing and lets its drafter draft elsewhere, in whole steps as in parts.

A corpus of the true texts, with a wrong token now and then and not of all requests, makes matches that are right, that
end wrong, and that are lacking.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from proposers.captured.match_in_tree import MatchInTree
from proposers.captured.matched import Form, MatchedOrDrafted
from proposers.drafting.matches_in_trees import MATCHED
from proposers.hybrid import HybridProposer, _merge
from runner.config import ConfigError, Eagle3Method, HybridMethod, SpeculativeConfig, SuffixMethod, parse_method
from runner.drafter_fit import drafter_fit_notes
from runner.engine.request import DraftTokens
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM
from runner.metrics import InParts, RequestRecord
from runner.metrics.rates import by_source
from runner.workload import WorkloadItem
from tests.conftest import Engines
from tests.proposers_for_tests import set_corpus
from tests.test_whole_steps import GREEDY, METHODS, SAMPLED, Build, Traffic, build, by_definition, play

__all__ = ["build", "by_definition"]  # fixtures

DRAFTERS = {
    "draft_model": "draft_model",
    "eagle": "eagle",
    "p_eagle": "eagle3",
    "pard": "pard",
    "dflash": "dflash",
    "dspark": "dspark",
    "medusa": "medusa",
    "mlp_speculator": "mlp_speculator",
    "early_exit": "early_exit",
}
LENGTHS = (60, 40, 70, 50, 30, 45)
TRAFFIC = Traffic(  # by itself, by two and by three
    arrivals=tuple((14 * index, 5 + index) for index in range(len(LENGTHS))),
    params=tuple(replace(SAMPLED if index % 2 else GREEDY, max_tokens=n) for index, n in enumerate(LENGTHS)),
    cancelled={},
    max_num_seqs=3,
)


def hybrid(
    build: Build, monkeypatch: pytest.MonkeyPatch, drafter: str, *, keys: dict[str, Any] | None = None
) -> tuple[LLM, HybridProposer]:
    spec = {
        "method": "hybrid",
        "drafter": DRAFTERS[drafter],
        "num_speculative_tokens": 7,
        "num_drafter_tokens": 3,
        **(keys or {}),
    }
    monkeypatch.setitem(METHODS, f"hybrid_{drafter}", spec)
    llm = build(f"hybrid_{drafter}")
    return llm, cast(HybridProposer, llm.engine.proposer)


def teach(proposer: HybridProposer, records: list[RequestRecord], every: int = 19) -> None:
    """The texts of two requests of three, some tokens wrong."""
    known = [record for record in records if int(record.request_id.split("-")[0]) % 3]
    corpus = [
        [token if place % every else (token + 1) % 60 for place, token in enumerate(record.token_ids, start=1)]
        for record in known
    ]
    set_corpus(proposer, corpus)


def facts(records: list[RequestRecord]) -> dict[str, tuple[Any, ...]]:
    return {
        record.request_id: (
            record.token_ids,
            record.tokens_per_step,
            record.num_draft_tokens,
            record.num_accepted_tokens,
            record.draft_sources,
        )
        for record in records
    }


def count_forms(monkeypatch: pytest.MonkeyPatch, captured: type[MatchedOrDrafted] | type[MatchInTree]) -> Counter[Form]:
    """Of the whole steps to come."""
    forms, place = Counter[Form](), captured.place

    def noted(drafter: Any, *args: Any) -> int:
        width = place(drafter, *args)
        forms[drafter.form] += 1
        return width

    monkeypatch.setattr(captured, "place", noted)
    return forms


def accepted_in_whole_steps(llm: LLM, proposer: HybridProposer) -> dict[str | None, Counter[int]]:
    """Source -> how many drafts had so many tokens accepted, which is what steps in parts come to as well."""
    _, untaught, _ = play(llm, TRAFFIC, whole=False)
    teach(proposer, untaught)
    _, in_parts, _ = play(llm, TRAFFIC, whole=False)
    _, whole, num_launched = play(llm, TRAFFIC, whole=True)
    assert num_launched > 20 and facts(whole) == facts(in_parts)
    assert texts(whole) == texts(untaught)
    accepted = dict[str | None, Counter[int]]()
    for record in whole:
        for source, (_, _, count) in record.sourced_drafts:
            accepted.setdefault(source, Counter())[count] += 1
    return accepted


def texts(records: list[RequestRecord]) -> dict[str, Sequence[int]]:
    return {record.request_id: record.token_ids for record in records}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_whole_steps_draft_and_accept_what_steps_in_parts_do_and_no_text_changes(
    build: Build, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """Whoever drafted before: the drafter's cache is as good behind accepted matches as behind its own drafts."""
    llm, proposer = hybrid(build, monkeypatch, drafter)
    forms = count_forms(monkeypatch, MatchedOrDrafted)
    accepted = accepted_in_whole_steps(llm, proposer)
    assert min(forms[form] for form in Form) > 1
    assert {0, 7} <= accepted[MATCHED].keys(), "matches were rejected, and accepted to the last"
    assert {0, 3} <= accepted[DRAFTERS[drafter]].keys()


def test_a_draft_model_follows_the_matches_that_stand_in_for_its_own_drafts(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is wrong and the match right, its cache has to hold the match; two requests of four have matches."""
    llm, proposer = hybrid(build, monkeypatch, "draft_model", keys={"num_drafter_tokens": 5})
    params = (replace(GREEDY, max_tokens=70),) * 4
    traffic = Traffic(arrivals=tuple((0, 5 + index) for index in range(4)), params=params, cancelled={}, max_num_seqs=4)
    _, untaught, _ = play(llm, traffic, whole=False)
    teach(proposer, untaught, every=11)
    _, in_parts, _ = play(llm, traffic, whole=False)
    _, whole, _ = play(llm, traffic, whole=True)
    assert facts(whole) == facts(in_parts)


@pytest.mark.parametrize("drafter", ["draft_model", "eagle"])
def test_behind_matches_in_parts_a_drafter_needs_no_catching_up(
    build: Build, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """A request whose matches were accepted step after step in parts could not go on in whole steps, for its drafter
    was too far behind, which only drafts of its own would have mended."""
    llm, proposer = hybrid(build, monkeypatch, drafter)
    _, untaught, _ = play(llm, TRAFFIC, whole=False)
    set_corpus(proposer, [record.token_ids for record in untaught])
    captured = cast(MatchedOrDrafted, proposer.captured_drafter(7))
    update, lagging = HybridProposer.update, list[str]()

    def noted(proposer: HybridProposer, schedule: Any, output: Any) -> None:
        update(proposer, schedule, output)
        lagging.extend(
            item.request.request_id
            for item in schedule.scheduled
            if item.yields_token and not item.request.is_finished and not captured.can_start(item.request)
        )

    monkeypatch.setattr(HybridProposer, "update", noted)
    _, records, _ = play(llm, TRAFFIC, whole=False)
    assert by_source(records)[MATCHED]["num_drafts"] > 20
    assert not lagging


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_under_rules_that_read_probabilities_greedy_texts_stay(
    build: Build, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    keys = {"rejection_sample_method": rule, "draft_sample_method": "probabilistic"}
    llm, proposer = hybrid(build, monkeypatch, "draft_model", keys=keys)
    _, untaught, _ = play(llm, TRAFFIC, whole=False)
    teach(proposer, untaught)
    _, in_parts, _ = play(llm, TRAFFIC, whole=False)
    _, whole, _ = play(llm, TRAFFIC, whole=True)
    assert facts(whole) == facts(in_parts)
    assert by_source(whole).keys() == {MATCHED, "draft_model"}
    greedy = [record.request_id for record in untaught if not int(record.request_id.split("-")[0]) % 2]
    assert greedy
    for request_id in greedy:
        assert facts(whole)[request_id][0] == facts(untaught)[request_id][0]


def test_loads_that_allow_fewer_drafts_cut_matches_and_drafter_alike(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_load = {"num_speculative_tokens_per_batch_size": [[1, 1, 7], [2, 2, 2], [3, 9, 0]]}
    llm, proposer = hybrid(build, monkeypatch, "eagle", keys=by_load)
    _, untaught, _ = play(llm, TRAFFIC, whole=False)
    teach(proposer, untaught)
    texts = [
        {record.request_id: record.token_ids for record in play(llm, TRAFFIC, whole=whole)[1]}
        for whole in (False, True)
    ]
    assert texts[0] == texts[1] == {record.request_id: record.token_ids for record in untaught}


def test_matched_tokens_have_one_hot_distributions_in_their_places() -> None:
    matches = DraftTokens(token_ids=torch.tensor([3, 1]), cu_num_draft_tokens=[0, 0, 2], sources=(MATCHED,) * 2)
    probs = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    drafted = DraftTokens(token_ids=torch.tensor([2]), cu_num_draft_tokens=[0, 1, 1], probs=probs)
    merged = _merge(matches, drafted, drafter_name="eagle3")
    assert merged.token_ids.tolist() == [2, 3, 1] and merged.cu_num_draft_tokens == [0, 1, 3]
    assert merged.sources == ("eagle3", MATCHED, MATCHED)
    assert merged.draft_sources == ["eagle3", MATCHED]
    assert torch.equal(cast(torch.Tensor, merged.probs), torch.cat([probs, torch.eye(4)[[3, 1]]]))


def test_a_summary_tells_the_two_apart_and_their_counts_add_up(engines: Engines) -> None:
    llm = engines({"method": "hybrid", "num_speculative_tokens": 6, "num_drafter_tokens": 2, "min_match_score": 0.4})
    prompt = {"prompt_token_ids": [5, 9, 2, 5, 9, 2, 5, 9]}
    llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    numbers = llm.metrics.summary(method="hybrid", num_speculative_tokens=6)
    own = numbers["acceptance_by_source"]
    assert own.keys() == {MATCHED, "draft_model"}
    for key in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert sum(part[key] for part in own.values()) == numbers[key]
        assert all(part[key] > 0 for part in own.values())
    assert numbers["steps_in_parts"].keys() <= {str(InParts.PROMPT)}


def test_its_halves_are_methods_by_themselves() -> None:
    method, _ = parse_method(
        {
            "method": "hybrid",
            "drafter": "eagle3",
            "model": "a/head",
            "num_drafter_tokens": 5,
            "suffix_decoding_max_tree_depth": 9,
            "draft_sample_method": "greedy",
        }
    )
    assert isinstance(method, HybridMethod)
    assert method.suffix_method() == SuffixMethod(num_speculative_tokens=8, suffix_decoding_max_tree_depth=9)
    assert method.drafter_method() == Eagle3Method(
        num_speculative_tokens=5, model="a/head", draft_sample_method="greedy"
    )


def test_a_drafter_never_drafts_more_than_the_step_may() -> None:
    method, _ = parse_method({"method": "hybrid", "num_speculative_tokens": 2})
    assert isinstance(method, HybridMethod)
    assert method.drafter_method().num_speculative_tokens == 2


def test_a_score_that_no_match_can_have_is_noted() -> None:
    """And one that a match of two tokens cannot have is none: it was, and hybrid was its drafter alone with K=1."""
    assert not parse_method({"method": "hybrid", "num_speculative_tokens": 1})[0].notes()
    (note,) = parse_method({"method": "hybrid", "num_speculative_tokens": 4, "min_match_score": 9.0})[0].notes()
    assert note.startswith("min_match_score=9 is out of reach") and "judged by 8 tokens" in note


def test_bounds_of_trees_that_a_drafter_does_not_grow_are_noted() -> None:
    """They were taken without a word."""
    keys = {"method": "hybrid", "speculative_token_tree": "dynamic", "tree_depth": 7}
    (note,) = parse_method({**keys, "drafter": "medusa", "tree_top_k": 6})[0].notes()
    assert note == "drafter=medusa ignores tree_depth=7, tree_top_k=6"
    assert parse_method({**keys, "drafter": "eagle3"})[0].notes() == []


def test_keys_of_single_drafters_reach_them_and_no_other() -> None:
    keys = {"method": "hybrid", "drafter": "eagle3", "aux_hidden_state_layer_ids": [1, 2, 3]}
    method, _ = parse_method(keys)
    assert isinstance(method, HybridMethod)
    assert method.drafter_method() == Eagle3Method(aux_hidden_state_layer_ids=(1, 2, 3))
    with pytest.raises(
        ConfigError, match="aux_hidden_state_layer_ids is a key of drafter=eagle3 or dflash or dspark, got"
    ):
        parse_method({**keys, "drafter": "mtp"})
    with pytest.raises(ConfigError, match="use_heterogeneous_vocab is a key of drafter=draft_model, got True"):
        parse_method({"method": "hybrid", "drafter": "pard", "use_heterogeneous_vocab": True})


@pytest.mark.parametrize("num_drafter_tokens", [1, 3])
def test_whether_a_match_is_convincing_depends_on_the_text_alone(
    build: Build, monkeypatch: pytest.MonkeyPatch, num_drafter_tokens: int
) -> None:
    """Matches were cut to num_drafter_tokens in company before they were judged, and none was good enough any more."""
    llm, proposer = hybrid(build, monkeypatch, "medusa", keys={"num_drafter_tokens": num_drafter_tokens})
    params = (replace(GREEDY, max_tokens=40),) * 4
    traffic = Traffic(arrivals=tuple((0, 5 + index) for index in range(4)), params=params, cancelled={}, max_num_seqs=4)
    _, untaught, _ = play(llm, traffic, whole=True)
    set_corpus(proposer, [record.token_ids for record in untaught])
    _, records, _ = play(llm, traffic, whole=True)
    own = by_source(records)
    assert own[MATCHED]["num_draft_tokens"] > 4 * own.get("medusa", {"num_draft_tokens": 0})["num_draft_tokens"]


def test_who_may_not_draft_cuts_nobodys_matches(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour that never drafts, or has no room left, has no match either; the drafter ran for nobody."""
    llm, proposer = hybrid(build, monkeypatch, "eagle")
    params = (replace(GREEDY, max_tokens=60), replace(GREEDY, max_tokens=60, speculative_sampling=False))
    traffic = Traffic(arrivals=((0, 5), (0, 6)), params=params, cancelled={}, max_num_seqs=2)
    _, untaught, _ = play(llm, traffic, whole=True)
    set_corpus(proposer, [record.token_ids for record in untaught])
    facts_of = [facts(play(llm, traffic, whole=whole)[1]) for whole in (False, True)]
    assert facts_of[0] == facts_of[1]
    drafting = next(fact for fact in facts_of[1].values() if sum(fact[2]))
    assert max(drafting[2]) == 7 and sum(drafting[3]) > 35


def test_a_drafters_fit_is_judged_by_its_own_guesses() -> None:
    """Matches that were right hid a head that never was, and wrong ones were laid at a good head's door."""
    values = {"model": {"model": "m"}, "method": {"method": "hybrid", "drafter": "eagle3", "model": "a/head"}}
    config = SpeculativeConfig.parse(values)
    item = WorkloadItem(prompt=[1, 2])

    def notes(of_head: int, of_matches: int) -> list[str]:
        record = RequestRecord(
            request_id="0",
            prompt=None,
            prompt_token_ids=[1],
            text="",
            token_ids=[1] * 300,
            finish_reason="length",
            category=None,
            seed=0,
            arrival_time=0.0,
            token_times=(0.0,) * 300,
            tokens_per_step=(1,) * 300,
            num_draft_tokens=(4,) * 300,
            num_accepted_tokens=(of_head, of_matches) * 150,
            draft_sources=("eagle3", MATCHED) * 150,
        )
        return drafter_fit_notes(config, [item], [record])

    assert not notes(1, 0)
    (note,) = notes(0, 1)
    assert "only 0% of the first guesses of a/head" in note and "method.aux_hidden_state_layer_ids" in note


def test_the_model_group_names_the_drafters_checkpoint() -> None:
    heads = {"eagle3": {"model": "the/head"}}
    values = {"model": {"model": "m", "draft": {"model": "the/draft"}, "heads": heads}}
    for drafter, model in (("draft_model", "the/draft"), ("eagle3", "the/head")):
        config = SpeculativeConfig.parse({**values, "method": {"method": "hybrid", "drafter": drafter}})
        draft = config.draft_model_config()
        assert draft is not None and draft.model == model
    with pytest.raises(ConfigError, match=r"method\.model is required: model 'm' comes without a set of Medusa heads"):
        SpeculativeConfig.parse({**values, "method": {"method": "hybrid", "drafter": "medusa"}})


def test_a_checkpoint_of_another_drafter_is_told_where_to_name_it() -> None:
    values = {"model": {"model": "tiny"}, "method": {"method": "hybrid", "model": "tiny-eagle3"}}
    with pytest.raises(ConfigError, match=r"got method\.drafter=draft_model; set method\.drafter=eagle3"):
        SpeculativeConfig.parse(values)


ARCTIC = {  # of its documentation
    "method": "arctic",
    "model": "Snowflake/Arctic-LSTM-Speculator-Llama-3.1-8B-Instruct",
    "num_speculative_tokens": 3,
    "enable_suffix_decoding": True,
}


def test_arctic_inferences_pair_of_drafters_is_read_as_the_hybrid(tmp_path: Path) -> None:
    """It drafts a match where as many of its tokens are expected to be accepted as the speculator can guess."""
    expected = HybridMethod(
        drafter="mlp_speculator",
        model=ARCTIC["model"],
        num_speculative_tokens=16,
        num_drafter_tokens=3,
        min_match_score=3.0,
        suffix_decoding_max_tree_depth=64,
        suffix_decoding_max_cached_requests=100_000,
    )
    method, notes = parse_method(ARCTIC)
    assert method == expected
    assert notes == (
        "speculative_config.method='arctic' is read as 'mlp_speculator'",
        "speculative_config.enable_suffix_decoding=True is read as method=hybrid with drafter=mlp_speculator, "
        "num_speculative_tokens=16, num_drafter_tokens=3, min_match_score=3; there a match may be longer",
    )
    assert SpeculativeConfig.from_engine_args("m", ARCTIC).method == expected  # its steps hold what matches need
    own = {"suffix_cache_max_depth": 12, "suffix_cache_max_requests": 9, "suffix_min_token_prob": 0.3}
    found, _ = parse_method({**ARCTIC, **own, "suffix_max_spec_factor": 2.0, "suffix_max_spec_offset": 0.0})
    assert found == expected.model_copy(
        update={
            "num_speculative_tokens": 12,
            "suffix_decoding_max_tree_depth": 12,
            "suffix_decoding_max_cached_requests": 9,
            "suffix_decoding_min_token_prob": 0.3,
            "suffix_decoding_max_spec_factor": 2.0,
        }
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mlp_speculator", "n_predict": 4}))
    for asked, num_drafter_tokens in ((None, 4), (2, 2)):  # the speculator can guess 4, whatever it is asked for
        found, _ = parse_method({**ARCTIC, "model": str(tmp_path), "num_speculative_tokens": asked})
        assert isinstance(found, HybridMethod)
        assert (found.num_drafter_tokens, found.min_match_score) == (num_drafter_tokens, 4.0)


def test_a_match_has_as_many_places_as_the_speculators_tokens_however_shallow_the_trees_are() -> None:
    """Bug told here: a match was to score more than it could have tokens, so that none was ever drafted."""
    method, _ = parse_method({**ARCTIC, "suffix_cache_max_depth": 2})
    assert isinstance(method, HybridMethod)
    assert method.num_speculative_tokens == method.num_drafter_tokens == method.min_match_score == 3


def test_arctic_inferences_switch_without_a_speculator_is_suffix_decoding() -> None:
    method, (note,) = parse_method({"enable_suffix_decoding": True})
    assert isinstance(method, SuffixMethod) and note.endswith("is read as method=suffix, which needs no model")
    assert (method.num_speculative_tokens, method.suffix_decoding_max_tree_depth) == (16, 64)
    for more, num_tokens in (({"suffix_speculative_tokens": 5}, 5), ({"suffix_cache_max_depth": 9}, 9)):
        method, _ = parse_method({"method": "suffix", "enable_suffix_decoding": True, **more})
        assert isinstance(method, SuffixMethod) and method.num_speculative_tokens == num_tokens
    with pytest.raises(ConfigError, match=r"hard_disable_by_batch_size is a key of .* 'disable_by_batch_size', one"):
        parse_method({**ARCTIC, "hard_disable_by_batch_size": 8})
    with pytest.raises(ConfigError, match=r"suffix_max_spec_offset is not available, got 1; remove it"):
        parse_method({**ARCTIC, "suffix_max_spec_offset": 1})


def test_arctic_inferences_switch_is_told_what_it_is_called_here() -> None:
    with pytest.raises(ConfigError, match=r"enable_suffix_decoding is a key of .* method='hybrid' with drafter="):
        parse_method({"method": "eagle3", "model": "a/b", "num_speculative_tokens": 3, "enable_suffix_decoding": True})
