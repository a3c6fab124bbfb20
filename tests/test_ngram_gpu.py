"""The proposer on the device guesses what `ngram` guesses, and learns what was accepted without reading it back."""

from __future__ import annotations

import random
from itertools import count, pairwise

import torch

from proposers.base import ProposerContext
from proposers.ngram import NgramProposer
from proposers.ngram_gpu import NgramGpuProposer
from runner.engine.request import DraftTokens, Request, VerifyOutput
from runner.engine.sampling_params import SamplingParams
from runner.engine.schedule import Schedule
from tests.decoding_steps import scheduled
from tests.no_readback import NoReadback

CONTEXT = ProposerContext(
    vocab_size=100,
    max_model_len=90,
    max_num_seqs=3,
    max_num_batched_tokens=1024,
    eos_token_ids=(0,),
    block_size=16,
    device=torch.device("cpu"),
    dtype=torch.float32,
    batch_invariant=True,
    needs_draft_probs=False,
)
KEYS = {"num_speculative_tokens": 4, "context": CONTEXT, "prompt_lookup_min": 2, "prompt_lookup_max": 3}


def make_request(request_id: str, prompt_token_ids: list[int], output_token_ids: list[int] | None = None) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling_params=SamplingParams(max_tokens=99),
        seed=0,
        output_token_ids=output_token_ids or [],
    )


def schedule_of(parts: list[tuple[Request, int]]) -> Schedule:
    """Requests that decode and how many tokens each may draft; one without an output ends its prompt in this step."""
    items = [scheduled(request, limit, is_decoding=bool(request.output_token_ids)) for request, limit in parts]
    return Schedule(scheduled=sorted(items, key=lambda item: not item.is_decoding))


def by_request(drafts: DraftTokens) -> list[list[int]]:
    """Drafts without slots of -1."""
    cu, flat = drafts.cu_num_draft_tokens, drafts.token_ids.tolist()
    return [[token for token in flat[start:end] if token >= 0] for start, end in pairwise(cu)]


def output_of(rows: list[list[int]]) -> VerifyOutput:
    width = max(map(len, rows))
    return VerifyOutput(
        token_ids=torch.tensor([row + [-1] * (width - len(row)) for row in rows]),
        num_accepted_tokens=torch.tensor([len(row) - 1 for row in rows]),
    )


def test_it_guesses_what_ngram_guesses_through_acceptance_preemption_and_new_requests() -> None:
    """Texts of three kinds of token; requests skip steps, are preempted, end, and leave their rows to others."""
    generator = random.Random(5)
    ngram, ngram_gpu = NgramProposer(**KEYS), NgramGpuProposer(**KEYS)
    running: list[Request] = []
    names = map(str, count())
    num_drafted = num_seen = 0
    for _ in range(400):
        for request in list(running):
            if generator.random() < 0.1 or request.num_tokens + 5 > CONTEXT.max_model_len:
                ngram.release(request.request_id)
                ngram_gpu.release(request.request_id)
                if generator.random() < 0.5 or request.num_tokens + 5 > CONTEXT.max_model_len:  # else preempted
                    running.remove(request)
        while len(running) < CONTEXT.max_num_seqs:
            prompt = [generator.randrange(3) for _ in range(generator.randint(1, 30))]
            running.append(make_request(next(names), prompt))
        now = [request for request in running if generator.random() < 0.8]
        generator.shuffle(now)
        if not now:
            continue
        schedule = schedule_of([(request, generator.randint(0, 4)) for request in now])
        expected = by_request(ngram.propose(schedule))
        drafts = ngram_gpu.propose(schedule)
        limits = [item.max_draft_tokens for item in schedule.decoding]
        assert by_request(drafts) == expected
        assert drafts.num_draft_tokens == limits
        assert all(len(guess) in (0, limit) for guess, limit in zip(expected, limits, strict=True))
        num_drafted += sum(map(len, expected))
        num_seen += len(expected)
        rows = []
        for place, item in enumerate(schedule.scheduled):
            guess = expected[place] if item.is_decoding else []
            rows.append([*guess[: generator.randint(0, len(guess))], generator.randrange(3)])
        output = output_of(rows)
        for item, row in zip(schedule.scheduled, rows, strict=True):
            item.request.output_token_ids.extend(row)
        ngram.update(schedule, output)
        ngram_gpu.update(schedule, output)
    assert num_seen > 500 and num_drafted > 800


def test_a_step_reads_nothing_back_to_the_host() -> None:
    proposer = NgramGpuProposer(**KEYS)
    requests = [make_request("a", [1, 2, 3, 1], [2]), make_request("b", [7, 8], [9]), make_request("c", [5, 5, 5])]
    schedule = schedule_of([(requests[0], 4), (requests[1], 2), (requests[2], 0)])
    output = output_of([[3, 1, 9], [6], [4]])
    with NoReadback():  # type: ignore[no-untyped-call]
        drafts = proposer.propose(schedule)
        proposer.update(schedule, output)
    assert drafts.is_padded and drafts.token_ids.tolist() == [3, 1, 2, 3, -1, -1]


def test_what_was_rejected_is_forgotten() -> None:
    proposer = NgramGpuProposer(**KEYS)
    request = make_request("a", [1, 2, 3, 1], [2])
    schedule = schedule_of([(request, 4)])
    proposer.propose(schedule)
    proposer.update(schedule, output_of([[6]]))
    request.output_token_ids.append(6)
    schedule = schedule_of([(request, 4)])
    assert by_request(proposer.propose(schedule)) == [[]], "1 2 6 is new: no 3 1 2 3 lies between"


def test_a_text_may_fill_the_whole_model_length() -> None:
    """The step that ends there writes its slots behind the end, into no other request's row."""
    proposer = NgramGpuProposer(**KEYS)
    full = make_request("full", [1] * (CONTEXT.max_model_len - 2), [1])
    other = make_request("other", [1, 2, 3, 1], [2])
    for others in ([3, 1, 2, 3, 1], [7, 7, 7, 1, 2]):
        schedule = schedule_of([(full, 0), (other, 4)])
        proposer.propose(schedule)
        proposer.update(schedule, output_of([[8], others]))
    proposer.release("full")
    schedule = schedule_of([(other, 4)])
    assert by_request(proposer.propose(schedule)) == [[3, 1, 7, 7]]
