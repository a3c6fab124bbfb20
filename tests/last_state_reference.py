"""A small saved target, and the drafts that heads over its last hidden state make in the engine, step by step.

Shared by the tests of Medusa and of the speculators, whose references start from transformers' float64 states.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.engine.request import DraftTokens
from runner.engine.sampling_params import SamplingParams
from runner.engine.scheduler import Schedule
from runner.llm import LLM
from tests.conftest import complete
from tests.transformers_reference import KeepFloat64, hidden_states, in_float64, random_model, save, save_tokenizer

HIDDEN_SIZE, VOCAB_SIZE = 32, 48
TARGET_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}
PROMPTS = [{"prompt_token_ids": [(7 * i + 5 * j) % VOCAB_SIZE for j in range(3 + 9 * i)]} for i in range(4)]


@dataclass(frozen=True, kw_only=True)
class Target:
    directory: Path
    model: Any  # transformers', float32

    def exact_state(self, token_ids: list[int]) -> torch.Tensor:
        """The normed state [hidden] float64 behind these tokens."""
        with KeepFloat64():
            return hidden_states(in_float64(self.model), token_ids)["normed"][-1]


def save_target(directory: Path) -> Target:
    from transformers import LlamaConfig

    model = random_model(LlamaConfig(**TARGET_SHAPE))
    save(model, directory)
    save_tokenizer(directory, VOCAB_SIZE)
    return Target(directory=directory, model=model)


def random_tensors(shapes: dict[str, tuple[int, ...]], std: float = 0.3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: std * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def save_head(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], file: str) -> Path:
    from safetensors.torch import save_file

    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, directory / file)
    else:
        torch.save(tensors, directory / file)
    return directory


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What a step drafted for a request."""

    token_ids: list[int]  # committed
    drafted: list[int]


def drafts_of_a_run(
    target: Target, monkeypatch: pytest.MonkeyPatch, method: dict[str, Any], **engine_args: Any
) -> list[Draft]:
    """All drafts of greedy requests of different lengths, whose prompts are computed in chunks."""
    engine_args = {"max_num_seqs": 3, "max_num_batched_tokens": 23, **engine_args}
    llm = LLM(str(target.directory), device="cpu", enforce_eager=True, speculative_config=method, **engine_args)
    recorded: list[Draft] = []
    propose = llm.engine.proposer.propose

    def recording_propose(schedule: Schedule) -> DraftTokens:
        drafts = propose(schedule)
        token_ids = drafts.token_ids.tolist()
        for item, (start, end) in zip(schedule.decoding, pairwise(drafts.cu_num_draft_tokens), strict=True):
            request = item.request
            committed = request.tokens_between(0, request.num_tokens)
            recorded.append(Draft(token_ids=committed, drafted=token_ids[start:end]))
        return drafts

    monkeypatch.setattr(llm.engine.proposer, "propose", recording_propose)
    params = [SamplingParams(temperature=0.0, max_tokens=9 + i, ignore_eos=True) for i in range(len(PROMPTS))]
    complete(llm, PROMPTS, params)
    return recorded


# Changes to a config and its tensors before they are saved.
def changed(**values: Any) -> Callable[..., Any]:
    return lambda own, tensors: ({**own, **values}, tensors)


def without(name: str) -> Callable[..., Any]:
    return lambda own, tensors: (own, {other: tensor for other, tensor in tensors.items() if other != name})


def with_(name: str, shape: tuple[int, ...]) -> Callable[..., Any]:
    return lambda own, tensors: (own, {**tensors, name: torch.zeros(shape)})
