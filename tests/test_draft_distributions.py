"""How a model drafter draws: from its own distribution, cut and warped by the very processors the target's rows get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import proposers.drafting.token_by_token
from kernels.reference.philox import Stream, gumbel
from runner.engine.request import DraftTokens
from runner.engine.sampling import SamplingRows, draft_tokens, process_logits
from runner.engine.sampling_params import SamplingParams
from runner.engine.schedule import Schedule
from tests.conftest import Engines, complete

PARAMS = {
    seed: SamplingParams(seed=seed, max_tokens=14, ignore_eos=True, **keys)
    for seed, keys in enumerate(
        [
            {"temperature": 0.7, "top_k": 5},
            {"temperature": 1.0, "top_p": 0.6},
            {"temperature": 1.4, "min_p": 0.2},
            {"temperature": 0.9, "top_k": 9, "top_p": 0.8, "min_p": 0.02},
            {"temperature": 0.0},
        ]
    )
}
PROMPTS = [{"prompt_token_ids": [3 + (11 * b + 7 * i) % 60 for i in range(9)]} for b in range(len(PARAMS))]


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """One draft step over the requests that draft there."""

    logits: Tensor  # [num_rows, vocab], as the draft model gave them
    processed: Tensor  # [num_rows, vocab]
    rows: SamplingRows
    num_tokens: dict[int, int]  # seed -> committed tokens of its request when the draft began
    token_ids: Tensor  # [num_rows]
    probs: Tensor | None  # [num_rows, vocab]


def record(monkeypatch: pytest.MonkeyPatch, engines: Engines, **keys: Any) -> list[Drawing]:
    """All draft steps of a run over PROMPTS."""
    llm = engines({"method": "draft_model", "num_speculative_tokens": 3, **keys}, enforce_eager=True)
    drawings: list[Drawing] = []
    num_tokens: dict[int, int] = {}
    seen: list[Tensor] = []
    propose = llm.engine.proposer.propose

    def recording_propose(schedule: Schedule) -> DraftTokens:
        num_tokens.update({item.request.seed: item.request.num_tokens for item in schedule.decoding})
        return propose(schedule)

    def recording_process_logits(logits: Tensor, rows: SamplingRows) -> Tensor:
        seen.append(logits.clone())
        return process_logits(logits, rows)

    def recording_draft_tokens(processed: Tensor, rows: SamplingRows, *args: Any, **kwargs: Any) -> Any:
        token_ids, probs = draft_tokens(processed, rows, *args, **kwargs)
        drawings.append(
            Drawing(
                logits=seen[-1],
                processed=processed,
                rows=rows,
                num_tokens=dict(num_tokens),
                token_ids=token_ids,
                probs=probs,
            )
        )
        return token_ids, probs

    monkeypatch.setattr(llm.engine.proposer, "propose", recording_propose)
    monkeypatch.setattr(proposers.drafting.token_by_token, "process_logits", recording_process_logits)
    monkeypatch.setattr(proposers.drafting.token_by_token, "draft_tokens", recording_draft_tokens)
    complete(llm, PROMPTS, list(PARAMS.values()))
    return drawings


def naive_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """temperature, min_p, top_k, top_p, one after another on one row in float64."""
    probs = (logits.double() / params.temperature).softmax(-1)
    probs = torch.where(probs >= params.min_p * probs.max(), probs, 0.0)
    if params.top_k:
        probs = torch.where(probs >= probs.sort(descending=True).values[params.top_k - 1], probs, 0.0)
    ordered = probs.sort(descending=True).values
    smallest = ordered[int((ordered.cumsum(0) < params.top_p * probs.sum()).sum())] if params.top_p < 1 else 0.0
    probs = torch.where(probs >= smallest, probs, 0.0)
    return probs / probs.sum()


@pytest.mark.parametrize(
    ("rule", "draft_sample_method"),
    [("probabilistic", "probabilistic"), ("probabilistic", "coupled"), ("block", "probabilistic")],
)
def test_draft_probabilities_are_cut_and_warped_as_the_targets_are(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, rule: str, draft_sample_method: str
) -> None:
    drawings = record(monkeypatch, engines, rejection_sample_method=rule, draft_sample_method=draft_sample_method)
    sizes = set()
    for drawing in drawings:
        for row, seed in enumerate(drawing.rows.seeds.tolist()):
            if (params := PARAMS[seed]).is_greedy:
                assert int(drawing.token_ids[row]) == int(drawing.logits[row].argmax())
                continue
            assert drawing.probs is not None
            probs = drawing.probs[row]
            torch.testing.assert_close(probs.double(), naive_probs(drawing.logits[row], params), rtol=1e-4, atol=1e-7)
            assert float(probs[drawing.token_ids[row]]) > 0
            sizes.add((seed, int((probs > 0).sum())))
    assert max(size for seed, size in sizes if seed == 0) == 5
    assert all(min(size for other, size in sizes if other == seed) < 40 for seed in range(4)), "cut-offs that cut"


def test_under_block_drafts_are_drawn_with_noise_of_their_position_and_step(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is the number of committed tokens when it begins: a position drafted twice has fresh noise each time."""
    keys, depths = set(), set()
    for drawing in record(monkeypatch, engines, rejection_sample_method="block"):
        rows = drawing.rows
        step = torch.tensor([drawing.num_tokens[seed] for seed in rows.seeds.tolist()])
        noise = gumbel(rows.seeds, rows.positions, Stream.DRAFT, step, vocab_size=rows.vocab_size)
        for row, seed in enumerate(rows.seeds.tolist()):
            scores = drawing.processed[row] + (0 if PARAMS[seed].is_greedy else noise[row])
            assert int(drawing.token_ids[row]) == int(scores.argmax())
            key = (seed, int(rows.positions[row]), int(step[row]))
            assert key not in keys
            keys.add(key)
            depths.add(key[1] - key[2])
    assert depths == {0, 1, 2}
    assert len({key[:2] for key in keys}) < len(keys), "some position was drafted twice"


@pytest.mark.parametrize("draft_sample_method", ["probabilistic", "coupled"])
def test_no_distribution_is_computed_for_a_rule_that_does_not_read_it(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, draft_sample_method: str
) -> None:
    drawings = record(monkeypatch, engines, rejection_sample_method="strict", draft_sample_method=draft_sample_method)
    assert len(drawings) > 5 and all(drawing.probs is None for drawing in drawings)
