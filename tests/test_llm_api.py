"""LLM in the shape people know: what it takes and gives back; a bad request or Ctrl-C harms nobody else."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import runner.llm
from runner.config import ConfigError
from runner.config.python_names import in_python
from runner.engine.errors import UserError
from runner.engine.request import Request
from runner.engine.scheduler import Scheduler
from runner.llm import LLM, SamplingParams, StructuredOutputsParams
from runner.metrics import MetricsCollector
from runner.outputs import Counter, RequestOutput, Vector
from runner.prompts import make_requests
from runner.step_loop import StepLoop
from runner.tiny import TARGET_DIR
from tests.conftest import TARGET_CONFIG, Engines
from tests.proposers_for_tests import KnownText

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [(7 * i + 3 * j) % 64 for j in range(4 + 5 * i)]} for i in range(5)]
ORACLE = {
    "method": "custom_class", "model": "tests.proposers_for_tests.OracleProposer", "num_speculative_tokens": 4,
}  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def token_ids(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM("tiny", speculative_config={"method": "ngram", "num_speculative_tokens": 3}, device="cpu")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """The tiny target with a tokenizer that has a chat template."""
    directory = tmp_path_factory.mktemp("tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(TARGET_DIR / name, directory / name)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": CHAT_TEMPLATE}))
    return LLM("tiny", tokenizer=str(directory), device="cpu")


def test_a_string_gives_one_output_in_the_known_shape(tiny: LLM) -> None:
    (output,) = tiny.generate("def main():", GREEDY)
    assert (output.request_id, output.prompt, output.error) == ("0", "def main():", None)
    assert output.prompt_token_ids == tuple(tiny.engine.tokenizer.encode("def main():")[1])
    (completion,) = output.outputs
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
    assert len(completion.token_ids) == 8
    assert completion.text == tiny.engine.tokenizer.decode(completion.token_ids) != ""


def test_prompts_of_every_form_can_be_mixed_and_come_back_in_order(tiny: LLM) -> None:
    text = "import os\nfor name in os."
    ids = tiny.engine.tokenizer.encode(text)[1]
    outputs = tiny.generate(
        [
            text,
            "class A:",
            {"prompt_token_ids": ids},
            {"prompt": text},
            {"prompt_token_ids": ids, "prompt": "mine"},
            ids,
        ],
        GREEDY,
    )
    assert [output.request_id for output in outputs] == ["0", "1", "2", "3", "4", "5"]
    assert [output.prompt for output in outputs] == [text, "class A:", None, text, "mine", None]
    first, other, *same = token_ids(outputs)
    assert same == [first] * 4 and other != first
    assert token_ids(tiny.generate(ids, GREEDY)) == [first], "one list of token ids is one prompt"
    assert tiny.generate([], GREEDY) == []


def test_chat_messages_go_through_the_template_of_the_tokenizer(chatty: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sort a list."}]
    text = "<system> Be brief.\n<user> Sort a list.\n<assistant>"
    (output,) = chatty.generate(messages, GREEDY)
    assert output.prompt == text
    assert output.prompt_token_ids == tuple(chatty.engine.tokenizer.encode(text)[1])
    assert token_ids([output]) == token_ids(chatty.generate(text, GREEDY)) == token_ids(chatty.chat(messages, GREEDY))
    both = chatty.chat([messages, messages[1:]], GREEDY)
    assert [output.prompt for output in both] == [text, text.removeprefix("<system> Be brief.\n")]


def test_chat_messages_without_a_template_are_refused(tiny: LLM) -> None:
    with pytest.raises(UserError, match=r"chat template.*pass the text itself"):
        tiny.chat([{"role": "user", "content": "Hello"}], GREEDY)


@pytest.mark.parametrize(
    ("prompt", "got"),
    [
        (7.5, "float"), (None, "NoneType"), ([7, 8.5], "list"), ([], "list"), ({"prompt": None}, "NoneType"),
        ({}, "a mapping with no key"), ({"text": "a"}, "a mapping with text; known keys: prompt, prompt_token_ids"),
        ({"prompt": "a", "multi_modal_data": {}}, "a mapping with prompt, multi_modal_data"),
    ],
)  # fmt: skip
def test_a_prompt_of_no_known_form_is_refused(tiny: LLM, prompt: Any, got: str) -> None:
    with pytest.raises(UserError, match=rf"a prompt must be a string, token ids, a list of chat messages, .*got {got}"):
        tiny.generate([prompt], GREEDY)


@pytest.mark.parametrize("prompts", [None, 7, b"text"])
def test_what_is_no_list_of_prompts_is_refused_as_one_prompt_is(tiny: LLM, prompts: Any) -> None:
    with pytest.raises(UserError, match=r"a prompt must be a string, .* or a list of these, got (NoneType|int|bytes)"):
        tiny.generate(prompts, GREEDY)


@pytest.mark.parametrize("token_ids", [["a"], [1.5], 7, None])
def test_token_ids_that_are_none_are_refused(tiny: LLM, token_ids: Any) -> None:
    with pytest.raises(UserError, match="prompt_token_ids must be a list of token ids, got"):
        tiny.generate({"prompt_token_ids": token_ids}, GREEDY)


def test_no_prompt_of_a_generator_is_lost(tiny: LLM) -> None:
    """The first one was: looking whether it is a chat message took it out."""
    outputs = tiny.generate((text for text in ("a", "b")), GREEDY)  # type: ignore[arg-type]
    assert [output.prompt for output in outputs] == ["a", "b"]


def test_half_a_surrogate_pair_is_refused_as_a_text(tiny: LLM) -> None:
    """The tokenizer raised a TypeError about its own types."""
    with pytest.raises(UserError, match=r"a text must be one that UTF-8 can hold, got '\\ud83d\.'"):
        tiny.generate(["class A:", "\ud83d."], GREEDY)


def test_messages_that_the_template_refuses_are_a_users_error(chatty: LLM) -> None:
    with pytest.raises(
        UserError, match=r"chat messages must be such as .* takes \(.*content.*\), got \[\{'role': 'user'"
    ):
        chatty.chat([{"role": "user"}], GREEDY)


def test_a_generate_within_a_generate_is_refused_and_harms_nothing(engines: Engines) -> None:
    """Two at once, of threads say, shared request ids: grammars and drafters took one for the other."""
    llm = engines()
    expected = token_ids(llm.generate(PROMPTS, GREEDY))

    def observe(_: Any) -> None:
        with pytest.raises(
            UserError, match=r"an LLM must run one generate\(\) at a time.* give all prompts to one call"
        ):
            llm.generate(PROMPTS[1], GREEDY)

    assert token_ids(llm.generate(PROMPTS, GREEDY, observer=observe)) == expected
    assert token_ids(llm.generate(PROMPTS, GREEDY)) == expected


def test_a_generate_that_is_refused_leaves_what_was_counted(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two threads the second once put the first one's metrics aside, and only then was told to wait."""
    llm = engines({"method": "ngram", "num_speculative_tokens": 4})
    llm.generate(PROMPTS, GREEDY)
    expected = llm.get_metrics()
    refused = list[str]()

    def make_requests_slowly(*args: Any) -> list[Request]:  # the other thread comes while prompts are read
        def generate() -> None:
            try:
                llm.generate(PROMPTS, GREEDY)
            except UserError as error:
                refused.append(str(error))

        with monkeypatch.context() as patch:
            patch.setattr(runner.llm, "make_requests", make_requests)
            other = threading.Thread(target=generate)
            other.start()
            other.join()
        return make_requests(*args)

    monkeypatch.setattr(runner.llm, "make_requests", make_requests_slowly)
    llm.generate(PROMPTS, GREEDY)
    assert len(refused) == 1 and refused[0].startswith("an LLM must run one generate() at a time")
    assert [metric.value for metric in llm.get_metrics()[:3]] == [2 * metric.value for metric in expected[:3]]


