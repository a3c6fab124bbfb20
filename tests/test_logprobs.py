"""Logprobs: what the model thought of the tokens that were committed, the same bits under every method and schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.cpu import top_logprobs as compiled
from kernels.reference.top_logprobs import top_logprobs as definition_in_torch
from runner.config import SpeculativeConfig
from runner.engine.launch import Part
from runner.engine.model_runner import SCORED_ROWS
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.engine.schedule import Schedule
from runner.llm import LLM
from runner.run import execute
from tests.conftest import Engines, complete
from tests.decoding_steps import scheduled
from tests.no_readback import NoReadback
from tests.test_losslessness import METHODS, PROMPTS, ROOMY, method_config, tell_test_proposers
from verifier.logprobs import LogprobGatherer

triton_kernel = pytest.importorskip("kernels.top_logprobs")
VOCAB_SIZE = 64
# Logits that tie all the time, as those of bfloat16 heads do.
LOGITS = st.lists(st.lists(st.sampled_from([-3.0, -0.0, 0.0, 0.5, 1.0, 7.25]), min_size=6, max_size=6), min_size=1)


def definition(logits: list[float], token_id: int) -> tuple[float, int, list[int]]:
    """(logprob, rank, all tokens in order of rank) of one row, in float64."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    logprob = torch.tensor(logits, dtype=torch.float64).log_softmax(dim=0)[token_id]
    return float(logprob), order.index(token_id) + 1, order


@pytest.fixture(params=["definition", "kernel", "compiled"])
def top_logprobs(request: pytest.FixtureRequest, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Any:
    """By Triton's kernel in programs of few columns, the last one not full."""
    if request.param != "kernel":
        return definition_in_torch if request.param == "definition" else compiled.top_logprobs
    monkeypatch.setattr(triton_kernel, "BLOCK", 32)
    return lambda logits, token_ids, num_top: triton_kernel.top_logprobs(
        logits.to(kernel_device), token_ids.to(kernel_device), num_top
    ).cpu()


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LOGITS, st.integers(0, 5), st.integers(0, 6))
def test_a_row_tells_the_token_its_rank_and_the_likeliest(
    top_logprobs: Any, rows: list[list[float]], token_id: int, num_top: int
) -> None:
    packed = top_logprobs(torch.tensor(rows), torch.full((len(rows),), token_id), num_top)
    for row, told in zip(rows, packed.tolist(), strict=True):
        logprob, rank, order = definition(row, token_id)
        assert told[0] == token_id and told[2] == rank
        assert told[1] == pytest.approx(logprob, abs=1e-6)
        assert told[3 : 3 + num_top] == order[:num_top]
        expected = [definition(row, token)[0] for token in order[:num_top]]
        assert told[3 + num_top :] == pytest.approx(expected, abs=1e-6)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**16), st.integers(1, 12), st.sampled_from([7, 64, 231]))
def test_a_rows_bits_do_not_depend_on_the_others_nor_on_how_many_tops_they_ask_for(
    top_logprobs: Any, seed: int, num_rows: int, vocab_size: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size + 3, generator=generator)[:, :vocab_size] * 5
    token_ids = torch.randint(vocab_size, (num_rows,), generator=generator)
    together = top_logprobs(logits, token_ids, 5)
    for row in range(num_rows):
        alone = top_logprobs(logits[row : row + 1].clone(), token_ids[row : row + 1], 3)[0]
        assert torch.equal(alone[:6], together[row, :6]) and torch.equal(alone[6:], together[row, 8:11])


def test_what_has_no_chance_and_what_is_no_number_is_told_as_such(top_logprobs: Any) -> None:
    """And a number that float32 has no exponential of; large vocabularies, all tokens, and no row at all."""
    logits = torch.randn(4, 70, generator=torch.Generator().manual_seed(0))
    logits[0, 5:], logits[1, 3], logits[2], logits[3, 9] = float("-inf"), float("nan"), float("-inf"), 3e4
    token_ids = torch.tensor([69, 3, 2, 9])
    found, expected = (how(logits, token_ids, 70) for how in (top_logprobs, definition_in_torch))
    assert torch.equal(found[:, 2:73], expected[:, 2:73])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert found[:3, 1].tolist() == [float("-inf")] * 3 and found[3, 2:4].tolist() == [1.0, 9.0]
    assert top_logprobs(logits[:0], token_ids[:0], 2).shape == (0, 7)


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=3, prompt_logprobs=2),
    SamplingParams(temperature=0.8, top_k=9, max_tokens=24, seed=1, logprobs=0),
    SamplingParams(temperature=1.2, max_tokens=15, seed=2, prompt_logprobs=0),
    SamplingParams(n=2, max_tokens=18, seed=3, logprobs=5, prompt_logprobs=1, repetition_penalty=1.5),
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(max_tokens=9, seed=4, logprobs=-1, prompt_logprobs=-1, logit_bias={5: 3.0}),
    SamplingParams(max_tokens=30, seed=5, stop_token_ids=range(20, 40), min_tokens=4, logprobs=1),
    SamplingParams(max_tokens=12, seed=6, prompt_logprobs=3, logprobs=2),
]
ASKING = PROMPTS[: len(PARAMS)]  # prompts of 5, 1, 16, 17, 40, 33, 3 and 90 tokens


