"""Prompt lookup against its definition, a search of the whole sequence, and at a cost of the new tokens alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proposers.base import ProposerContext
from proposers.lookup import ngram_index
from proposers.lookup.ngram_definition import naive_lookup
from proposers.lookup.ngram_index import NgramIndex
from proposers.ngram import NgramProposer
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.engine.schedule import Schedule
from tests.decoding_steps import schedule_of

CPU = torch.device("cpu")


def lookup(token_ids: list[int], num_tokens: int, min_n: int = 1, max_n: int = 3) -> list[int]:
    """The draft of a sequence that is new to the index."""
    index = NgramIndex(min_n, max_n)
    return draft(index, index.add(), token_ids, num_tokens)


def draft(index: NgramIndex, sequence: int, new_token_ids: list[int], num_tokens: int) -> list[int]:
    token_ids, cu_num_drafts = index.extend_and_draft([sequence], new_token_ids, [len(new_token_ids)], [num_tokens])
    assert cu_num_drafts.tolist() == [0, len(token_ids)]
    return token_ids.tolist()


def make_proposer(min_n: int = 1, max_n: int = 3) -> NgramProposer:
    context = ProposerContext(
        vocab_size=100,
        max_model_len=1000,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
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


@settings(max_examples=200)
@given(
    steps=st.lists(
        st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 3), max_size=9), st.integers(0, 12)), max_size=4),
        max_size=12,
    ),
    released=st.sets(st.tuples(st.integers(0, 11), st.integers(0, 4))),
    min_n=st.integers(1, 4),
    width=st.integers(0, 4),
)
def test_an_index_of_growing_sequences_finds_what_a_search_of_each_finds(
    steps: list[list[tuple[int, list[int], int]]], released: set[tuple[int, int]], min_n: int, width: int
) -> None:
    """Batches in any order, several tokens at once or none, releases and new beginnings, regions that grow early."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram_index, "MIN_CAPACITY_LOG2", 1)
        index, numbers, texts = NgramIndex(min_n, min_n + width), {}, {}
        for step, parts in enumerate(steps):
            batch = {name: (new, wanted) for name, new, wanted in parts}
            for name, (new, _) in batch.items():
                if name not in numbers:
                    numbers[name], texts[name] = index.add(), []
                texts[name] += new
            new_token_ids = [token for new, _ in batch.values() for token in new]
            num_new, num_wanted = [len(new) for new, _ in batch.values()], [wanted for _, wanted in batch.values()]
            held = [numbers[name] for name in batch]
            token_ids, cu = index.extend_and_draft(held, new_token_ids, num_new, num_wanted)
            for place, (name, (_, wanted)) in enumerate(batch.items()):
                assert index.token_ids(numbers[name]) == texts[name]
                expected = naive_lookup(texts[name], min_n, min_n + width, wanted)
                assert token_ids[cu[place] : cu[place + 1]].tolist() == expected
            for name in [name for name in numbers if (step, name) in released]:
                index.release(numbers.pop(name))
                del texts[name]


def test_entries_that_look_alike_are_told_apart_by_the_text() -> None:
    """A text of a million tokens leaves an entry 11 bits of its hash, and the table is half full: every 1,400th new
    token meets an entry that looks like its own. All tokens are new, so every match would be a false one."""
    index = NgramIndex(1, 1)
    sequence = index.add()
    num_old, num_new = 2**20 - 8010, 8000
    draft(index, sequence, list(range(num_old)), 0)
    for token in range(num_old, num_old + num_new):
        assert draft(index, sequence, [token], 1) == []


def test_the_longest_match_wins_over_a_more_recent_shorter_one() -> None:
    assert lookup([1, 2, 3, 50, 9, 3, 60, 1, 2, 3], 1) == [50]
    assert lookup([1, 2, 3, 50, 9, 3, 60, 1, 2, 3], 1, max_n=1) == [60]


def test_among_matches_of_one_length_the_most_recent_wins() -> None:
    assert lookup([1, 2, 50, 1, 2, 60, 1, 2], 3) == [60, 1, 2]


