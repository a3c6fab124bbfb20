"""The whole engine over the Triton kernels, interpreted: it says what it says over torch, captured or not.

Interpreted products do not keep a row's bits (a BLAS chooses by shape), so what is compared is tokens. Bits are
compared on a GPU, where there is one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from runner.engine import backend
from runner.engine.graphs import Compute, Graph, GraphStore, Tensors
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM
from tests.conftest import Engines, complete
from tests.graphs_for_tests import recorded

pytest.importorskip("triton")

PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8, 9, 10, 11]}, {"prompt_token_ids": [3, 4]}]
PARAMS = [
    SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=5, temperature=0.8, top_p=0.9, top_k=20, seed=3, ignore_eos=True),
]
WITHOUT_CUTS = [replace(params, top_p=1.0, top_k=0) for params in PARAMS]  # whose search takes the interpreter longest
SMALL: dict[str, Any] = {"architecture": {"num_hidden_layers": 1}, "num_gpu_blocks_override": 320}
METHODS: dict[str, dict[str, Any]] = {
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 3},
    "probabilistic": {
        "method": "draft_model",
        "num_speculative_tokens": 2,
        "rejection_sample_method": "probabilistic",
    },
    "tree": {"method": "eagle", "num_speculative_tokens": 3, "speculative_token_tree": [[0], [1], [0, 0]]},
}


def texts(llm: LLM, params: list[SamplingParams] = PARAMS) -> list[list[int]]:
    return [request.output_token_ids for request in complete(llm, PROMPTS, params)[0]]


@pytest.mark.parametrize("name", ["draft_model", "probabilistic"])  # plain decoding: tests/test_whole_steps.py
def test_kernels_say_what_torch_says(name: str, engines: Engines, interpreted: Engines) -> None:
    params = PARAMS if name == "draft_model" else WITHOUT_CUTS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "interprets_kernels", False)
        expected = texts(engines(METHODS[name], **SMALL), params)
    assert texts(interpreted(METHODS[name], enforce_eager=True, **SMALL), params) == expected


def test_captured_passes_of_trees_say_what_torch_says(engines: Engines, interpreted: Engines) -> None:
    """Padded to their bucket, fed through tensors that are used again, and read before the next replay."""
    params = [replace(own, logprobs=0) for own in WITHOUT_CUTS]  # which the host has a part in
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "interprets_kernels", False)
        expected = texts(engines(METHODS["tree"], **SMALL), params)
    llm = interpreted(METHODS["tree"], **SMALL)
    store = llm.engine.target.graphs
    assert isinstance(store, GraphStore)
    assert texts(llm, params) == expected
    assert texts(llm, params) == expected and len(store._graphs) > 0  # layouts of the first time have come again


def test_a_layout_is_captured_when_it_comes_again_and_replayed_from_then_on() -> None:
    calls: list[str] = []

    def record(compute: Compute, inputs: Tensors) -> Graph:
        calls.append("recorded")
        return recorded(compute, inputs)

    def compute(numbers: torch.Tensor) -> Tensors:
        calls.append("computed")
        return (numbers * 2,)

    store = GraphStore(record)
    first, second, third = (store("a", compute, torch.tensor([number]))[0].clone() for number in (1, 2, 3))
    assert [int(first), int(second), int(third)] == [2, 4, 6]
    assert calls == ["computed", "recorded", "computed", "computed"]
    assert int(store("b", compute, torch.tensor([5]))[0]) == 10 and calls.count("recorded") == 1


def test_the_layouts_that_were_used_last_are_kept() -> None:
    """Outputs of 8 bytes each, room for two of them."""
    recordings: list[int] = []

    def record(compute: Compute, inputs: Tensors) -> Graph:
        recordings.append(int(inputs[0]))
        return Graph(inputs=inputs, outputs=compute(*inputs), replay=lambda: None)

    store = GraphStore(record, max_output_bytes=16)
    for key in (1, 2, 3):
        store(key, lambda number: (number,), torch.tensor(key))
    for key in (1, 2, 1, 3, 1, 2):  # 3 takes the place of 2, and 2 that of 3
        assert int(store(key, lambda number: (number,), torch.tensor(key))[0]) == key
    assert recordings == [1, 2, 3, 2]
    recordings.clear()
    store = GraphStore(record, max_graphs=2)
    for key in (1, 2, 3, 1, 2, 3):
        store(key, lambda number: (number,), torch.tensor(key))
    assert recordings == [1, 2, 3] and len(store._graphs) == 2
