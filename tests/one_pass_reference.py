"""A small saved target, and the logits that drafters of one pass have in the engine, pass by pass.

Shared by the tests of PARD, of DFlash and of DSpark, whose references start over from the committed tokens in float64.
What the engine verifies is not what they drafted but what it will say, cut short by a wrong token, so that steps accept
none, some and all of the drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from proposers.base import ProposerContext
from proposers.drafting.token_by_token import Draw
from runner.engine.checkpoint import ModelSource
from runner.engine.request import DraftTokens, Request
from runner.engine.sampling import SamplingRows
from runner.engine.sampling_params import SamplingParams
from runner.engine.schedule import Schedule
from runner.llm import LLM
from tests.conftest import complete
from tests.transformers_reference import CPU, load, random_model, save, save_tokenizer

HIDDEN_SIZE, VOCAB_SIZE, NUM_LAYERS, MASK = 32, 48, 3, 5
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
PROMPTS = [{"prompt_token_ids": [(7 * i + 5 * j) % VOCAB_SIZE for j in range(3 + 11 * i)]} for i in range(4)]
PARAMS = [SamplingParams(temperature=0.0, max_tokens=33 + i, ignore_eos=True) for i in range(len(PROMPTS))]
# Of engines whose steps on a CPU and on an emulated GPU are compared.
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 3,
    "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 64,  # a GPU would run its largest steps to find how many
}
# The prompts come in chunks, and the blocks are too few for all requests.
TIGHT: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 29, "num_gpu_blocks_override": 7}


@dataclass(frozen=True, kw_only=True)
class Target:
    directory: Path
    model: Any  # transformers', float32


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What one pass said of a request."""

    token_ids: list[int]  # committed
    logits: torch.Tensor  # [num_draft_tokens, vocab]
    drafted: list[int]


def save_target(directory: Path) -> Target:
    from transformers import LlamaConfig

    model = random_model(LlamaConfig(**SHAPE))
    save(model, directory)
    save_tokenizer(directory, VOCAB_SIZE)
    return Target(directory=directory, model=model)


def context_of(target: Target) -> ProposerContext:
    """What an engine over the target tells a proposer."""
    return ProposerContext(
        vocab_size=VOCAB_SIZE,
        max_model_len=128,
        max_num_seqs=1,
        max_num_batched_tokens=1024,
        eos_token_ids=(),
        block_size=16,
        device=CPU,
        dtype=torch.float32,
        batch_invariant=True,
        needs_draft_probs=False,
        target=load(ModelSource(model=str(target.directory))),
    )


def reference_logits(reference: Any, layout: str, model: Any, passes: Sequence[Pass]) -> list[torch.Tensor]:
    """[num_draft_tokens, vocab] of each pass. reference: the class of a rewrite; model: the target, in its dtype."""
    return [
        reference(layout, model, one.token_ids, len(one.drafted)).logits([one.token_ids[-1], *one.drafted[:-1]])
        for one in passes
    ]


def passes_of_a_run(
    target: Target, monkeypatch: pytest.MonkeyPatch, method: dict[str, Any], **engine_args: Any
) -> tuple[list[Pass], list[Request]]:
    """All passes of greedy requests under TIGHT, and the requests, whose text is checked to be plain decoding's."""
    options = {"device": "cpu", **TIGHT, **engine_args}
    plain, _ = complete(LLM(str(target.directory), **{**options, "num_gpu_blocks_override": None}), PROMPTS, PARAMS)
    texts = {request.request_id: request.output_token_ids for request in plain}
    llm = LLM(str(target.directory), enforce_eager=True, speculative_config=method, **options)
    proposer: Any = llm.engine.proposer
    passes: list[Pass] = []
    seen: dict[int, list[torch.Tensor]] = {}  # of the last pass, by the place of the request
    propose, walk, steps = proposer.propose, proposer.walk, count()

    def recording_walk(requests: Sequence[Request], counts: Sequence[int], draw: Draw) -> torch.Tensor:
        seen.clear()

        def recording_draw(logits: torch.Tensor, rows: SamplingRows, step: int, active: list[int]) -> torch.Tensor:
            for place, own in zip(active, logits.clone(), strict=True):
                seen.setdefault(place, []).append(own)
            return draw(logits, rows, step, active)

        return walk(requests, counts, recording_draw)  # type: ignore[no-any-return]

    def recording_propose(schedule: Schedule) -> DraftTokens:
        drafts = propose(schedule)
        ids, right = drafts.token_ids.tolist(), list[int]()
        ends = pairwise(drafts.cu_num_draft_tokens)
        for place, (item, (start, end)) in enumerate(zip(schedule.decoding, ends, strict=True)):
            request = item.request
            if start < end:
                token_ids = request.tokens_between(0, request.num_tokens)
                passes.append(Pass(token_ids=token_ids, logits=torch.stack(seen[place]), drafted=ids[start:end]))
            said = len(request.output_token_ids)
            known = texts[request.request_id][said : said + end - start]
            cut = next(steps) % (len(known) + 1)
            right += [token if number < cut else (token + 1) % VOCAB_SIZE for number, token in enumerate(known)]
        return replace(drafts, token_ids=torch.tensor(right, dtype=torch.int64))

    monkeypatch.setattr(proposer, "walk", recording_walk)
    monkeypatch.setattr(proposer, "propose", recording_propose)
    requests, metrics = complete(llm, PROMPTS, PARAMS)
    assert [request.output_token_ids for request in requests] == list(texts.values())
    assert any(request.num_preemptions for request in requests)
    per_step = {a for record in metrics.records for a in record.num_accepted_tokens}
    assert {0, 1, 2} <= per_step, "steps must accept none and several"
    return passes, requests
