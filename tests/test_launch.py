"""Which arithmetic a token gets: prompt tokens the prefill family's, generated ones the decode family's, always.

The CPU's families have the same bits, so no comparison of texts there could tell.
"""

from __future__ import annotations

import pytest

from runner.engine.launch import Launch, Part, StepLaunches
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams

PROMPT = [10, 11, 12, 13, 14]
OUTPUT = [20, 21, 22, 23]


def request() -> Request:
    own = Request(
        request_id="a", prompt_token_ids=PROMPT, sampling_params=SamplingParams(), seed=0, block_table=[1, 2, 3]
    )
    own.output_token_ids.extend(OUTPUT)
    return own


def places(launch: Launch) -> list[tuple[int, int]]:
    return [(segment.start, segment.num_tokens) for segment in launch.segments]


@pytest.mark.parametrize(
    ("start", "end", "prefill", "decode"),
    [
        (0, 9, PROMPT, OUTPUT),  # all of a preempted request
        (2, 9, PROMPT[2:], OUTPUT),
        (0, 5, PROMPT, []),
        (0, 3, PROMPT[:3], []),
        (3, 7, PROMPT[3:], OUTPUT[:2]),  # a chunk across the prompt's end
        (5, 9, [], OUTPUT),
        (6, 8, [], OUTPUT[1:3]),
        (8, 9, [], OUTPUT[3:]),  # a plain step
    ],
)
def test_a_part_is_cut_at_the_prompts_end_also_when_it_is_recomputed(
    start: int, end: int, prefill: list[int], decode: list[int]
) -> None:
    step = StepLaunches.of([Part(request=request(), start=start, end=end, num_logits=1)])
    assert (step.prefill.token_ids, step.decode.token_ids) == (prefill, decode)
    assert places(step.prefill) == ([(start, len(prefill))] if prefill else [])
    assert places(step.decode) == ([(end - len(decode), len(decode))] if decode else [])
    last = step.decode if decode else step.prefill  # whose last row predicts
    assert last.logits_rows == [len(last.token_ids) - 1]
    assert not decode or step.prefill.logits_rows == []


@pytest.mark.parametrize("end", [5, 9], ids=["behind the prompt", "behind generated tokens"])
def test_drafts_are_the_decode_familys_wherever_they_begin(end: int) -> None:
    step = StepLaunches.of([Part(request=request(), start=end - 1, end=end, num_draft_tokens=3, num_logits=3)])
    generated = OUTPUT[-1:] if end == 9 else []
    assert step.prefill.token_ids == ([] if generated else PROMPT[-1:])
    assert step.decode.token_ids == [*generated, 0, 0, 0]
    assert step.decode.draft_rows == list(range(len(generated), len(generated) + 3))


def test_rows_of_both_families_come_back_in_the_order_of_their_parts() -> None:
    parts = [
        Part(request=request(), start=8, end=9, num_draft_tokens=1, num_logits=2),
        Part(request=request(), start=3, end=7, num_logits=1),
        Part(request=request(), start=0, end=5, num_logits=1),
    ]
    step = StepLaunches.of(parts)
    assert step.prefill.token_ids == [*PROMPT[3:], *PROMPT]
    assert step.decode.token_ids == [*OUTPUT[3:], 0, *OUTPUT[:2]]
    rows = [*step.prefill.token_ids, *step.decode.token_ids]
    assert step.token_order is not None and [rows[row] for row in step.token_order] == [
        *(*OUTPUT[3:], 0),
        *(*PROMPT[3:], *OUTPUT[:2]),
        *PROMPT,
    ]
    logits = [(launch.family, row) for launch in (step.prefill, step.decode) for row in launch.logits_rows]
    assert step.logits_order is not None and [logits[row] for row in step.logits_order] == [
        ("decode", 0),
        ("decode", 1),
        ("decode", 3),
        ("prefill", 6),
    ]
