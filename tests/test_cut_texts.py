"""Texts that max_model_len ends are told, and what to do about them."""

from __future__ import annotations

import pytest

from runner.cut_texts import cut_text_notes
from runner.engine.sampling_params import SamplingParams
from runner.measure import measure
from runner.workload import WorkloadItem
from tests.conftest import Engines, complete


@pytest.mark.parametrize("method", [None, {"method": "ngram", "num_speculative_tokens": 3}])
def test_texts_that_were_asked_to_go_on_are_counted(engines: Engines, method: dict[str, object] | None) -> None:
    llm = engines(method, max_model_len=24)
    prompts = [{"prompt_token_ids": [5] * length} for length in (4, 4, 4, 14)]
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (20, 60, None, 11)]  # type: ignore[arg-type]
    requests, _ = complete(llm, prompts, params)
    assert [request.num_tokens for request in requests] == [24] * 4
    assert cut_text_notes(requests, 24) == [
        "2 of 4 texts ended at max_model_len (24 tokens), before max_tokens; raise model.max_model_len where the model "
        "reads longer texts, or lower sampler.max_tokens"
    ]
    assert cut_text_notes([requests[0], requests[2]], 24) == []


def test_a_run_tells_of_them(engines: Engines) -> None:
    item = WorkloadItem(prompt={"prompt_token_ids": [5, 6]}, sampling={"max_tokens": 60, "ignore_eos": True})
    notes = measure(engines(max_model_len=24), [item]).summary["notes"]
    assert any("1 of 1 texts ended at max_model_len" in note for note in notes)