def test_requests_that_an_error_leaves_are_released_from_the_first_on(engines: Engines) -> None:
    """Who waits in front is found at once: 16,000 that were released from the last on took eight seconds."""
    llm, released = engines(), list[str]()
    abort = Scheduler.abort

    def failing(_: object) -> None:
        raise RuntimeError("stop")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="stop"):
        patch.setattr(
            Scheduler, "abort", lambda own, request: (released.append(request.request_id), abort(own, request))
        )
        llm.generate([{"prompt_token_ids": [5, 6]}] * 5, SamplingParams(max_tokens=3), observer=failing)
    assert released == ["0", "1", "2", "3", "4"]


def test_an_abort_while_prompts_are_read_is_kept(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was forgotten at the first step."""
    llm = engines()

    def make_requests_of(*args: Any) -> list[Request]:
        llm.abort("1")
        return make_requests(*args)

    monkeypatch.setattr(runner.llm, "make_requests", make_requests_of)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].finish_reason == "abort" for output in outputs] == [False, True, False, False, False]


def test_an_engine_whose_proposer_cannot_release_a_request_stays_usable(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock and the other requests' blocks were kept for ever."""
    llm = engines()
    expected = token_ids(llm.generate(PROMPTS, GREEDY))

    def release(request_id: str) -> None:
        raise RuntimeError("a proposer's own bug")

    def observe(_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a proposer's own bug"):
        patch.setattr(llm.engine.proposer, "release", release)
        llm.generate(PROMPTS, GREEDY, observer=observe)
    llm.engine.block_manager.check_integrity([])
    assert token_ids(llm.generate(PROMPTS, GREEDY)) == expected


@pytest.mark.parametrize("params", [{"temperature": 0.0}, ["greedy"], 5])
def test_sampling_params_of_another_type_are_refused(tiny: LLM, params: Any) -> None:
    with pytest.raises(
        UserError,
        match=r"sampling_params must be SamplingParams\(\.\.\.\), or a list .*got (\{'temp|a list with 'greedy'|5)",
    ):
        tiny.generate(["a"], params)


def test_a_model_without_a_tokenizer_takes_token_ids_alone(engines: Engines) -> None:
    with pytest.raises(UserError, match=r"prompt_token_ids.*without a tokenizer"):
        engines().generate("text", GREEDY)
    with pytest.raises(UserError, match=r"stop strings need a tokenizer; use stop_token_ids"):
        engines().generate(PROMPTS[0], replace(GREEDY, stop=("\n",)))
    assert engines().generate(PROMPTS[0], GREEDY)[0].outputs[0].text == ""


def test_what_a_request_cannot_have_is_told_in_the_terms_of_who_built_the_engine(engines: Engines) -> None:
    """An LLM of keyword arguments spoke of model.tokenizer and workload=synthetic, as the command line writes them."""
    built = engines()
    of_a_run = LLM.from_config(built.config, built.engine.target_info)
    for llm, ending in ((built, "set tokenizer"), (of_a_run, "set model.tokenizer, or use workload=synthetic")):
        with pytest.raises(UserError) as raised:
            llm.generate("text", GREEDY)
        assert str(raised.value).endswith(f"for a model without a tokenizer; {ending}")


def test_sampling_params_are_one_for_all_or_one_each(engines: Engines) -> None:
    llm = engines()
    params = [replace(GREEDY, max_tokens=count) for count in (1, 5, 3, 2, 4)]
    outputs = llm.generate(PROMPTS, params)
    assert [len(tokens) for tokens in token_ids(outputs)] == [1, 5, 3, 2, 4]
    longer = token_ids(llm.generate(PROMPTS, GREEDY))
    assert [tokens == longer[i][: len(tokens)] for i, tokens in enumerate(token_ids(outputs))] == [True] * 5
    with pytest.raises(UserError, match=r"sampling_params must be .* or a list of 5, one a prompt, got a list of 2"):
        llm.generate(PROMPTS, params[:2])


def test_no_sampling_params_are_the_default_ones(engines: Engines) -> None:
    outputs = engines().generate(PROMPTS[:2])
    assert outputs == engines().generate(PROMPTS[:2], SamplingParams())
    assert all(len(tokens) == 16 or tokens[-1] == TARGET_CONFIG["eos_token_id"] for tokens in token_ids(outputs))


def test_none_is_no_stop_and_no_bias_as_people_write_it_for_vllm(engines: Engines) -> None:
    written: dict[str, Any] = {"stop": None, "stop_token_ids": None, "logit_bias": None, "seed": None}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, **written)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (), {})
    assert token_ids(engines().generate(PROMPTS, params)) == token_ids(engines().generate(PROMPTS, GREEDY))