def test_a_match_shorter_than_the_minimum_is_none() -> None:
    assert lookup([7, 1, 2, 8, 2], 2, min_n=1) == [8, 2]
    assert lookup([7, 1, 2, 8, 2], 2, min_n=2) == []
    assert lookup([1, 2], 2, min_n=3, max_n=5) == []


def test_the_end_of_the_sequence_is_no_match_of_itself() -> None:
    assert lookup([1, 2, 3], 3) == []
    assert lookup([], 3) == []


def test_a_period_goes_on_as_far_as_is_asked() -> None:
    assert lookup([9, 1, 2, 3, 1, 2, 3], 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert lookup([5, 4, 4], 5) == [4] * 5


def test_token_ids_up_to_the_largest_are_kept_apart() -> None:
    large = 2**31 - 1
    assert lookup([large, 0, 7, large, 0], 2) == [7, large]
    assert lookup([large, 0, 7, large - 1, 0], 2, min_n=2) == []


def test_a_new_token_costs_a_write_for_each_length_however_long_the_context() -> None:
    index = NgramIndex(2, 5)
    sequence = index.add()
    draft(index, sequence, [i * i % 17 for i in range(20_000)], 0)
    for num_new_tokens in (1, 3, 1, 8, 0):
        before = index.pool.copy()
        draft(index, sequence, [3] * num_new_tokens, 6)
        assert np.count_nonzero(index.pool != before) <= (1 + 4) * num_new_tokens


def test_memory_is_bounded_by_the_tokens_held_and_used_again() -> None:
    index = NgramIndex(2, 5)
    for _ in range(5):
        sequences = [index.add() for _ in range(6)]
        for sequence in sequences:
            for part in (3000, 1, 2000):
                draft(index, sequence, list(range(part)), 0)
        for sequence in sequences:
            index.release(sequence)
    assert index.num_bytes <= 6 * 36 * (4096 + 8192) + 10240, "regions of 4096 tokens were outgrown by each of the six"


def test_bounds_that_hold_no_length_are_refused() -> None:
    for min_n, max_n in ((0, 3), (4, 3)):
        with pytest.raises(ValueError, match="1 <= min_n <= max_n"):
            NgramIndex(min_n, max_n)


def test_a_proposer_indexes_each_token_of_a_request_once() -> None:
    proposer, request = make_proposer(min_n=1, max_n=1), make_request([i % 7 for i in range(300)])
    proposer.propose(schedule_of(request))
    for num_new_tokens in (1, 5, 2):
        request.output_token_ids += [1] * num_new_tokens
        before = proposer.index.pool.copy()
        proposer.propose(schedule_of(request))
        assert np.count_nonzero(proposer.index.pool != before) <= 2 * num_new_tokens
        assert proposer.index.token_ids(0) == request.tokens_between(0, request.num_tokens)


def test_lengths_that_no_text_comes_to_cost_nothing() -> None:
    """The index was as wide as they are, and there was no memory for it."""
    huge, usual = make_proposer(min_n=1, max_n=10**12), make_proposer(min_n=1, max_n=1024)
    request = make_request([1, 2, 3, 1], "a")
    request.output_token_ids.append(2)
    drafts = [own.propose(schedule_of(request)).token_ids.tolist() for own in (huge, usual)]
    assert drafts[0] == drafts[1] == [3, 1, 2, 3]
    assert len(huge.index.pool) <= len(usual.index.pool)


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
    drafts = proposer.propose(schedule_of(make_request([7, 8, 7, 9, 5], "0"), kept, max_draft_tokens=2))
    assert drafts.num_draft_tokens == [0, 2], "5 was followed by 6 in the old request only"
    assert drafts.token_ids.tolist() == [2, 1]


def test_a_preempted_request_guesses_on_as_if_nothing_had_happened() -> None:
    proposer, request = make_proposer(), make_request([3, 1, 4, 1, 5, 3, 1])
    before = proposer.propose(schedule_of(request))
    proposer.release(request.request_id)
    after = proposer.propose(schedule_of(request))
    assert after.token_ids.tolist() == before.token_ids.tolist() == [4, 1, 5, 3]
