"""method=suffix in the engine: what it remembers of whom, what it starts from, and how long its drafts are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from proposers.base import ProposerContext
from proposers.suffix import SuffixProposer
from runner import measure as measuring
from runner.engine.errors import UserError
from runner.engine.request import Request, RequestStatus
from runner.engine.sampling_params import SamplingParams
from runner.engine.schedule import Schedule
from runner.llm import LLM
from runner.measure import measure
from runner.metrics import InParts
from runner.responses import Responses
from runner.tiny import TARGET_DIR
from runner.tokenizer import Tokenizer
from runner.workload import WorkloadItem
from tests.conftest import TARGET_CONFIG, Engines, complete
from tests.decoding_steps import schedule_of, scheduled

PROMPTS = [{"prompt_token_ids": [3 + i, 40, 5 * i]} for i in range(4)]
PARAMS = [SamplingParams(max_tokens=24, seed=i, ignore_eos=True) for i in range(4)]
METHOD = {"method": "suffix", "num_speculative_tokens": 6}


def make_proposer(**keys: Any) -> SuffixProposer:
    context = ProposerContext(
        vocab_size=100,
        max_model_len=1000,
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        eos_token_ids=(0,),
        block_size=16,
        device=torch.device("cpu"),
        dtype=torch.float32,
        batch_invariant=True,
        needs_draft_probs=False,
    )
    defaults = {
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_cached_requests": 10,
        "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1,
    }
    return SuffixProposer(num_speculative_tokens=4, context=context, **{**defaults, **keys})


def make_request(prompt: list[int], output: list[int], request_id: str = "0") -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        output_token_ids=output,
        sampling_params=SamplingParams(max_tokens=99),
        seed=0,
        status=RequestStatus.RUNNING,
    )


def propose(proposer: SuffixProposer, *requests: Request, limits: tuple[int, ...] = (4, 4)) -> list[list[int]]:
    """A step in which all of them decode."""
    step = [scheduled(request, limit) for request, limit in zip(requests, limits, strict=False)]
    drafts = proposer.propose(Schedule(scheduled=step))
    cu = drafts.cu_num_draft_tokens
    return [drafts.token_ids[cu[i] : cu[i + 1]].tolist() for i in range(len(requests))]


def end(proposer: SuffixProposer, request: Request, status: RequestStatus) -> None:
    request.status = status
    proposer.release(request.request_id)


def test_a_request_drafts_from_its_prompt_and_its_output_as_long_as_the_match_allows() -> None:
    proposer = make_proposer()
    request, other = make_request([1, 2, 3, 4, 5, 6], [9, 1, 2, 3]), make_request([7], [8, 7], "1")
    assert propose(proposer, request, other) == [[4, 5, 6], [8]]
    request.output_token_ids += [4, 5]
    assert propose(proposer, request, other, limits=(2, 0)) == [[6, 9], []]
    request.output_token_ids.append(50)
    assert propose(proposer, request) == [[]]


@pytest.mark.parametrize(
    ("status", "is_remembered"),
    [(RequestStatus.FINISHED, True), (RequestStatus.FAILED, False), (RequestStatus.WAITING, False)],
)
def test_responses_of_requests_that_finished_are_remembered_and_no_others(
    status: RequestStatus, is_remembered: bool
) -> None:
    """Waiting is what a preempted request is: it will say the same again, and it would count twice."""
    proposer = make_proposer()
    first = make_request([1, 2], [60, 61, 62])
    propose(proposer, first)
    end(proposer, first, status)
    proposer.release(first.request_id)  # the run releases everything once more at its end
    assert propose(proposer, make_request([5], [60, 61], "1")) == [[62] if is_remembered else []]
    assert propose(proposer, make_request([5], [1], "2")) == [[]], "prompts are not remembered"


def test_a_response_of_one_step_is_remembered_although_nothing_was_drafted_for_it() -> None:
    proposer = make_proposer()
    request = make_request([1], [])
    proposer.propose(Schedule(scheduled=[scheduled(request, 0, is_decoding=False)]))
    request.output_token_ids += [7, 8]
    end(proposer, request, RequestStatus.FINISHED)
    assert propose(proposer, make_request([7], [7], "1")) == [[8]]


def tree_of(proposer: SuffixProposer, request: Request, limit: int) -> tuple[list[int], list[int] | None]:
    drafts = proposer.propose(schedule_of(request, max_draft_tokens=limit))
    return drafts.token_ids.tolist(), drafts.parent_indices


def test_a_tree_holds_the_likeliest_continuations() -> None:
    """Behind 1 2 came 3 4 twice, 5 6 twice and 7 once; the tree goes on where a chain has to choose."""
    corpus = [[1, 2, 3, 4, 8], [1, 2, 5, 6, 9], [1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 7]]
    for tree, limit, drafted in (
        ("dynamic", 4, ([5, 6, 3, 4], [-1, 0, -1, 2])),  # the latest of equals first, in depth-first order
        ("dynamic", 5, ([5, 6, 3, 4, 7], [-1, 0, -1, 2, -1])),
        (None, 4, ([5, 6, 9], None)),
    ):
        proposer = make_proposer(corpus=corpus, speculative_token_tree=tree, suffix_decoding_max_spec_factor=3.0)
        assert tree_of(proposer, make_request([40], [1, 2]), limit) == drafted


@pytest.mark.parametrize("blocks", [None, 9])
def test_trees_change_no_token_and_reach_further_than_chains(engines: Engines, blocks: int | None) -> None:
    """Two children of one prompt part ways, and so do those behind them: a chain guesses one way, a tree has both."""
    prompts = [{"prompt_token_ids": [3 + i % 2, 40, 5]} for i in range(10)]
    params = [SamplingParams(max_tokens=24, temperature=0.7, seed=i % 5, ignore_eos=True) for i in range(10)]
    expected, _ = complete(engines(max_num_seqs=2), prompts, params)
    accepted = {}
    for tree in (None, "dynamic"):
        keys = {"suffix_decoding_max_spec_factor": 3.0, "speculative_token_tree": tree}
        llm = engines({**METHOD, **keys}, max_num_seqs=2, num_gpu_blocks_override=blocks)
        requests, metrics = complete(llm, prompts, params)
        assert [r.output_token_ids for r in requests] == [r.output_token_ids for r in expected]
        accepted[tree] = metrics.num_accepted_tokens
    assert accepted["dynamic"] > accepted[None]


@pytest.mark.parametrize("rule", ["strict", "probabilistic", "block"])
def test_trees_run_whole_and_draft_and_accept_what_they_do_in_parts(engines: Engines, rule: str) -> None:
    """In parts their speed-up over plain decoding was 1.20x, where it is 1.80x whole."""
    prompts = [{"prompt_token_ids": [3 + i % 2, 40, 5]} for i in range(8)]
    params = [SamplingParams(max_tokens=40, temperature=0.7, seed=i % 4, ignore_eos=True) for i in range(8)]
    method = {"suffix_decoding_max_spec_factor": 3.0, "speculative_token_tree": "dynamic", **METHOD}
    facts = []
    for enforce_eager in (False, True):
        llm = engines({**method, "rejection_sample_method": rule}, max_num_seqs=2, enforce_eager=enforce_eager)
        llm.engine.proposer.restart()
        requests, metrics = complete(llm, prompts, params)
        counts = [
            (record.num_draft_tokens, record.draft_depths, record.num_accepted_tokens) for record in metrics.records
        ]
        facts.append(([request.output_token_ids for request in requests], counts))
        if not enforce_eager:
            assert metrics.steps_in_parts.keys() <= {InParts.PROMPT}
            assert metrics.num_decoding_steps > metrics.steps_in_parts.total()
    assert facts[0] == facts[1]
    drafted = [own for counts, depths, _ in facts[0][1] for own in zip(counts, depths or counts, strict=True)]
    assert any(count > depth > 1 for count, depth in drafted), "trees that branch"
    assert any(count == 0 for count, _ in drafted) and any(count == 6 for count, _ in drafted)


def test_a_request_that_comes_back_after_preemption_drafts_as_if_it_had_never_gone() -> None:
    proposer = make_proposer()
    request = make_request([1, 2, 3, 4], [1, 2])
    before = propose(proposer, request)
    end(proposer, request, RequestStatus.WAITING)
    assert propose(proposer, request) == before == [[3, 4]]


def test_no_cached_requests_leaves_the_request_its_own_text() -> None:
    proposer = make_proposer(suffix_decoding_max_cached_requests=0, corpus=[[1, 30, 31]])
    first = make_request([5], [60, 61, 62])
    propose(proposer, first)
    end(proposer, first, RequestStatus.FINISHED)
    assert propose(proposer, make_request([5], [60], "1"), make_request([1, 2, 1], [2, 1], "2")) == [[], [2, 1]]


class Corpus:
    """Counts how often it is read."""

    num_readings = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.num_readings += 1
        return iter([[50, 51]])


def test_a_restart_forgets_responses_and_not_the_corpus() -> None:
    """Which is read anew only where there is something to forget: a large one takes a minute."""
    corpus = Corpus()
    proposer = make_proposer(corpus=corpus)
    proposer.restart()
    assert corpus.num_readings == 1
    first = make_request([5], [60, 61])
    propose(proposer, first)
    end(proposer, first, RequestStatus.FINISHED)
    assert propose(proposer, make_request([5], [60], "1"), make_request([5], [50], "2")) == [[61], [51]]
    for request_id in ("1", "2"):
        proposer.release(request_id)
    proposer.restart()
    assert propose(proposer, make_request([5], [60], "3"), make_request([5], [50], "4")) == [[], [51]]
    assert corpus.num_readings == 2


def test_neither_the_warm_up_nor_a_repeat_teaches_the_next_pass_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run prompts of the workload: a method that kept their answers would be measured on what it has seen."""
    arguments = {"device": "cpu", "load_format": "dummy", "hf_config": TARGET_CONFIG, "dtype": "float32"}
    llm = LLM("dummy", speculative_config=METHOD, **arguments)
    known_at_start = list[int]()
    propose = llm.engine.proposer.propose

    def spy(schedule: Schedule) -> Any:
        known_at_start.append(llm.engine.proposer._cache.num_responses)  # type: ignore[attr-defined]
        return propose(schedule)

    llm.engine.proposer.propose = spy  # type: ignore[method-assign]
    llm.config = llm.config.model_copy(update={"repeats": 2})
    rehearse = measuring.warm_up

    def rehearsed(*args: Any, **how: Any) -> None:
        rehearse(*args, **how)
        known_at_start.clear()

    monkeypatch.setattr(measuring, "warm_up", rehearsed)
    measure(llm, [WorkloadItem(prompt=prompt) for prompt in PROMPTS[:2]])
    assert known_at_start[0] == 0 and known_at_start.count(0) >= 2 and max(known_at_start) <= 2
    assert llm.engine.proposer._cache.num_responses == 2  # type: ignore[attr-defined]


