"""Prompts in a target whose last layers store nothing (Gemma 4's small ones): only awaited rows go through these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runner.engine.checkpoint import ModelSource
from runner.engine.hidden_states import NORMED
from runner.engine.launch import Part
from runner.engine.layers import DecoderLayer
from runner.engine.model_runner import ModelOutput, ModelRunner
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from tests.assistant_checkpoints import NUM_LAYERS, VOCAB_SIZE, write
from tests.transformers_reference import BLOCK_SIZE, CPU, load, random_sequences

LATE_FROM = NUM_LAYERS - 2
WINDOW = 8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("late"), "shared", {}).target


def runner_of(target: Path) -> ModelRunner:
    common: dict[str, Any] = {"block_size": BLOCK_SIZE, "device": CPU, "dtype": torch.float32, "batch_invariant": True}
    runner = ModelRunner(load(ModelSource(model=str(target))).model, **common)
    runner.allocate_cache(12)
    return runner


def requests() -> list[Request]:
    """Prompts longer and shorter than the window."""
    prompts = [own.prompt for own in random_sequences(VOCAB_SIZE, ((21, 0), (3, 0), (WINDOW + 1, 0)))]
    tables = ([5, 2], [7], [1, 3])
    return [
        Request(
            request_id=str(index),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(temperature=0.0),
            seed=0,
            block_table=table,
        )
        for index, (prompt, table) in enumerate(zip(prompts, tables, strict=True))
    ]


def steps(scored_from: int | None = None) -> list[list[Part]]:
    """A chunk of which nothing is awaited; its end beside two whole prompts; a token of each."""
    first, second, third = everyone = requests()
    for request in everyone:
        request.output_token_ids.append(4)
    ends = [own.num_prompt_tokens for own in everyone]
    return [
        [Part(request=first, start=0, end=10)],
        [
            Part(request=second, start=0, end=ends[1], num_logits=1),
            Part(request=first, start=10, end=ends[0], num_logits=1, scored_from=scored_from),
            Part(request=third, start=0, end=ends[2], num_logits=1),
        ],
        [Part(request=own, start=end, end=end + 1, num_logits=1) for own, end in zip(everyone, ends, strict=True)],
    ]


def run(runner: ModelRunner, scored_from: int | None = None, **how: Any) -> tuple[list[ModelOutput], torch.Tensor]:
    """What each step yields, and the logits of prompt tokens that are scored."""
    scored: list[torch.Tensor] = []

    def take(logits: torch.Tensor) -> None:
        scored.append(logits.clone())

    outputs = [runner.forward(parts, None, take, **how) for parts in steps(scored_from)]
    return outputs, torch.cat(scored) if scored else torch.empty(0)


def seen_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that each layer is given, pass after pass."""
    seen: list[int] = []
    compute = DecoderLayer.after_input_norm

    def counted(self: DecoderLayer, normed: torch.Tensor, *rest: Any) -> Any:
        seen.append(len(normed))
        return compute(self, normed, *rest)

    monkeypatch.setattr(DecoderLayer, "after_input_norm", counted)
    return seen


@pytest.mark.parametrize("scored_from", [None, 13])
def test_rows_that_go_no_further_change_no_bit_of_the_others(target: Path, scored_from: int | None) -> None:
    """Nor of the cache; every_token runs the same steps with all rows in all layers."""
    late, every_token = runner_of(target), runner_of(target)
    found, scored = run(late, scored_from)
    expected, all_scored = run(every_token, scored_from, tap_layers=(NORMED,))
    assert all(torch.equal(ours.logits, theirs.logits) for ours, theirs in zip(found, expected, strict=True))
    assert torch.equal(scored, all_scored) and len(scored) == (0 if scored_from is None else 21 - 1 - scored_from)
    assert late.cache is not None and every_token.cache is not None
    assert all(map(torch.equal, late.cache.layers, every_token.cache.layers))


@pytest.mark.parametrize(("scored_from", "num_late"), [(None, 3), (13, 3 + 7)])
def test_late_layers_see_awaited_rows_alone(
    target: Path, scored_from: int | None, num_late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(target)
    seen = seen_rows(monkeypatch)
    run(runner, scored_from)
    padded = {count: runner.shapes["prefill"].padded_rows(count) for count in (10, 23, num_late)}
    chunk, prompts = [padded[10]] * LATE_FROM, [padded[23]] * LATE_FROM + [padded[num_late]] * 2
    assert seen[: len(chunk) + len(prompts)] == [*chunk, *prompts]
    assert len(seen) == len(chunk) + len(prompts) + NUM_LAYERS, "generated tokens go through all layers"


def test_states_that_nobody_reads_are_left_out(target: Path) -> None:
    """But for a chunk's last token: one may end with the prompt and yield nothing, where a request is computed again.

    Bug told here: drafts of a request that was preempted behind its first token began with a state of zeros.
    """
    taps = (2, LATE_FROM, NUM_LAYERS, NORMED)
    found, _ = run(runner_of(target), tap_layers=taps, taps_every_token=False)
    expected, _ = run(runner_of(target), tap_layers=taps)
    awaited = [[9], [2, 13, 22], [0, 1, 2]]
    for ours, theirs, rows in zip(found, expected, awaited, strict=True):
        assert ours.hidden_states is not None and theirs.hidden_states is not None
        own_early, own_late = ours.hidden_states.chunk(2, dim=1)
        early, late = theirs.hidden_states.chunk(2, dim=1)
        assert torch.equal(own_early, early), "what lies in front of late layers is there for all"
        assert torch.equal(own_late[rows], late[rows])
        others = [row for row in range(len(late)) if row not in rows]
        assert not own_late[others].any() and (not others or late[others].any())
