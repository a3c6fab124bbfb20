"""MTP modules in every published layout: logits of draft steps, drafts through the engine, and lossless text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from proposers.base import ProposerContext
from proposers.heads.mtp import MtpHead, load_mtp_head
from runner.engine.checkpoint import ModelSource
from runner.engine.head_runner import HeadRunner
from runner.engine.request import DraftTokens
from runner.engine.schedule import Schedule
from runner.engine.segment import Segment
from runner.llm import LLM, SamplingParams
from tests.mtp_checkpoints import PUBLISHED, VOCAB_SIZE, Written, write
from tests.transformers_reference import (
    BLOCK_SIZE,
    CPU,
    KeepFloat64,
    assert_rows_are_as_accurate,
    load,
    random_sequences,
)

NUM_STEPS = 4
EVERY_LAYOUT = pytest.mark.parametrize(("layout", "model_type"), PUBLISHED)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints, written once; do not change them."""
    known: dict[tuple[str, str], Written] = {}

    def get(layout: str, model_type: str) -> Written:
        if (layout, model_type) not in known:
            directory = tmp_path_factory.mktemp(f"{layout}-{model_type}")
            known[layout, model_type] = write(directory, layout, model_type)
        return known[layout, model_type]

    return get


def load_head(found: Written) -> MtpHead:
    target = load(ModelSource(model=str(found.directory)))
    source = target.source if found.head is None else ModelSource(model=str(found.head), name="method.model")
    context = ProposerContext(
        vocab_size=VOCAB_SIZE,
        max_model_len=target.max_model_len,
        max_num_seqs=2,
        max_num_batched_tokens=1024,
        eos_token_ids=(),
        block_size=BLOCK_SIZE,
        device=CPU,
        dtype=torch.float32,
        batch_invariant=True,
        needs_draft_probs=False,
        target=target,
    )
    return load_mtp_head(source, context, None)


def draft_logits(head: MtpHead, token_ids: list[int], states: torch.Tensor, drafts: list[int]) -> torch.Tensor:
    """[len(drafts), vocab]: a prompt in two chunks, its end by the decode family, then one row a draft."""
    runner = HeadRunner(head, block_size=BLOCK_SIZE, device=CPU, dtype=torch.float32, batch_invariant=True)
    runner.allocate_cache(8)
    table = [5, 2, 7, 1, 3]
    ids = torch.tensor(token_ids)
    output, end = torch.empty(0), len(token_ids)
    for family, start, stop in (("prefill", 1, 20), ("prefill", 20, end - 2), ("decode", end - 2, end)):
        segment = Segment(start=start - 1, num_tokens=stop - start, block_table=table)
        output = runner.run(family, [segment], ids[start:stop], head.project(states[start - 1 : stop - 1]))
    output, logits = output[-1:], []
    for step, token in enumerate(drafts):
        rows, tile = runner.in_tiles(output)
        logits.append(head.logits(rows, tile)[0])
        segment = Segment(start=end - 1 + step, num_tokens=1, block_table=table)
        output = runner.run("decode", [segment], torch.tensor([token]), output)
    return torch.stack(logits)


@EVERY_LAYOUT
def test_logits_of_draft_steps_are_as_accurate_as_the_layouts_own_forward(
    layout: str, model_type: str, written: Any
) -> None:
    check_logits(written(layout, model_type))


def check_logits(found: Written) -> None:
    token_ids = random_sequences(VOCAB_SIZE, ((40, 0),))[0].prompt
    states = found.reference(torch.float32).states(token_ids)
    with KeepFloat64():
        drafts, exact = found.reference(torch.float64).draft(token_ids, states, NUM_STEPS)
    theirs, logits = found.reference(torch.float32).draft(token_ids, states, NUM_STEPS)
    assert drafts == theirs and len(set(drafts)) > 1, "steps that differ, on tokens that both references choose"
    ours = draft_logits(load_head(found), token_ids, states, drafts)
    assert_rows_are_as_accurate(ours, logits, exact)  # the worst of few rows is a draw (measured: twice theirs, here)
    assert (ours - exact).abs().max() < 1e-4 * exact.abs().max(), "and no step is another's"


@EVERY_LAYOUT
def test_the_engine_drafts_what_the_layouts_own_forward_does_and_says_what_the_target_says_alone(
    layout: str, model_type: str, written: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_drafts(written(layout, model_type), monkeypatch)


def check_drafts(found: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 32}
    prompts = [{"prompt_token_ids": s.prompt} for s in random_sequences(VOCAB_SIZE, ((5, 0), (50, 0), (1, 0)))]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    plain = LLM(str(found.directory), **options).generate(prompts, params)
    method = {"method": "mtp", "num_speculative_tokens": NUM_STEPS}
    if found.head is not None:
        method["model"] = str(found.head)
    llm = LLM(str(found.directory), enforce_eager=True, speculative_config=method, **options)
    seen = record_drafts(llm, monkeypatch)
    speculated = llm.generate(prompts, params)
    assert [out.outputs[0].token_ids for out in speculated] == [out.outputs[0].token_ids for out in plain]

    reference = found.reference(torch.float32)
    drafted = [(text, drafts) for text, drafts in seen if len(text) > 1 and drafts]
    assert len(drafted) > 10
    for text, drafts in drafted:
        expected, _ = reference.draft(list(text), reference.states(list(text)), len(drafts))
        assert drafts == expected, text


@pytest.mark.parametrize("tree", ["dynamic", [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]])
@pytest.mark.parametrize(
    ("layout", "model_type"),
    [("qwen3_next", "qwen3"), ("deepseek", "deepseek_v3"), ("deepseek", "deepseek_v3, run by transformers")],
)
def test_trees_of_a_module_change_no_token(layout: str, model_type: str, tree: Any, written: Any) -> None:
    found = written(layout, model_type)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 32}
    prompts = [{"prompt_token_ids": s.prompt} for s in random_sequences(VOCAB_SIZE, ((5, 0), (50, 0), (1, 0)))]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    plain = LLM(str(found.directory), **options).generate(prompts, params)
    method = {"method": "mtp", "num_speculative_tokens": 6, "speculative_token_tree": tree}
    method |= {"tree_depth": 3} if tree == "dynamic" else {}
    speculated = LLM(str(found.directory), speculative_config=method, **options).generate(prompts, params)
    assert [out.outputs[0].token_ids for out in speculated] == [out.outputs[0].token_ids for out in plain]


def record_drafts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], list[int]]]:
    """What will be proposed, (text, drafts) a request and step."""
    seen: list[tuple[tuple[int, ...], list[int]]] = []
    propose = llm.engine.proposer.propose

    def recording(schedule: Schedule) -> DraftTokens:
        drafts = propose(schedule)
        ids, bounds = drafts.token_ids.tolist(), drafts.cu_num_draft_tokens
        for index, item in enumerate(schedule.decoding):
            text = item.request.tokens_between(0, item.request.num_tokens)
            seen.append((tuple(text), ids[bounds[index] : bounds[index + 1]]))
        return drafts

    monkeypatch.setattr(llm.engine.proposer, "propose", recording)
    return seen
