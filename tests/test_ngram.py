"""Prompt lookup against its definition, a search of the whole sequence, and at a cost of the new tokens alone."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proposers.base import ProposerContext
from proposers.ngram import NgramIndex, NgramProposer
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.engine.scheduler import Schedule, ScheduledRequest

CPU = torch.device("cpu")


def naive_lookup(token_ids: list[int], min_n: int, max_n: int, num_tokens: int) -> list[int]:
    """The definition: what followed the last n tokens where they last occurred, for the largest n that did occur."""
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(token_ids) - 1, n - 1, -1):
            if token_ids[end - n : end] == token_ids[len(token_ids) - n :]:
                copied = list(token_ids)
                for place in range(end, end + num_tokens):  # runs into what it copies, as LZ77 does
                    copied.append(copied[place])
                return copied[len(token_ids) :]
    return []


def index_of(token_ids: list[int], min_n: int = 1, max_n: int = 3) -> NgramIndex:
    index = NgramIndex(min_n, max_n)
    index.extend(token_ids)
    return index


def make_proposer(min_n: int = 1, max_n: int = 3) -> NgramProposer:
    context = ProposerContext(
        vocab_size=100,
        max_model_len=1000,
        eos_token_ids=(0,),
        block_size=16,
        device=CPU,
        dtype=torch.float32,
        batch_invariant=True,
        needs_draft_probs=False,
    )
    return NgramProposer(num_speculative_tokens=4, context=context, prompt_lookup_min=min_n, prompt_lookup_max=max_n)


def make_request(prompt_token_ids: list[int], request_id: str = "0") -> Request:
    return Request(
        request_id=request_id, prompt_token_ids=prompt_token_ids, sampling_params=SamplingParams(max_tokens=99), seed=0
    )


def schedule_of(*requests: Request, max_draft_tokens: int = 4) -> Schedule:
    """A step in which all of them decode."""
    return Schedule(
        scheduled=[
            ScheduledRequest(
                request=request,
                start=request.num_tokens - 1,
                num_new_tokens=1,
                max_draft_tokens=max_draft_tokens,
                yields_token=True,
                is_decoding=True,
            )
            for request in requests
        ]
    )


class CountingDict(dict[tuple[int, ...], int]):
    """Counts what is written into it."""

    num_writes = 0

    def __setitem__(self, key: tuple[int, ...], value: int) -> None:
        self.num_writes += 1
        super().__setitem__(key, value)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    chunks=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=8),
    min_n=st.integers(1, 4),
    width=st.integers(0, 4),
    num_tokens=st.integers(0, 12),
)
def test_the_index_that_grows_finds_what_a_search_of_the_whole_sequence_finds(
    chunks: list[list[int]], min_n: int, width: int, num_tokens: int
) -> None:
    index, token_ids = NgramIndex(min_n, min_n + width), []
    for chunk in chunks:
        index.extend(chunk)
        token_ids += chunk
        assert index.token_ids == token_ids
        assert index.lookup(num_tokens) == naive_lookup(token_ids, min_n, min_n + width, num_tokens)


def test_the_longest_match_wins_over_a_more_recent_shorter_one() -> None:
    assert index_of([1, 2, 3, 50, 9, 3, 60, 1, 2, 3]).lookup(1) == [50]
    assert index_of([1, 2, 3, 50, 9, 3, 60, 1, 2, 3], max_n=1).lookup(1) == [60]


def test_among_matches_of_one_length_the_most_recent_wins() -> None:
    assert index_of([1, 2, 50, 1, 2, 60, 1, 2]).lookup(3) == [60, 1, 2]


def test_a_match_shorter_than_the_minimum_is_none() -> None:
    assert index_of([7, 1, 2, 8, 2], min_n=1).lookup(2) == [8, 2]
    assert index_of([7, 1, 2, 8, 2], min_n=2).lookup(2) == []
    assert index_of([1, 2], min_n=3, max_n=5).lookup(2) == []


def test_the_end_of_the_sequence_is_no_match_of_itself() -> None:
    assert index_of([1, 2, 3]).lookup(3) == []
    assert index_of([]).lookup(3) == []


def test_a_period_goes_on_as_far_as_is_asked() -> None:
    assert index_of([9, 1, 2, 3, 1, 2, 3]).lookup(8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert index_of([5, 4, 4]).lookup(5) == [4] * 5


def test_an_index_costs_a_write_for_each_length_of_a_new_token_however_long_the_context() -> None:
    index = NgramIndex(2, 5)
    writes = index._continuation = CountingDict()
    index.extend([i * i % 17 for i in range(2000)])
    assert writes.num_writes <= 4 * 2000
    for num_new_tokens in (1, 3, 1, 8):
        before = writes.num_writes
        index.extend([3] * num_new_tokens)
        assert writes.num_writes - before == 4 * num_new_tokens
        index.lookup(6)
        assert writes.num_writes - before == 4 * num_new_tokens


def test_a_proposer_reads_each_token_of_a_request_once() -> None:
    proposer, request = make_proposer(min_n=1, max_n=1), make_request([i % 7 for i in range(500)])
    proposer.propose(schedule_of(request))
    writes = proposer._indices["0"]._continuation = CountingDict(proposer._indices["0"]._continuation)
    for num_new_tokens in (1, 5, 2):
        request.output_token_ids += [1] * num_new_tokens
        proposer.propose(schedule_of(request))
    assert writes.num_writes == 8


def test_a_proposer_sees_prompt_and_output_of_each_request_and_of_no_other() -> None:
    proposer = make_proposer()
    first, second, third = make_request([1, 2, 3, 1], "a"), make_request([1, 9, 9, 9], "b"), make_request([2, 5], "c")
    for request, token in ((first, 2), (second, 1), (third, 7)):
        request.output_token_ids.append(token)
    drafts = proposer.propose(schedule_of(first, second, third))
    assert drafts.num_draft_tokens == [4, 4, 0]
    assert drafts.token_ids.tolist() == [3, 1, 2, 3, 9, 9, 9, 1]
    assert drafts.token_ids.dtype == torch.int64 and drafts.probs is None


def test_a_proposer_drafts_no_more_than_it_may() -> None:
    proposer, request = make_proposer(), make_request([4, 4, 4, 4])
    for max_draft_tokens in (0, 1, 3):
        drafts = proposer.propose(schedule_of(request, max_draft_tokens=max_draft_tokens))
        assert drafts.num_draft_tokens == [max_draft_tokens]
        assert drafts.token_ids.tolist() == [4] * max_draft_tokens


def test_a_step_in_which_nobody_decodes_has_no_drafts() -> None:
    drafts = make_proposer().propose(Schedule(scheduled=[]))
    assert drafts.cu_num_draft_tokens == [0] and drafts.token_ids.shape == (0,)


def test_release_forgets_a_request_and_leaves_the_others() -> None:
    """The next generate() numbers its requests from 0 again."""
    proposer = make_proposer()
    kept = make_request([1, 2, 1], "kept")
    proposer.propose(schedule_of(kept, make_request([5, 6, 5], "0")))
    proposer.release("0")
    proposer.release("never seen")
    assert set(proposer._indices) == {"kept"}
    drafts = proposer.propose(schedule_of(make_request([7, 8, 7, 9, 5], "0"), kept, max_draft_tokens=2))
    assert drafts.num_draft_tokens == [0, 2], "5 was followed by 6 in the old request only"
    assert drafts.token_ids.tolist() == [2, 1]


def test_a_preempted_request_guesses_on_as_if_nothing_had_happened() -> None:
    proposer, request = make_proposer(), make_request([3, 1, 4, 1, 5, 3, 1])
    before = proposer.propose(schedule_of(request))
    proposer.release(request.request_id)
    after = proposer.propose(schedule_of(request))
    assert after.token_ids.tolist() == before.token_ids.tolist() == [4, 1, 5, 3]