def test_n_completions_share_a_prompt_and_the_first_is_what_one_would_be(engines: Engines) -> None:
    llm = engines()
    for seed in (None, 5):
        (one,), (many,) = (llm.generate(PROMPTS[0], replace(SAMPLED, n=n, seed=seed)) for n in (1, 6))
        assert [completion.index for completion in many.outputs] == list(range(6))
        assert many.outputs[0] == one.outputs[0]
        assert len(set(token_ids([many]))) == 6
        assert (many.request_id, many.prompt_token_ids) == (one.request_id, one.prompt_token_ids)


def test_n_greedy_completions_are_the_same_text(engines: Engines) -> None:
    (output,) = engines().generate(PROMPTS[0], replace(GREEDY, n=3))
    assert len(output.outputs) == 3 and len(set(token_ids([output]))) == 1


def test_prompts_of_n_completions_come_back_with_their_own(engines: Engines) -> None:
    params = [replace(SAMPLED, n=n, seed=100 + n) for n in (3, 1, 2, 4, 1)]
    outputs = engines().generate(PROMPTS, params)
    assert [len(output.outputs) for output in outputs] == [3, 1, 2, 4, 1]
    for prompt, parameters, output in zip(PROMPTS, params, outputs, strict=True):
        assert output.prompt_token_ids == tuple(prompt["prompt_token_ids"])
        assert output.outputs == engines().generate(prompt, parameters)[0].outputs


