"""What runs before the clock: it must have done all that a timed pass does for the first time."""

from __future__ import annotations

from typing import Any

import pytest

from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM
from runner.metrics import MetricsCollector
from runner.passes import WARM_UP_TOKENS, run_pass, warm_up
from runner.workload import WorkloadItem
from tests.conftest import TARGET_CONFIG

PROMPTS = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [4, 5]}]


def test_it_samples_as_the_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """It drew without cut-offs, so that what cuts was compiled on the clock: 25 tokens/s where there are 700."""
    llm = LLM("dummy", device="cpu", load_format="dummy", hf_config=TARGET_CONFIG, dtype="float32")
    sampler = llm.config.sampler.model_copy(update={"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_tokens": 2})
    llm.config = llm.config.model_copy(update={"sampler": sampler})
    items = [
        WorkloadItem(prompt=PROMPTS[0], sampling={"temperature": 0.9, "max_tokens": 3}),
        WorkloadItem(prompt=PROMPTS[1]),
    ]
    run, asked = llm.run, list[list[SamplingParams]]()

    def spy(requests: list[Request], *args: Any, **how: Any) -> Any:
        asked.append([request.sampling_params for request in requests])
        return run(requests, *args, **how)

    monkeypatch.setattr(llm, "run", spy)
    warm_up(llm, items, [llm.engine.proposer])
    run_pass(llm, llm.engine.proposer, items, MetricsCollector(), max_concurrency=None)
    for before, timed in zip(*asked, strict=True):
        assert before.max_tokens == WARM_UP_TOKENS and before.ignore_eos
        for key in ("temperature", "top_k", "top_p", "min_p", "logprobs", "repetition_penalty"):
            assert getattr(before, key) == getattr(timed, key)
    assert [before.temperature for before in asked[0]] == [0.9, 0.7]