def test_a_second_run_of_the_same_prompts_needs_few_steps_and_says_the_same(engines: Engines) -> None:
    llm = engines(METHOD, num_gpu_blocks_override=20)
    first, before = complete(llm, PROMPTS, PARAMS)
    second, after = complete(llm, PROMPTS, PARAMS)
    assert [r.output_token_ids for r in first] == [r.output_token_ids for r in second]
    assert after.num_accepted_tokens > before.num_accepted_tokens + 20


def write_lines(path: Path, *rows: object) -> str:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


def test_a_corpus_of_earlier_responses_is_known_from_the_first_step(engines: Engines, tmp_path: Path) -> None:
    plain, _ = complete(engines(), PROMPTS, PARAMS)
    corpus = write_lines(
        tmp_path / "outputs.jsonl", *({"token_ids": r.output_token_ids} for r in plain), "", {"token_ids": []}
    )
    _, without = complete(engines(METHOD, num_gpu_blocks_override=21), PROMPTS, PARAMS)
    requests, metrics = complete(engines({**METHOD, "suffix_decoding_corpus": corpus}), PROMPTS, PARAMS)
    assert [r.output_token_ids for r in requests] == [r.output_token_ids for r in plain]
    assert metrics.num_accepted_tokens > without.num_accepted_tokens + 20