def test_a_seed_gives_its_text_wherever_the_request_stands(engines: Engines) -> None:
    llm = engines()
    alone = token_ids(llm.generate(PROMPTS[2], replace(SAMPLED, seed=9)))
    params = [replace(SAMPLED, seed=seed) for seed in (1, 9, 9, 8)]
    first, second, third, other = token_ids(llm.generate([PROMPTS[0], PROMPTS[2], PROMPTS[2], PROMPTS[2]], params))
    assert [second, third] == alone * 2
    assert len({first, second, other}) == 3


def test_without_a_seed_that_of_the_engine_repeats_the_run(engines: Engines) -> None:
    same_prompt = [PROMPTS[1]] * 3
    texts = token_ids(engines().generate(same_prompt, SAMPLED))
    assert texts == token_ids(engines().generate(same_prompt, SAMPLED))
    assert len(set(texts)) == 3, "each place in the workload has noise of its own"
    assert not set(texts) & set(token_ids(engines(seed=1).generate(same_prompt, SAMPLED)))


def test_metrics_have_the_names_of_vllm_and_count_what_was_drafted_and_accepted() -> None:
    """11 tokens at K = 4 are one of the prompt's step and two full drafts; 9 end with a draft of two."""
    plain = Engines()().generate(PROMPTS[:2], replace(GREEDY, max_tokens=11))
    KnownText.continuations = {str(i): list(tokens) for i, tokens in enumerate(token_ids(plain))}
    llm = Engines()(ORACLE)
    assert [metric.name for metric in llm.get_metrics()] == [
        "vllm:spec_decode_num_drafts",
        "vllm:spec_decode_num_draft_tokens",
        "vllm:spec_decode_num_accepted_tokens",
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "vllm:prefix_cache_queries",
        "vllm:prefix_cache_hits",
    ]
    num_tokens = sum(len(prompt["prompt_token_ids"]) for prompt in PROMPTS[:2])
    expected = (
        [0, 0, 0, [0] * 4, 0, 0],
        [4, 14, 14, [4, 4, 3, 3], num_tokens, 0],  # of prompts that are too short to share a block
        [8, 28, 28, [8, 8, 6, 6], 2 * num_tokens, 0],
    )
    for values in expected:  # totals since the start
        counters = llm.get_metrics()
        assert [m.value if isinstance(m, Counter) else m.values for m in counters] == values
        llm.generate(PROMPTS[:2], [replace(GREEDY, max_tokens=count) for count in (11, 9)])
    assert [metric.name for metric in counters if isinstance(metric, Vector)] == [counters[3].name]
    assert len(llm.metrics.records) == 2, "an engine that serves for days keeps the last call's alone"