@pytest.fixture(scope="module")
def plain(engines: Engines) -> list[Request]:
    return complete(engines(**ROOMY), ASKING, PARAMS)[0]


def told(requests: list[Request]) -> list[tuple[Any, ...]]:
    return [(r.output_token_ids, r.logprobs, r.prompt_logprobs) for r in requests]


def logits_after(llm: LLM, token_ids: list[int], num_prompt_tokens: int) -> torch.Tensor:
    """Logits of the last token, [vocab] float64, computed by themselves."""
    request = Request(
        request_id="x",
        prompt_token_ids=token_ids[:num_prompt_tokens],
        output_token_ids=token_ids[num_prompt_tokens:],
        sampling_params=SamplingParams(),
        seed=0,
    )
    assert llm.engine.block_manager.grow(request.block_table, len(token_ids))
    logits = llm.engine.target.run([Part(request=request, start=0, end=len(token_ids), num_logits=1)])
    llm.engine.block_manager.release(request.block_table)
    return logits[0].double()


def test_logprobs_are_those_of_the_unprocessed_logits(engines: Engines, plain: list[Request]) -> None:
    """Whatever temperature, penalty, bias or cut-off the tokens were drawn with; in order of rank, as many as asked."""
    llm = engines(**ROOMY)
    for request in plain:
        params, tokens = request.sampling_params, request.prompt_token_ids + request.output_token_ids
        num_prompt = request.num_prompt_tokens
        asked = [(params.prompt_logprobs, request.prompt_logprobs, 1, num_prompt)]
        asked += [(params.logprobs, request.logprobs, num_prompt, len(tokens))]
        for num_top, found, start, end in asked:
            if num_top is None:
                assert found == []
                continue
            assert [entry.token_id for entry in found] == tokens[start:end]
            for position, entry in zip(range(start, end), found, strict=True):
                logits = logits_after(llm, tokens[:position], min(position, num_prompt))
                logprob, rank, order = definition(logits.tolist(), entry.token_id)
                assert entry.logprob == pytest.approx(logprob, abs=1e-5) and entry.rank == rank
                num_told = VOCAB_SIZE if num_top == -1 else num_top
                assert list(entry.top_token_ids) == order[:num_told]
                log_probs = logits.log_softmax(dim=0)
                assert entry.top_logprobs == pytest.approx([float(log_probs[t]) for t in order[:num_told]], abs=1e-5)


@pytest.mark.parametrize("num_speculative_tokens", [1, 7])  # 4 under the schedules below
@pytest.mark.parametrize("method", METHODS)
def test_a_method_changes_no_bit_of_a_logprob(
    engines: Engines, plain: list[Request], method: str, num_speculative_tokens: int
) -> None:
    tell_test_proposers(plain)
    requests, metrics = complete(engines(method_config(method, num_speculative_tokens), **ROOMY), ASKING, PARAMS)
    assert told(requests) == told(plain)
    assert metrics.num_accepted_tokens > 0


SCHEDULES: dict[str, dict[str, Any]] = {
    "one at a time": {"max_num_seqs": 1},
    "chunks of a token": {"max_num_seqs": 3, "max_num_batched_tokens": 15},
    "odd chunks": {"max_num_seqs": 5, "max_num_batched_tokens": 37},
    "few blocks": {"num_gpu_blocks_override": 8, "max_num_batched_tokens": 50, "max_num_seqs": 10},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("method", ["none", "draft_model"])
def test_chunks_and_preemption_leave_no_trace_in_logprobs(
    engines: Engines, plain: list[Request], method: str, schedule: str
) -> None:
    llm = engines(method_config(method, 4), **SCHEDULES[schedule])
    requests, _ = complete(llm, ASKING, PARAMS)
    assert told(requests) == told(plain)
    assert any(request.num_preemptions for request in requests) == (schedule == "few blocks")


def test_a_prompt_that_is_computed_again_is_told_once(engines: Engines) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, prompt_logprobs=1)] * 6
    llm = engines(num_gpu_blocks_override=8, max_num_batched_tokens=50, max_num_seqs=10)
    requests, _ = complete(llm, PROMPTS[:6], params)
    assert any(request.num_preemptions for request in requests)
    assert [len(request.prompt_logprobs) for request in requests] == [r.num_prompt_tokens - 1 for r in requests]
    assert told(requests) == told(complete(engines(**ROOMY), PROMPTS[:6], params)[0])