def test_a_corpus_may_hold_text_under_either_name(tmp_path: Path) -> None:
    tokenizer = Tokenizer(TARGET_DIR)
    rows = ({"text": "def f():"}, {"response": "def f():"}, {"token_ids": [1, 2], "text": "other"})
    path = write_lines(tmp_path / "corpus.jsonl", *rows)
    responses = list(Responses(Path(path), tokenizer, 4096))
    assert responses[0] == responses[1] and tokenizer.decode(responses[0]) == "def f():"
    assert responses[2] == [1, 2]


CORPUS_ERRORS: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", r"\.suffix_decoding_corpus: .*corpus\.jsonl:2 must be a JSON object, got .*; mend or remove"),
    "nested too deep": ("[" * 100_000, r"corpus\.jsonl:2 must be a JSON object, got '\[.*\(.*recursion.*\); mend"),
    "a list": ([1, 2], r"corpus\.jsonl:2 must be a JSON object, got a list"),
    "no response": ({"prompt": "x"}, r"corpus\.jsonl:2 must have token_ids, or a string text or .*; it has prompt"),
    "an id of another vocabulary": (
        {"token_ids": [3, 64]}, r"corpus\.jsonl:2: token_ids must lie in \[0, 63\], .*got 64; give .* or their text",
    ),
    "ids as text": ({"token_ids": "1 2"}, r"corpus\.jsonl:2: token_ids must be a list of token ids, got '1 2'"),
    "text without a tokenizer": ({"text": "x"}, r"corpus\.jsonl:2: .* needs a tokenizer; .*, or set model\.tokenizer"),
}  # fmt: skip