def test_plain_decoding_drafts_nothing() -> None:
    llm = Engines()()
    llm.generate(PROMPTS, GREEDY)
    assert [m.value if isinstance(m, Counter) else m.values for m in llm.get_metrics()[:4]] == [0, 0, 0, []]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ([1] * 256, r"shorter than max_model_len \(256 tokens\), got 256"),
        ([], "at least one token"),
        ([1, 64], r"must lie in \[0, 63\]"),
    ],
    ids=["too long", "empty", "foreign token"],
)
def test_a_prompt_that_cannot_run_fails_alone(engines: Engines, bad: list[int], reason: str) -> None:
    llm = engines()
    expected = token_ids(llm.generate(PROMPTS[:2], GREEDY))
    good, failed, also_good = llm.generate([PROMPTS[0], {"prompt_token_ids": bad}, PROMPTS[1]], replace(GREEDY, n=2))
    assert token_ids([good, also_good]) == [tokens for tokens in expected for _ in range(2)]
    assert good.error is None and also_good.error is None
    assert failed.error is not None and re.search(reason, failed.error)
    assert [(c.finish_reason, c.token_ids, c.text) for c in failed.outputs] == [("error", (), "")] * 2


class Interruption:
    """Ctrl-C in the middle of a call: the third one does its work, and never comes back."""

    def __init__(self, call: Any) -> None:
        self.call, self.num_calls = call, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        result = self.call(*args, **kwargs)
        if self.num_calls == 3:
            raise KeyboardInterrupt
        return result


METHODS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 2},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 4},
}


@pytest.mark.parametrize("where", ["schedule", "propose", "verify", "commit", "update"])
@pytest.mark.parametrize("method", METHODS)
def test_an_interrupt_leaves_the_engine_as_good_as_new(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, method: str, where: str
) -> None:
    params = replace(SAMPLED, temperature=0.7, max_tokens=14, seed=3)
    expected = token_ids(engines().generate(PROMPTS, params))
    llm = engines(METHODS[method], num_gpu_blocks_override=9, max_num_seqs=3, max_num_batched_tokens=40)
    llm.reset_prefix_cache()  # so that there is enough to do
    owner = {"verify": llm.engine.verifier, "propose": llm.engine.proposer, "update": llm.engine.proposer}
    with monkeypatch.context() as patch:
        if where in owner:
            patch.setattr(owner[where], where, Interruption(getattr(owner[where], where)))
        else:
            interruption = Interruption(getattr(Scheduler, where))
            patch.setattr(Scheduler, where, lambda *args: interruption(*args))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, params)
    llm.engine.block_manager.check_integrity([])
    for memory in ("_indices", "_num_computed"):
        assert not getattr(llm.engine.proposer, memory, {}), "a request of the next call has the same name"
    assert token_ids(llm.generate(PROMPTS, params)) == expected
    llm.engine.block_manager.check_integrity([])


