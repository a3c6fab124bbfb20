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

from proposers.heads.speculator import Speculator, load_speculator
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.request import DraftTokens
from runner.engine.sampling_params import SamplingParams
from runner.engine.schedule import Schedule
from runner.llm import LLM
from tests.conftest import complete
from tests.transformers_reference import (
    CPU,
    KeepFloat64,
    hidden_states,
    in_float64,
    load,
    random_model,
    save,
    save_tokenizer,
)

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


def rms_normed(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()


# Saves a speculator of this config, these tensors and this file, and reads it for the target.
Read = Callable[[dict[str, Any], dict[str, torch.Tensor], str], Speculator]


def reader(target: Target, directory: Path) -> Read:
    loaded = load(ModelSource(model=str(target.directory)))

    def save_and_read(config: dict[str, Any], tensors: dict[str, torch.Tensor], file: str) -> Speculator:
        source = ModelSource(model=str(save_head(directory, config, tensors, file)), name="method.model")
        return load_speculator(source, loaded, device=CPU, dtype=torch.float32)

    return save_and_read


def states_and_tokens(num_steps: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Of ten rows: states [10, hidden], and the token [10] that each step reads."""
    generator = torch.Generator().manual_seed(1)
    states = 3.0 * torch.randn(10, HIDDEN_SIZE, generator=generator)
    return states, list(torch.randint(VOCAB_SIZE, (num_steps, 10), generator=generator))


def logits_of(
    speculator: Speculator, states: torch.Tensor, tokens: list[torch.Tensor], tile: int | None
) -> list[torch.Tensor]:
    """[10, vocab] of each step."""
    found, state = [], speculator.first_state(states)
    for step, previous in enumerate(tokens):
        state = speculator.next_state(step, state, previous, tile)
        found.append(speculator.logits(step, state, tile))
    return found


# Logits [num_rows, vocab] of each step over states [num_rows, hidden]; step i reads tokens[i] [num_rows].
ReferenceLogits = Callable[[torch.Tensor, list[torch.Tensor]], list[torch.Tensor]]


def assert_drafted_by(
    reference: ReferenceLogits, target: Target, monkeypatch: pytest.MonkeyPatch, method: dict[str, Any]
) -> None:
    """Of steps that draft up to three tokens, from the last token x_{n-1} and the state that it was guessed from."""
    drafts = [draft for draft in drafts_of_a_run(target, monkeypatch, method) if draft.drafted]
    assert len(drafts) > 20 and {len(draft.drafted) for draft in drafts} == {1, 2, 3}, "n_predict at most"
    for draft in drafts:
        state = target.exact_state(draft.token_ids[:-1])[None]
        known = [torch.tensor([token]) for token in (draft.token_ids[-1], *draft.drafted[:-1])]
        assert draft.drafted == [logits.argmax().item() for logits in reference(state, known)]


def assert_refused(read: Callable[..., Any], values: tuple[Any, ...], file: str, message: str) -> None:
    """values: a config and tensors."""
    with pytest.raises(UserError, match=message) as caught:
        read(*values, file)
    assert str(caught.value).startswith("method.model=") and "; " in str(caught.value)


# Changes to a config and its tensors before they are saved.
def changed(**values: Any) -> Callable[..., Any]:
    return lambda own, tensors: ({**own, **values}, tensors)


def without(name: str) -> Callable[..., Any]:
    return lambda own, tensors: (own, {other: tensor for other, tensor in tensors.items() if other != name})


def with_(name: str, shape: tuple[int, ...]) -> Callable[..., Any]:
    return lambda own, tensors: (own, {**tensors, name: torch.zeros(shape)})
