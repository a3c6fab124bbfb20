"""Where a request ends, and where its text ends: the same cut whether tokens arrive one by one or many at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.engine.stopping import Stop, StopRules
from runner.llm import LLM
from runner.tiny import TARGET_DIR
from runner.tokenizer import Tokenizer
from runner.trace import RequestTraces

EOS = 0
PIECES = ("", "a", "b", "c", "ab", "ca", "bcb", "abcabc")  # what each token of a made-up tokenizer prints


def decode_pieces(token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    eos = "" if skip_special_tokens else "</s>"
    return "".join(eos if token == EOS else PIECES[token] for token in token_ids)


def make_request(num_prompt_tokens: int = 3, **params: Any) -> Request:
    return Request(
        request_id="0", prompt_token_ids=[1] * num_prompt_tokens, sampling_params=SamplingParams(**params), seed=0
    )


def make_rules(max_model_len: int = 1000, decode: Any = decode_pieces) -> StopRules:
    special = frozenset({EOS}) if decode is not None else frozenset[int]()
    return StopRules(
        eos_token_ids=frozenset({EOS}), max_model_len=max_model_len, decode=decode, special_token_ids=special
    )


def run(rules: StopRules, request: Request, steps: Sequence[list[int]]) -> Stop:
    """Commit what each step yields until the request ends, as the scheduler does; the last verdict."""
    stop = Stop(num_tokens=0)
    for new_token_ids in steps:
        stop = rules.apply(request, new_token_ids)
        request.output_token_ids += new_token_ids[: stop.num_tokens]
        if stop.finish_reason is not None:
            request.finish_reason, request.stop_reason = stop.finish_reason, stop.stop_reason
            break
    return stop


def one_by_one(token_ids: list[int]) -> list[list[int]]:
    return [[token] for token in token_ids]


def in_steps(token_ids: list[int], sizes: list[int]) -> list[list[int]]:
    steps, start = [], 0
    while start < len(token_ids):
        size = sizes[len(steps) % len(sizes)]
        steps.append(token_ids[start : start + size])
        start += size
    return steps


def text_of(request: Request, decode: Any = decode_pieces) -> str:
    return RequestTraces(decode, {}).finish(request).text


def expected_end(rules: StopRules, request: Request, token_ids: list[int], decode: Any) -> tuple[int, Any, Any]:
    """The definition: the whole output judged after every token. (kept tokens, finish_reason, stop_reason)"""
    params = request.sampling_params
    for kept, token in enumerate(token_ids, start=1):
        if kept >= params.min_tokens:
            if token == EOS and not params.ignore_eos:
                return kept, "stop", None
            if token in params.stop_token_ids:
                return kept, "stop", token
            text = decode(token_ids[params.min_tokens : kept])
            for stop in params.stop:
                if stop in text:
                    return kept, "stop", stop
        if kept == params.max_tokens or request.num_prompt_tokens + kept == rules.max_model_len:
            return kept, "length", None
    return len(token_ids), None, None


PARAMS = st.builds(
    lambda max_tokens, min_tokens, **rest: dict(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), **rest),
    max_tokens=st.integers(1, 30),
    min_tokens=st.integers(0, 12),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
    stop_token_ids=st.lists(st.integers(1, 7), max_size=1),
    ignore_eos=st.booleans(),
)
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@settings(max_examples=200)
@given(
    token_ids=st.lists(st.integers(0, 7), min_size=1, max_size=30),
    params=PARAMS, max_model_len=st.integers(5, 40), sizes=SIZES,
)  # fmt: skip
def test_the_cut_is_the_same_however_many_tokens_arrive_together(
    token_ids: list[int], params: dict[str, Any], max_model_len: int, sizes: list[int]
) -> None:
    rules, texts = make_rules(max_model_len), []
    for steps in (one_by_one(token_ids), in_steps(token_ids, sizes), [token_ids]):
        request = make_request(**params)
        expected = expected_end(rules, request, token_ids, decode_pieces)
        stop = run(rules, request, steps)
        assert (len(request.output_token_ids), stop.finish_reason, stop.stop_reason) == expected
        texts.append(text_of(request))
    assert len(set(texts)) == 1


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TARGET_DIR)


@settings(max_examples=100)
@given(
    text=st.text("ab\n .日本語é😀(", min_size=1, max_size=24),
    where=st.tuples(st.integers(0, 23), st.integers(1, 12)),
    sizes=SIZES,
)
@example(text="def f(): こんにちは世界 and on", where=(9, 7), sizes=[5])
@example(text="😀" * 12 + "日本", where=(5, 9), sizes=[4])
def test_a_stop_string_is_found_in_text_of_any_script(
    tokenizer: Tokenizer, text: str, where: tuple[int, int], sizes: list[int]
) -> None:
    """こんにちは世界 is 7 characters and 21 tokens: it was missed while characters were counted, not bytes."""
    start = where[0] % len(text)
    wanted = text[start : start + where[1]]
    token_ids = tokenizer.encode(text)[1]
    for steps in (one_by_one(token_ids), in_steps(token_ids, sizes)):
        request = make_request(max_tokens=200, stop=wanted)
        stop = run(make_rules(decode=tokenizer.decode), request, steps)
        assert (stop.finish_reason, stop.stop_reason) == ("stop", wanted)
        assert text_of(request, tokenizer.decode) == text[: text.index(wanted)]
        assert wanted not in tokenizer.decode(request.output_token_ids[:-1]), "not a token more than it takes"


@pytest.mark.parametrize("skips", [True, False])
@settings(max_examples=50)
@given(sizes=SIZES, num_silent=st.integers(0, 30))
def test_special_tokens_that_are_left_out_hide_no_stop_string(skips: bool, sizes: list[int], num_silent: int) -> None:
    """They print nothing, and took the room of those that do."""
    token_ids = [3, 1, *[EOS] * num_silent, 2, 3]
    for steps in (one_by_one(token_ids), in_steps(token_ids, sizes)):
        request = make_request(max_tokens=99, stop="ab", ignore_eos=True, skip_special_tokens=skips)
        stop = run(make_rules(), request, steps)
        assert stop.stop_reason == ("ab" if num_silent == 0 or skips else None)


def test_eos_ends_a_request_unless_it_is_ignored() -> None:
    request = make_request(max_tokens=9)
    assert run(make_rules(), request, [[1, 2], [3, EOS, 4]]) == Stop(num_tokens=2, finish_reason="stop")
    assert request.output_token_ids == [1, 2, 3, EOS]
    ignoring = make_request(max_tokens=9, ignore_eos=True)
    assert run(make_rules(), ignoring, [[1, 2], [3, EOS, 4]]) == Stop(num_tokens=3)


def test_a_model_may_have_several_eos_tokens() -> None:
    rules = StopRules(eos_token_ids=frozenset({4, 6}), max_model_len=100)
    for eos in (4, 6):
        assert rules.apply(make_request(), [1, eos, 1]) == Stop(num_tokens=2, finish_reason="stop")


def test_a_stop_token_ends_the_output_and_its_text_is_left_out() -> None:
    request = make_request(max_tokens=9, stop_token_ids=[4])
    assert run(make_rules(), request, [[1, 4, 2]]) == Stop(num_tokens=2, finish_reason="stop", stop_reason=4)
    assert request.output_token_ids == [1, 4]
    assert text_of(request) == "a"


@pytest.mark.parametrize("is_included", [False, True])
def test_what_ended_the_text_is_part_of_it_where_asked_for(is_included: bool) -> None:
    """A stop string with nothing behind it, a stop token, and an eos that prints."""
    asked: dict[str, Any] = {"max_tokens": 9, "include_stop_str_in_output": is_included, "skip_special_tokens": False}
    for params, token_ids, text, end in (
        ({"stop": ["bc"]}, [1, 1, 7, 1], "aaa", "bc"),  # a a abcabc
        ({"stop": ["ab"], "min_tokens": 2}, [4, 3, 7, 1], "abc", "ab"),  # ab c abcabc
        ({"stop_token_ids": [4]}, [1, 4, 2], "a", "ab"),
        ({}, [1, 3, EOS, 1], "ac", "</s>"),
    ):
        request = make_request(**asked, **params)
        run(make_rules(), request, [token_ids])
        assert text_of(request) == text + (end if is_included else "")


def test_special_tokens_print_where_asked_for_and_may_hold_a_stop_string() -> None:
    request = make_request(max_tokens=4, ignore_eos=True, skip_special_tokens=False)
    run(make_rules(), request, [[1, EOS, 2, 3]])
    assert text_of(request) == "a</s>bc"
    request = make_request(max_tokens=4, ignore_eos=True, skip_special_tokens=False, stop=["s>b"])
    assert run(make_rules(), request, [[1, EOS, 2, 3]]).num_tokens == 3
    assert text_of(request) == "a</"


def test_a_stop_token_of_text_seen_before_takes_only_itself_out() -> None:
    request = make_request(max_tokens=9, stop_token_ids=[3])
    run(make_rules(), request, [[7, 7, 3]])
    assert text_of(request) == "abcabcabcabc"


def test_a_stop_string_across_tokens_is_cut_out_of_the_text_not_out_of_the_tokens() -> None:
    request = make_request(max_tokens=9, stop=["bcbc"])
    stop = run(make_rules(), request, [[1], [2, 3], [6, 1]])  # a b c|bcb a
    assert stop == Stop(num_tokens=1, finish_reason="stop", stop_reason="bcbc")
    assert request.output_token_ids == [1, 2, 3, 6]
    assert text_of(request) == "a"


def test_tokens_that_print_nothing_do_not_hide_a_stop_string() -> None:
    request = make_request(max_tokens=9, stop=["ab"], ignore_eos=True)
    assert run(make_rules(), request, one_by_one([3, 1, EOS, EOS, EOS, 2])).stop_reason == "ab"
    assert text_of(request) == "c"


def test_the_first_stop_string_in_the_list_is_the_reason_when_a_token_completes_two() -> None:
    request = make_request(max_tokens=9, stop=["cab", "bc"])
    assert run(make_rules(), request, [[7]]).stop_reason == "cab"
    assert text_of(request) == "ab"


def test_stop_strings_before_min_tokens_do_not_count_and_stay_in_the_text() -> None:
    for steps in ([[4, 4, 4], [3, 4, 3]], [[4, 4, 4, 3, 4, 3]]):
        request = make_request(max_tokens=9, min_tokens=3, stop=["ab"])
        assert run(make_rules(), request, steps).stop_reason == "ab"
        assert request.output_token_ids == [4, 4, 4, 3, 4]
        assert text_of(request) == "abababc"


def test_a_stop_string_begun_before_min_tokens_does_not_count() -> None:
    request = make_request(max_tokens=4, min_tokens=1, stop=["ab"])
    assert run(make_rules(), request, [[1, 2, 3, 3]]) == Stop(num_tokens=4, finish_reason="length")


def test_max_tokens_and_the_context_end_a_request_by_length() -> None:
    request = make_request(max_tokens=3)
    assert run(make_rules(), request, [[1, 1], [1, 1]]) == Stop(num_tokens=1, finish_reason="length")
    in_context = make_request(num_prompt_tokens=7, max_tokens=90)
    assert run(make_rules(max_model_len=10), in_context, [[1] * 8]) == Stop(num_tokens=3, finish_reason="length")
    assert in_context.num_tokens == 10


def test_the_last_token_that_fits_may_still_be_a_stop() -> None:
    request = make_request(max_tokens=2)
    assert run(make_rules(), request, [[1, EOS, 1]]) == Stop(num_tokens=2, finish_reason="stop")


def test_without_a_tokenizer_tokens_alone_end_a_request() -> None:
    request = make_request(max_tokens=5, stop_token_ids=[7])
    assert run(make_rules(decode=None), request, [[1, 7]]).stop_reason == 7


METHODS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 1, "prompt_lookup_max": 4},
}


@pytest.fixture(scope="module", params=METHODS)
def tiny(request: pytest.FixtureRequest) -> LLM:
    return LLM("tiny", speculative_config=METHODS[request.param], device="cpu", max_num_seqs=8)


def test_a_text_ends_before_its_stop_string_and_the_tokens_with_it(tiny: LLM) -> None:
    """Through the whole engine: every stop is cut from what the same request says without one."""
    prompt = "def add(self, name, value):\n    self.name = name\n    self.value"
    plain = tiny.generate(prompt, SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True))[0].outputs[0]
    assert plain.finish_reason == "length" and len(plain.text) > 60
    stops = [plain.text[start : start + size] for start, size in ((5, 1), (9, 3), (17, 9), (30, 2), (40, 12), (50, 5))]
    params = [SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, stop=stop) for stop in stops]
    for stop, answer in zip(stops, tiny.generate([prompt] * len(stops), params), strict=True):
        (cut,) = answer.outputs
        assert (cut.text, cut.finish_reason, cut.stop_reason) == (plain.text[: plain.text.index(stop)], "stop", stop)
        assert cut.token_ids == plain.token_ids[: len(cut.token_ids)]
        tokenizer = tiny.engine.tokenizer
        assert stop in tokenizer.decode(cut.token_ids) and stop not in tokenizer.decode(cut.token_ids[:-1])
    tiny.engine.block_manager.check_integrity([])


def test_a_stop_token_and_min_tokens_cut_the_text_of_the_engine_too(tiny: LLM) -> None:
    prompt = "import os\nimport sys\nimport "
    greedy = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    plain = tiny.generate(prompt, SamplingParams(**greedy))[0].outputs[0]
    last = plain.token_ids[11]
    kept = plain.token_ids[: plain.token_ids.index(last)]
    (stopped,) = tiny.generate(prompt, SamplingParams(**greedy, stop_token_ids=[last]))[0].outputs
    assert (stopped.token_ids, stopped.stop_reason) == ((*kept, last), last)
    assert stopped.text == tiny.engine.tokenizer.decode(kept)
    (late,) = tiny.generate(prompt, SamplingParams(**greedy, stop=["\n"], min_tokens=20))[0].outputs
    head = tiny.engine.tokenizer.decode(plain.token_ids[:20])
    assert "\n" in head and len(late.token_ids) > 20
    assert late.token_ids[:20] == plain.token_ids[:20] and late.text == head + late.text[len(head) :].partition("\n")[0]