@pytest.mark.parametrize("max_concurrency", [1, 2, 4, 9, None])
def test_no_more_requests_are_in_flight_than_asked_for_and_their_tokens_are_the_same(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, max_concurrency: int | None
) -> None:
    llm = engines(METHODS["draft_model"])
    params = [replace(SAMPLED, max_tokens=count) for count in (9, 3, 14, 6, 11)]
    expected = token_ids(llm.generate(PROMPTS, params))
    requests = make_requests(PROMPTS, params, llm.engine.tokenizer, llm.config.seed)
    in_flight: list[int] = []
    step = StepLoop.step

    def counting(loop: StepLoop) -> Any:
        num_left = sum(not request.is_finished for request in requests)
        num_unfinished = loop.scheduler.num_unfinished
        assert num_unfinished == min(max_concurrency or len(requests), num_left), "as many as there are"
        in_flight.append(num_unfinished)
        return step(loop)

    monkeypatch.setattr(StepLoop, "step", counting)
    llm.run(requests, llm.engine.proposer, MetricsCollector(), max_concurrency=max_concurrency)
    assert [tuple(request.output_token_ids) for request in requests] == expected
    assert max(in_flight) == min(max_concurrency or 5, 5)
    arrivals = [request.arrival_time for request in requests]
    assert arrivals == sorted(arrivals) and arrivals[0] > 0.0


@pytest.mark.parametrize("max_concurrency", [0, -1])
def test_a_bound_that_lets_no_request_in_is_refused(engines: Engines, max_concurrency: int) -> None:
    """It was waited for the first one for ever."""
    llm = engines()
    requests = make_requests(PROMPTS[:1], [GREEDY], llm.engine.tokenizer, llm.config.seed)
    with pytest.raises(UserError, match=rf"^max_concurrency must be >= 1, got {max_concurrency}; leave it out for no"):
        llm.run(requests, llm.engine.proposer, MetricsCollector(), max_concurrency=max_concurrency)


def test_requests_arrive_when_they_are_due_and_wait_from_then_on(engines: Engines) -> None:
    """The second waits for the first, the third comes when nobody is left; no arrival changes a token."""
    llm, arrivals = engines(), [0.0, 0.001, 0.4]
    expected = token_ids(llm.generate(PROMPTS[:3], GREEDY))
    requests = make_requests(PROMPTS[:3], [GREEDY] * 3, llm.engine.tokenizer, llm.config.seed)
    metrics = MetricsCollector()
    llm.run(requests, llm.engine.proposer, metrics, max_concurrency=1, arrivals=arrivals)
    assert [tuple(request.output_token_ids) for request in requests] == expected
    start = requests[0].arrival_time
    assert [request.arrival_time - start for request in requests] == pytest.approx(arrivals)
    times = {record.request_id: record.token_times for record in metrics.records}
    assert times["1"][0] > times["0"][-1] and times["2"][0] > requests[2].arrival_time


def test_a_request_aborted_before_it_was_due_came_when_it_was_aborted(engines: Engines) -> None:
    """It came at 0.0, when the clock began, every other arrival was counted from there, and its time was waited for."""
    llm, started = engines(), time.perf_counter()
    requests = make_requests(PROMPTS[:2], [GREEDY] * 2, llm.engine.tokenizer, llm.config.seed)
    metrics = MetricsCollector()
    llm.run(requests, llm.engine.proposer, metrics, arrivals=[0.0, 60.0], observer=lambda _: llm.abort("1"))
    assert requests[1].finish_reason == "abort" and not requests[1].output_token_ids
    assert requests[0].arrival_time < requests[1].arrival_time < time.perf_counter() < started + 30.0