@pytest.mark.parametrize("method", ["none", "draft_model"])
def test_a_lossy_rule_tells_the_logprobs_of_the_tokens_it_commits(engines: Engines, method: str) -> None:
    """Under a rule that keeps the distribution only, the tokens may be others, and the logprobs are theirs."""
    llm = engines(method_config(method, 4, rejection_sample_method="probabilistic"), **ROOMY)
    requests, _ = complete(llm, PROMPTS[:2], [SamplingParams(max_tokens=16, seed=9, logprobs=1, ignore_eos=True)] * 2)
    for request in requests:
        tokens = request.prompt_token_ids + request.output_token_ids
        assert [entry.token_id for entry in request.logprobs] == request.output_token_ids
        for position, entry in enumerate(request.logprobs, start=request.num_prompt_tokens):
            logits = logits_after(llm, tokens[:position], request.num_prompt_tokens)
            assert entry.logprob == pytest.approx(float(logits.log_softmax(dim=0)[entry.token_id]), abs=1e-5)


@pytest.mark.parametrize("asked", [0, 6, np.int64(21), np.uint8(50), 60])
def test_a_request_is_told_what_it_asks_for_and_what_there_is(engines: Engines, asked: Any) -> None:
    """Room for them is rounded up, beyond a small vocabulary too; numpy's numbers will do."""
    llm = engines(method_config("draft_model", 2), architecture={"vocab_size": 50})
    params = [SamplingParams(temperature=0.0, max_tokens=9, logprobs=asked), SamplingParams(seed=1, max_tokens=9)]
    prompts = [{"prompt_token_ids": [7, 8, 9]}, {"prompt_token_ids": [3]}]
    requests, metrics = complete(llm, prompts, params)
    assert metrics.num_decoding_steps > metrics.steps_in_parts.total()
    for entry in requests[0].logprobs:
        assert len(entry.top_token_ids) == len(entry.top_logprobs) == min(asked, 50)
        assert list(entry.top_logprobs) == sorted(entry.top_logprobs, reverse=True)
    assert len(requests[0].logprobs) == len(requests[0].output_token_ids) == 9


def test_nothing_is_gathered_for_a_step_in_which_nobody_asks(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("nobody asked")

    monkeypatch.setattr("verifier.logprobs.top_logprobs", never)
    llm = engines(method_config("draft_model", 4), **ROOMY)
    assert complete(llm, ASKING[:3], [PARAMS[4]] * 3)[0][0].logprobs == []
    with pytest.raises(AssertionError, match="nobody asked"):
        complete(llm, ASKING[:1], [PARAMS[0]])


def test_the_logits_of_a_long_prompt_come_in_slabs(engines: Engines) -> None:
    """A prompt of 2,000 tokens times 152,000 entries would be 1.2 GB at once."""
    llm = engines(architecture={"max_position_embeddings": 1024}, max_num_batched_tokens=1024)
    slabs: list[torch.Tensor] = []
    request = Request(
        request_id="x", prompt_token_ids=[i % VOCAB_SIZE for i in range(600)], sampling_params=SamplingParams(), seed=0
    )
    assert llm.engine.block_manager.grow(request.block_table, 600)
    part = Part(request=request, start=0, end=600, num_logits=1, scored_from=10)
    last = llm.engine.target.forward([part], None, slabs.append).logits
    assert [len(slab) for slab in slabs] == [SCORED_ROWS, SCORED_ROWS, 589 - 2 * SCORED_ROWS], "rows 10 to 598"
    whole = llm.engine.target.run([Part(request=request, start=0, end=600, num_logits=590)])
    assert torch.equal(torch.cat([*slabs, last]), whole), "a row has its bits from the slab or from the whole"
    llm.engine.block_manager.release(request.block_table)


def test_logits_from_across_a_prompts_end_are_a_bug_of_ours(engines: Engines) -> None:
    """They would come from two launches, and the rows of the first would be missing without a word."""
    llm = engines(**ROOMY)
    request = Request(
        request_id="x", prompt_token_ids=[1, 2], output_token_ids=[3], sampling_params=SamplingParams(), seed=0
    )
    assert llm.engine.block_manager.grow(request.block_table, 3)
    with pytest.raises(AssertionError, match="across a prompt's end"):
        llm.engine.target.run([Part(request=request, start=0, end=3, num_logits=2)])
    llm.engine.block_manager.release(request.block_table)


def test_outputs_have_the_shape_known_from_vllm() -> None:
    llm = LLM("tiny", speculative_config={"method": "ngram", "num_speculative_tokens": 3}, device="cpu")
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, prompt_logprobs=0, logit_bias={300: 100.0})
    (output,) = llm.generate("import os\nfor name", params)
    completion = output.outputs[0]
    assert completion.token_ids == (300,) * 6 and completion.logprobs is not None
    for place in completion.logprobs:
        own, *top = place.items()
        assert own[0] == 300 and own[1].rank > 2 and [logprob.rank for _, logprob in top] == [1, 2]
        assert all(logprob.decoded_token == llm.engine.tokenizer.decode((token,)) for token, logprob in place.items())
        assert own[1].logprob < top[1][1].logprob <= top[0][1].logprob < 0.0
    assert completion.cumulative_logprob == sum(place[300].logprob for place in completion.logprobs)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert [list(place or {}) for place in output.prompt_logprobs[1:]] == [[t] for t in output.prompt_token_ids[1:]]
    (bare,) = llm.generate("import os\nfor name", SamplingParams(temperature=0.0, max_tokens=6))
    assert (bare.prompt_logprobs, bare.outputs[0].logprobs, bare.outputs[0].cumulative_logprob) == (None, None, None)


