"""Whatever a request asks for, speculation gives it: text and logprobs are plain decoding's, bit for bit.

On the trained tiny family, whose tokenizer stop strings and bad words need. Plain decoding is the reference; other
tests say that it is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from runner.engine.errors import UserError
from runner.engine.request import Request
from runner.llm import LLM, SamplingParams
from runner.metrics import MetricsCollector
from runner.outputs import RequestOutput
from runner.tiny import DRAFT_DIR
from tests.conftest import complete
from tests.test_losslessness import METHODS, ONE_OF_A_KIND, method_config, tell_test_proposers

PROMPT = "import os\n\ndef walk(path):\n    for name in os.listdir(path):\n        if name"
PROMPTS = (PROMPT, "class Queue:\n    def __init__(self, maxsize):\n")
TINY = {"device": "cpu", "max_num_batched_tokens": 4096, "num_gpu_blocks_override": 320}  # 30 MB of KV, not 400
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 10}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "max_tokens": 10, "seed": 7}
# What the plain request says, so that each of these has something to change: see the test below.
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {**SAMPLED, "temperature": 1.3},
    "top k": {**SAMPLED, "temperature": 1.3, "top_k": 3},
    "top p": {**SAMPLED, "temperature": 1.3, "top_p": 0.5},
    "min p": {**SAMPLED, "temperature": 1.3, "min_p": 0.2},
    "seed": {**SAMPLED, "seed": 2**64 - 1},
    "presence penalty": {**GREEDY, "presence_penalty": 2.0},
    "frequency penalty": {**GREEDY, "frequency_penalty": 2.0},
    "repetition penalty": {**SAMPLED, "repetition_penalty": 1.8},
    "logit bias": {**GREEDY, "logit_bias": {300: 100.0, 301: 99.9}},
    "allowed tokens": {**SAMPLED, "allowed_token_ids": range(250, 700)},
    "bad words": {**GREEDY, "bad_words": ["not in", "name.split", "SymMM", "self"]},
    "bad words, sampled": {**SAMPLED, "bad_words": ["self", "name", ".", "return", "):\n", "import os"]},
    "stop tokens": {**SAMPLED, "temperature": 1.0, "stop_token_ids": range(200, 1500)},
    "min tokens": {**SAMPLED, "temperature": 1.0, "stop_token_ids": range(200, 1500), "min_tokens": 5},
    "stop strings": {**GREEDY, "stop": ["n", "):\n", "lf."]},
    "stop strings, min tokens": {**GREEDY, "stop": ["n", "):\n", "lf."], "min_tokens": 4},
    "n": {**SAMPLED, "n": 3},
    "ignore eos": {**SAMPLED, "ignore_eos": True, "logit_bias": {0: 20.0, 1: 20.0, 2: 20.0}},
    "logprobs": {**GREEDY, "logprobs": 3},
    "logprobs, none but its own": {**SAMPLED, "logprobs": 0},
    "logprobs of all tokens": {**SAMPLED, "logprobs": -1, "max_tokens": 4},
    "logprobs, n": {**SAMPLED, "logprobs": 2, "n": 3},
    "prompt logprobs": {**GREEDY, "prompt_logprobs": 2},
    "both logprobs, n": {**SAMPLED, "n": 2, "logprobs": 1, "prompt_logprobs": 4},
    "no speculation": {**SAMPLED, "speculative_sampling": False},
    "speculation": {**SAMPLED, "speculative_sampling": True},
    "two drafts a step": {**SAMPLED, "speculative_ratio": 2},
    "no drafts": {**GREEDY, "speculative_ratio": 0, "logprobs": 1},
    "much of it": {
        "temperature": 0.9, "max_tokens": 24, "seed": 3, "n": 2, "top_k": 50, "top_p": 0.95, "min_p": 0.01,
        "frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {300: 2.0},
        "bad_words": ["self", "os."], "allowed_token_ids": range(3, 2000), "min_tokens": 6, "stop": ["return"],
        "stop_token_ids": range(900, 1000), "logprobs": 4, "prompt_logprobs": 1,
    },
}  # fmt: skip
NEUTRAL = {  # change nothing by themselves
    "logprobs", "logprobs, none but its own", "logprobs of all tokens", "logprobs, n", "prompt logprobs",
    "both logprobs, n", "no speculation", "speculation", "two drafts a step", "no drafts", "n",
}  # fmt: skip


@cache
def engine(method: str, num_speculative_tokens: int = 4, **engine_args: Any) -> LLM:
    config = method_config(method, num_speculative_tokens)
    return LLM("tiny", speculative_config=config, **{**TINY, **engine_args})


def told(requests: list[Request]) -> list[tuple[Any, ...]]:
    """All that a request brings home."""
    return [
        (r.output_token_ids, r.text, r.finish_reason, r.stop_reason, r.logprobs, r.prompt_logprobs) for r in requests
    ]


@cache
def plain(option: str) -> list[Request]:
    params = SamplingParams(**OPTIONS[option])
    return complete(engine("none"), PROMPTS, [params] * len(PROMPTS))[0]


@cache
def plain_bare(**values: Any) -> list[Request]:
    return complete(engine("none"), PROMPTS, [SamplingParams(**values)] * len(PROMPTS))[0]


@cache
def plain_mix() -> list[Request]:
    return complete(engine("none"), *mixed_prompts())[0]


def mixed_prompts() -> tuple[list[str], list[SamplingParams]]:
    """Every request of the batch asks for something else."""
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(OPTIONS))]
    return prompts, [SamplingParams(**values) for values in OPTIONS.values()]


@pytest.mark.parametrize("option", sorted(OPTIONS.keys() - NEUTRAL))
def test_an_option_of_the_grid_has_something_to_do(option: str) -> None:
    """Guards the grid: a processor that changes no token of the reference would show nothing."""
    values = OPTIONS[option]
    bare = {**(GREEDY if values["temperature"] == 0.0 else SAMPLED), "max_tokens": values["max_tokens"]}
    if option in ("min tokens", "stop tokens"):
        bare["temperature"] = 1.0
    elif option in ("top k", "top p", "min p"):
        bare["temperature"] = 1.3
    with_it = [r.output_token_ids for r in plain(option)]
    assert with_it != [r.output_token_ids for r in plain_bare(**bare)]


def cells() -> Iterator[tuple[str, str]]:
    """(method, option): every option under a drafter that has a model, which samples with it too, two of them in turns;
    and what a request alone decides of its drafts under one that has none."""
    for number, option in enumerate(OPTIONS):
        yield ("draft_model", "pard")[number % 2], option
        if "draft" in option or "speculation" in option or "logprobs" in option:
            yield ("custom_class", "ngram_gpu")[number % 2], option


@pytest.mark.parametrize(("method", "option"), list(cells()))
def test_under_speculation_a_request_gets_what_plain_decoding_gives(method: str, option: str) -> None:
    """One option at a time; all methods have all of them in one batch below."""
    tell_test_proposers(plain(option))
    requests, _ = complete(engine(method), PROMPTS, [SamplingParams(**OPTIONS[option])] * len(PROMPTS))
    assert told(requests) == told(plain(option))


SCHEDULES: dict[str, dict[str, Any]] = {
    "all at once": {},
    # Requests are preempted in their prompts and behind them.
    "few blocks, small chunks": {"num_gpu_blocks_override": 8, "max_num_seqs": 8, "max_num_batched_tokens": 40},
}


@pytest.mark.parametrize(
    ("method", "schedule"),
    [
        *((method, "all at once") for method in METHODS if method not in ONE_OF_A_KIND),
        *((method, "few blocks, small chunks") for method in ("none", *ONE_OF_A_KIND)),
    ],
)
def test_requests_that_ask_for_different_things_share_a_batch(method: str, schedule: str) -> None:
    """Every method once: one of every way to draft under the harder schedule, those that share its loop at once."""
    tell_test_proposers(plain_mix())
    llm = engine(method, **{"max_model_len": 112, **SCHEDULES[schedule]})
    requests, metrics = complete(llm, *mixed_prompts())
    assert told(requests) == told(plain_mix())
    assert any(request.num_preemptions for request in requests) == (schedule != "all at once")
    if method != "none":
        assert metrics.num_accepted_tokens > 0


@pytest.mark.parametrize("method", ["none", *ONE_OF_A_KIND])
def test_only_allowed_tokens_are_said_and_no_bad_word(method: str) -> None:
    tell_test_proposers(plain("allowed tokens"))
    llm = engine(method)
    allowed, bad = SamplingParams(**OPTIONS["allowed tokens"]), SamplingParams(**OPTIONS["bad words"])
    outputs = llm.generate([PROMPT, PROMPT], [allowed, bad])
    assert set(outputs[0].outputs[0].token_ids) <= set(range(250, 700))
    said = outputs[1].outputs[0].token_ids
    for word in llm.engine.tokenizer.spell_bad_words(bad.bad_words):
        assert not any(said[start : start + len(word)] == word for start in range(len(said)))


def test_a_request_can_go_without_speculation_beside_others_that_use_it() -> None:
    llm = engine("draft_model")
    base = SamplingParams(**{**GREEDY, "max_tokens": 40, "ignore_eos": True})
    asked: dict[str, dict[str, Any]] = {
        "off": {"speculative_sampling": False},
        "capped": {"speculative_ratio": 2},
        "none": {"speculative_ratio": 0},
        "more": {"speculative_ratio": 9},
        "on": {"speculative_sampling": True},
        "unsaid": {},
        "off wins": {"speculative_sampling": False, "speculative_ratio": 3},
    }
    requests, metrics = complete(llm, [PROMPT] * len(asked), [replace(base, **values) for values in asked.values()])
    most = {
        name: max(record.num_draft_tokens)
        for name, record in zip(asked, sorted(metrics.records, key=lambda r: int(r.request_id)), strict=True)
    }
    assert most == {"off": 0, "capped": 2, "none": 0, "more": 4, "on": 4, "unsaid": 4, "off wins": 0}
    assert len({tuple(request.output_token_ids) for request in requests}) == 1


@pytest.mark.parametrize("name", ["tiny-draft", str(DRAFT_DIR)])
def test_the_loaded_draft_may_be_named_in_a_request(name: str) -> None:
    """The way of a widely read tutorial: everything about speculation in SamplingParams."""
    params = SamplingParams(**GREEDY, speculative_sampling=True, speculative_model=name, speculative_ratio=3)
    (output,) = engine("draft_model").generate(PROMPT, params)
    (expected,) = engine("none").generate(PROMPT, SamplingParams(**GREEDY))
    assert output == expected


@pytest.mark.parametrize(("method", "loaded"), [("draft_model", "tiny-draft"), ("ngram", "none"), ("none", "none")])
def test_another_draft_is_refused_with_where_to_give_it(method: str, loaded: str) -> None:
    with pytest.raises(UserError) as raised:
        engine(method).generate(PROMPT, SamplingParams(**GREEDY, speculative_model="some/draft"))
    assert str(raised.value) == (
        f"speculative_model must be the draft that the engine was started with ({loaded}), got 'some/draft'; give it "
        "to the engine: LLM(..., speculative_config={'method': 'draft_model', 'model': 'some/draft'})"
    )


@pytest.mark.parametrize("ratio", [0.5, -1])
def test_a_ratio_that_is_no_number_of_tokens_is_refused(ratio: Any) -> None:
    with pytest.raises(ValueError, match=rf"speculative_ratio must be a number of tokens, .*got {ratio}"):
        SamplingParams(speculative_ratio=ratio)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("n", 2.0, "an integer"),
        ("max_tokens", 3.5, "an integer, or null for no limit but max_model_len"),
        ("seed", 1.5, "an integer or null"),
        ("logprobs", True, "an integer or null"),
        ("temperature", "hot", "a number"),
        ("top_p", None, "a number"),
        ("stop", [1], "a list of strings"),
        ("stop", 1, "a list of strings"),
        ("stop_token_ids", "12", "a list of token ids"),
        ("allowed_token_ids", [0.5], "a list of token ids"),
        ("logit_bias", [1], "a mapping of token ids to numbers"),
        ("logit_bias", {"a": 1.0}, "a mapping of token ids to numbers"),
        ("logit_bias", {1: "x"}, "a mapping of token ids to numbers"),
        ("ignore_eos", "false", "true or false"),
        ("skip_special_tokens", None, "true or false"),
        ("speculative_sampling", "no", "true, false or null"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(name: str, value: Any, rule: str) -> None:
    """Some were taken as they are (n=2.0, stop=[1]), others were a TypeError that named nothing."""
    with pytest.raises(ValueError, match="must be") as raised:
        SamplingParams(**{name: value})
    assert str(raised.value) == f"{name} must be {rule}, got {value!r}"


def test_values_that_mean_none_for_vllm_mean_it_here() -> None:
    """max_tokens=None has no limit but max_model_len, 1024 here; seed=-1 is no seed."""
    prompt = {"prompt_token_ids": [5] * 1018}
    (output,) = engine("none").generate(prompt, SamplingParams(max_tokens=None, seed=-1, ignore_eos=True))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (6, "length")
    assert SamplingParams(seed=-1) == SamplingParams()


def test_numbers_of_numpy_are_numbers() -> None:
    """Narrow ones overflowed far from here, and a kernel wrote behind a tensor that was too small for logprobs."""
    params = SamplingParams(
        n=np.int64(2), temperature=np.float32(0.5), stop_token_ids=np.array([3]), allowed_token_ids=[np.uint8(7)],
        logprobs=np.uint8(200), max_tokens=np.uint8(200), speculative_ratio=np.int16(2),
    )  # fmt: skip
    assert (params.n, params.stop_token_ids, params.allowed_token_ids) == (2, (3,), (7,))
    assert (params.logprobs, params.max_tokens, params.speculative_ratio) == (200, 200, 2)
    assert {type(value) for value in (params.n, params.logprobs, params.max_tokens, *params.stop_token_ids)} == {int}


@pytest.mark.parametrize("kind", [np.int32, np.uint32, np.uint64])
def test_a_seed_is_the_same_whatever_holds_it(kind: Any) -> None:
    """Siblings' seeds were folded in the arithmetic of the given one's type, or not at all."""
    params = [SamplingParams(n=2, seed=seed, max_tokens=6, ignore_eos=True) for seed in (5, kind(5))]
    first, second = (engine("none").generate(PROMPT, each)[0] for each in params)
    assert [each.token_ids for each in first.outputs] == [each.token_ids for each in second.outputs]


@pytest.mark.parametrize("name", ["top_k", "max_tokens", "min_tokens"])
def test_a_count_beyond_all_texts_is_refused_before_anything_runs(name: str) -> None:
    """It was an OverflowError in the middle of a batch, whose other requests were lost."""
    with pytest.raises(ValueError, match=rf"{name} must be .*, got {2**63}"):
        SamplingParams(**{"max_tokens": 2**31 - 1, name: 2**63})


def test_speculative_sampling_without_a_method_is_plain_decoding() -> None:
    """It allows speculation, and asks for none that the engine does not have."""
    params = SamplingParams(**GREEDY, speculative_sampling=True, speculative_ratio=4)
    assert engine("none").generate(PROMPT, params) == engine("none").generate(PROMPT, SamplingParams(**GREEDY))


def test_siblings_tell_the_prompts_logprobs_once() -> None:
    (output,) = engine("draft_model").generate(PROMPT, SamplingParams(**OPTIONS["both logprobs, n"]))
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert [len(completion.logprobs or ()) for completion in output.outputs] == [
        len(completion.token_ids) for completion in output.outputs
    ]
    assert [len(r.prompt_logprobs) > 0 for r in plain("both logprobs, n")] == [True, False] * len(PROMPTS)


def abort_after(llm: LLM, steps: int, *request_ids: str) -> Any:
    seen: list[MetricsCollector] = []

    def observer(metrics: MetricsCollector) -> None:
        seen.append(metrics)
        if len(seen) == steps:
            for request_id in request_ids:
                llm.abort(request_id)

    return observer


@cache
def plain_to_abort() -> tuple[SamplingParams, list[Request], list[RequestOutput]]:
    params = SamplingParams(**{**SAMPLED, "max_tokens": 16, "ignore_eos": True}, logprobs=1)
    expected, _ = complete(engine("none"), [PROMPT] * 4, [params] * 4)
    return params, expected, engine("none").generate([PROMPT] * 4, params)


@pytest.mark.parametrize("method", ["none", *METHODS])
def test_an_aborted_request_keeps_what_it_has_said_and_the_others_go_on(method: str) -> None:
    llm = engine(method, max_num_seqs=3)
    params, expected, wanted = plain_to_abort()
    tell_test_proposers(expected)
    outputs = llm.generate([PROMPT] * 4, params, observer=abort_after(llm, 3, "1", "3", "nobody"))
    assert [outputs[0], outputs[2]] == [wanted[0], wanted[2]]
    running, waiting = outputs[1].outputs[0], outputs[3].outputs[0]
    assert (running.finish_reason, waiting.finish_reason) == ("abort", "abort")
    assert 0 < len(running.token_ids) < 16 and waiting.token_ids == ()
    full = wanted[1].outputs[0]
    assert full.token_ids[: len(running.token_ids)] == running.token_ids and full.text.startswith(running.text)
    assert running.logprobs == (full.logprobs or [])[: len(running.token_ids)]
    llm.engine.block_manager.check_integrity([])
    assert llm.generate([PROMPT] * 4, params) == wanted, "an abort does not reach the next call"


def test_an_abort_by_a_thread_that_is_late_is_not_lost() -> None:
    """It may have looked the set of requests up before the step that takes them, and add to it behind that."""
    llm = engine("none")
    add = llm._to_abort.add
    whom = iter(["nobody", "0"])

    def observer(metrics: MetricsCollector) -> None:
        add(next(whom))

    (output,) = llm.generate(PROMPT, SamplingParams(**{**SAMPLED, "ignore_eos": True}), observer=observer)
    assert output.outputs[0].finish_reason == "abort" and len(output.outputs[0].token_ids) == 2


def test_all_of_a_prompts_completions_are_aborted_together() -> None:
    llm = engine("draft_model")
    params = SamplingParams(**{**SAMPLED, "n": 2, "ignore_eos": True})
    outputs: list[RequestOutput] = llm.generate(PROMPT, params, observer=abort_after(llm, 1, "0"))
    assert [completion.finish_reason for completion in outputs[0].outputs] == ["abort", "abort"]
    assert outputs[0].error is None