def test_a_refused_request_does_not_hold_up_a_run_of_one_at_a_time(engines: Engines) -> None:
    llm = engines()
    prompts: list[Any] = [{"prompt_token_ids": []}, PROMPTS[0], {"prompt_token_ids": []}, {"prompt_token_ids": []}]
    requests = make_requests(prompts, [GREEDY] * 4, llm.engine.tokenizer, 0)
    traces = llm.run(requests, llm.engine.proposer, MetricsCollector(), max_concurrency=1)
    assert [request.finish_reason for request in requests] == ["error", "length", "error", "error"]
    assert set(traces.errors) == {"0", "2", "3"}


def test_an_observer_sees_every_step(engines: Engines) -> None:
    llm, seen = engines(), []
    llm.generate(PROMPTS, GREEDY, observer=lambda metrics: seen.append(len(metrics.step_points)))
    assert seen == list(range(1, 9))


def test_an_unknown_argument_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="num_speculative_token"):
        LLM("tiny", speculative_config={"method": "ngram", "num_speculative_token": 4})
    with pytest.raises(UserError, match="gpu_memory"):
        LLM("tiny", gpu_memory=0.5)
    with pytest.raises(UserError, match=r"^model must be a directory"):
        LLM(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda _: SamplingParams(temprature=0.5), "temprature is .* of SamplingParams, got 0.5; .* 'temperature'"),
        (lambda _: StructuredOutputsParams(regexp="a"), "regexp is .* of StructuredOutputsParams, .* 'regex'"),
        (lambda llm: llm.generate("a", sampling_param=GREEDY), "sampling_param is .* of LLM.generate, .*_params'"),
        (lambda llm: llm.chat([], lora_request=None), "lora_request is .* of LLM.chat, got None; known: messages, "),
    ],
)
def test_an_unknown_argument_of_a_request_is_refused_with_the_nearest_name(
    tiny: LLM, call: Callable[[LLM], object], told: str
) -> None:
    """It was a TypeError."""
    with pytest.raises(UserError, match=f"^{told}"):
        call(tiny)


def test_what_an_engine_cannot_start_with_is_told_in_the_terms_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways out were the command line's: model=hf model.model=<directory>, model.load_format=dummy."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as caught:
        LLM("no-such-model")
    message = str(caught.value)
    assert message.startswith("model=no-such-model: cannot be downloaded from the hub (")
    assert message.endswith(
        "check the id, the network and HF_TOKEN, or point to a local directory (model=<directory>), or try the speed "
        "of its shape before the download: load_format='dummy', where the config is in the cache or given as hf_config"
    )
    with pytest.raises(UserError, match=r"^speculative_config\.model=no-such-draft: .* speculative_config\.model=<dir"):
        method = {"method": "draft_model", "model": "no-such-draft", "num_speculative_tokens": 2}
        LLM("tiny", speculative_config=method, device="cpu")


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("model.model=a/model.model-7: no such", "model=a/model.model-7: no such"),
        ("hardware.device=cuda needs a GPU", "device='cuda' needs a GPU"),
        ("set method.use_heterogeneous_vocab=true", "set speculative_config.use_heterogeneous_vocab=True"),
        ("hardware.max_num_seqs=64 of model.safetensors", "max_num_seqs=64 of model.safetensors"),
        ("choose method=ngram", "choose method=ngram"),
        ("set model.tokenizer, or use workload=synthetic", "set tokenizer"),
    ],
)
def test_names_and_words_of_the_command_line_are_pythons_and_paths_stay(written: str, told: str) -> None:
    assert in_python(written) == told


def test_the_tiny_model_brings_its_draft_along() -> None:
    llm = LLM("tiny", speculative_config={"method": "draft_model", "num_speculative_tokens": 4}, device="cpu")
    (output,) = llm.generate("def main():\n", SamplingParams(temperature=0.0, max_tokens=24))
    assert len(output.outputs[0].token_ids) == 24
    accepted = next(metric for metric in llm.get_metrics() if metric.name.endswith("num_accepted_tokens"))
    assert accepted.value > 0