def test_a_likely_token_is_told_once_and_at_its_rank() -> None:
    (output,) = LLM("tiny", device="cpu").generate(
        "import os\n", SamplingParams(temperature=0.0, max_tokens=5, logprobs=3)
    )
    for token_id, place in zip(output.outputs[0].token_ids, output.outputs[0].logprobs or [], strict=True):
        assert next(iter(place)) == token_id and [logprob.rank for logprob in place.values()] == [1, 2, 3]


def test_a_request_that_fails_tells_no_logprobs(engines: Engines) -> None:
    params = SamplingParams(logprobs=1, prompt_logprobs=1)
    (output,) = engines(**ROOMY).generate({"prompt_token_ids": [1] * 256}, params)
    assert output.error is not None
    assert (output.prompt_logprobs, output.outputs[0].logprobs) == ([None], [])


def test_a_run_writes_logprobs_into_its_outputs_when_asked(tmp_path: Path) -> None:
    config = {
        "model": {"model": "tiny"}, "method": {"method": "ngram"}, "hardware": {"device": "cpu"}, "tracking": "none",
        "workload": {"name": "demo", "limit": 2},
        "sampler": {"max_tokens": 5, "n": 2, "logprobs": 1, "prompt_logprobs": 0, "temperature": 0.7},
    }  # fmt: skip
    execute(SpeculativeConfig.parse(config), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "outputs.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    for place, line in enumerate(lines):
        assert len(line["logprobs"]) == len(line["token_ids"])
        own = [entry[str(token)] for token, entry in zip(line["token_ids"], line["logprobs"], strict=True)]
        assert line["cumulative_logprob"] == sum(entry["logprob"] for entry in own)
        assert all(set(entry) == {"logprob", "rank", "decoded_token"} for entry in own)
        assert ("prompt_logprobs" in line) == (place % 2 == 0), "the first of n completions tells the prompt's"
    assert lines[0]["prompt_logprobs"][0] is None


def test_rows_of_a_request_that_asks_for_nothing_are_left_alone() -> None:
    """Two neighbours decode with two drafts each, one asks: three rows, the second request's, and none is read yet."""
    items = [
        scheduled(
            Request(
                request_id=str(i), prompt_token_ids=[1], output_token_ids=[2], seed=0,
                sampling_params=SamplingParams(logprobs=asked),
            ),
            max_draft_tokens=2,
        )
        for i, asked in enumerate([None, 1])
    ]  # fmt: skip
    logits, yielded = torch.arange(48, dtype=torch.float32).view(6, 8), torch.tensor([[1, 2, 3], [4, -1, -1]])
    with NoReadback():  # type: ignore[no-untyped-call]
        gatherer = LogprobGatherer(Schedule(scheduled=items), [2, 2], [2, 2], vocab_size=8, device=torch.device("cpu"))
        told_rows = gatherer.finish(logits, yielded)
    assert told_rows is not None and told_rows.packed.shape == (3, 5)
    assert told_rows.read()["1"][1][0].token_id == 4 and "0" not in told_rows.asked