@pytest.mark.parametrize("case", CORPUS_ERRORS)
def test_a_line_of_a_corpus_that_cannot_be_used_is_named(tmp_path: Path, case: str) -> None:
    row, message = CORPUS_ERRORS[case]
    corpus = write_lines(tmp_path / "corpus.jsonl", {"token_ids": [1]}, row)
    with pytest.raises(UserError, match=message):
        list(Responses(Path(corpus), Tokenizer(None), 64))


def test_half_a_surrogate_pair_in_a_corpus_is_refused_with_its_line(tmp_path: Path) -> None:
    """The message showed the text, and not where it stands among thousands."""
    corpus = write_lines(tmp_path / "corpus.jsonl", {"text": "def f():"}, {"text": "\ud800."})
    message = r"\.suffix_decoding_corpus: .*corpus\.jsonl:2: a text must be one that UTF-8 can hold, got '\\ud800\.'"
    with pytest.raises(UserError, match=message):
        list(Responses(Path(corpus), Tokenizer(TARGET_DIR), 4096))


def test_a_corpus_without_a_response_and_one_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must hold at least one response"):
        list(Responses(Path(write_lines(tmp_path / "empty.jsonl", "")), Tokenizer(None), 64))
    with pytest.raises(UserError, match=r"config\.suffix_decoding_corpus must be a \.jsonl file.*check the path"):
        LLM("no-such-model", speculative_config={**METHOD, "suffix_decoding_corpus": "nowhere.jsonl"})
    with pytest.raises(UserError, match="it is a directory: check the path"):
        LLM("no-such-model", speculative_config={**METHOD, "suffix_decoding_corpus": str(tmp_path)})