def test_a_failed_request_is_told_by_a_warning_and_the_rest_go_on(engines: Engines) -> None:
    llm = engines()
    with pytest.warns(UserWarning, match="1 of 2 requests failed; request 0: the prompt must have at least one token"):
        empty, answered = llm.generate(
            [{"prompt_token_ids": []}, {"prompt_token_ids": [5]}], SamplingParams(max_tokens=2, ignore_eos=True)
        )
    assert empty.error is not None and len(answered.outputs[0].token_ids) == 2


def test_the_warning_names_the_line_that_called(chatty: LLM) -> None:
    """Of chat it named a line of ours, and came once for all calls."""
    endless = [{"role": "user", "content": "x = 1\n" * 4000}]
    for call in (chatty.generate, chatty.chat):
        with pytest.warns(UserWarning, match="1 of 1 requests failed") as found:
            call(endless, GREEDY)
        assert [warning.filename for warning in found] == [__file__]


def test_a_lossy_rule_is_told_when_the_engine_starts() -> None:
    with pytest.warns(UserWarning, match="lossy: rejection_sample_method=typical"):
        LLM("tiny", speculative_config={"method": "ngram", "rejection_sample_method": "typical"})


def test_a_progress_bar_counts_requests(engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [{"prompt_token_ids": [token]} for token in (3, 4, 5)]
    engines().generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=True)
    assert "3/3" in capsys.readouterr().err
    engines().generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True))
    assert capsys.readouterr().err == "", "and unasked only on a terminal"


@pytest.mark.parametrize("method", ["draft_model", "eagle", "medusa"])
def test_a_drafter_follows_no_longer_texts_than_its_target(method: str) -> None:
    """A head was asked for 100,000 tokens and took the target's length without a word."""
    with pytest.raises(
        UserError, match=r"^speculative_config\.max_model_len must be <= the target's max_model_len \(\d+\), got 100000"
    ):
        LLM("tiny", speculative_config={"method": method, "num_speculative_tokens": 2, "max_model_len": 100_000})


def test_switches_of_vllm_that_change_nothing_are_read_with_a_warning() -> None:
    """Scripts that read its metrics switch them on by disable_log_stats=False."""
    args = {"disable_log_stats": False, "swap_space": 4, "async_scheduling": None}
    args |= {"pipeline_parallel_size": 1, "data_parallel_size": 1, "distributed_executor_backend": "mp"}
    with pytest.warns(UserWarning, match="changes nothing here") as found:
        LLM("tiny", device="cpu", num_gpu_blocks_override=320, **args)
    assert [str(warning.message) for warning in found] == [
        "distributed_executor_backend='mp' changes nothing here: ranks are processes of this machine",
        "swap_space=4 changes nothing here: a preempted request is computed anew",
    ]


def test_a_prompt_may_be_kept_in_one_step() -> None:
    """enable_chunked_prefill=False was read as a switch that changes nothing, and prompts were computed in chunks."""
    budgets = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    with pytest.raises(UserError, match=r"^max_num_batched_tokens must be >= max_model_len .* enable_chunked_prefill"):
        LLM("tiny", device="cpu", enable_chunked_prefill=False, **budgets)
    llm = LLM("tiny", device="cpu", enable_chunked_prefill=False, max_model_len=64, **budgets)
    assert not llm.scheduler_for(llm.engine.proposer).enable_chunked_prefill
    undecided = LLM("tiny", device="cpu", enable_chunked_prefill=None, enable_prefix_caching=None, **budgets)
    assert undecided.scheduler_for(undecided.engine.proposer).enable_chunked_prefill, "as vLLM decides it"
    assert undecided.config.hardware.enable_prefix_caching


@pytest.mark.parametrize("key", ["num_speculative_tokens", "ngram_prompt_lookup_max", "speculative_model"])
def test_a_flat_speculation_argument_is_told_where_it_belongs(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key} is an unknown argument.*inside: speculative_config="):
        LLM("tiny", **{key: 4})
