"""Gemma 4's published drafter, over what its target has cached: logits of draft steps, drafts, and lossless text."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.reference.cluster_logits import OUTSIDE
from proposers.base import ProposerContext
from proposers.heads.mtp_assistant import MtpAssistantHead, load_mtp_assistant
from runner.engine import weight_filling
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.head_checkpoint import read_head_config
from runner.engine.head_runner import HeadRunner
from runner.engine.launch import Part
from runner.engine.loader import LoadedModel
from runner.engine.model_runner import ModelRunner
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams as EngineParams
from runner.engine.segment import Segment
from runner.llm import LLM, SamplingParams
from tests.assistant_checkpoints import CLUSTERS, TARGETS, VOCAB_SIZE, Step, Written, write
from tests.conftest import complete
from tests.emulated_device import EmulatedDevice
from tests.quantized_checkpoints import LAYOUTS as QUANTIZED
from tests.quantized_checkpoints import holds_8_bits, quantize_checkpoint
from tests.test_mtp import record_drafts
from tests.test_whole_steps import GREEDY, Traffic, assert_same_steps, play
from tests.transformers_reference import (
    BLOCK_SIZE,
    CPU,
    KeepFloat64,
    assert_rows_are_as_accurate,
    load,
    random_model,
    random_sequences,
    save,
)

HEADS: dict[str, dict[str, Any]] = {"all tokens": {}, "clusters": CLUSTERS}
EVERY_PAIR = pytest.mark.parametrize(("kind", "head"), [(kind, head) for kind in TARGETS for head in HEADS])
SAMPLED = EngineParams(temperature=0.2, seed=5)
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 32}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints, written once; do not change them."""
    known: dict[tuple[str, str], Written] = {}

    def get(kind: str, head: str) -> Written:
        if (kind, head) not in known:
            known[kind, head] = write(tmp_path_factory.mktemp("pair"), kind, HEADS[head])
        return known[kind, head]

    return get


def context_of(target: LoadedModel) -> ProposerContext:
    return ProposerContext(
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


def load_assistant(target: LoadedModel, directory: Path) -> MtpAssistantHead:
    source = ModelSource(model=str(directory), name="method.model")
    return load_mtp_assistant(source, read_head_config(source), context_of(target), None)


def draft_steps(found: Written, token_ids: list[int], steps: list[Step]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [len(steps), vocab] and states [len(steps), 64], over what the target has cached: all but the last token.

    Each step begins from the same token and state.
    """
    loaded = load(ModelSource(model=str(found.target)))
    common: dict[str, Any] = {"block_size": BLOCK_SIZE, "device": CPU, "dtype": torch.float32, "batch_invariant": True}
    target = ModelRunner(loaded.model, **common)
    target.allocate_cache(8)
    table, end = [5, 2, 7, 1, 3], len(token_ids) - 1
    request = Request(
        request_id="0",
        prompt_token_ids=token_ids,
        sampling_params=EngineParams(temperature=0.0),
        seed=0,
        block_table=table,
    )
    target.run([Part(request=request, start=0, end=end, num_logits=1)])
    runner = HeadRunner(head := load_assistant(loaded, found.assistant), **common)
    assert not runner.has_own_keys and runner.cache_bytes_per_block == 0 and target.cache is not None
    runner.read_cache(target.cache)
    before = [layer.clone() for layer in target.cache.layers]
    segments = [Segment(start=end - 1, num_tokens=1, block_table=table) for _ in steps]
    ids = torch.tensor([step.token for step in steps])
    output = runner.run("decode", segments, ids, torch.stack([step.state for step in steps]))
    assert all(map(torch.equal, before, target.cache.layers)), "what the target has cached is its own"
    rows, tile = runner.in_tiles(output)
    return head.logits(rows, tile)[: len(steps)], output[:, : head.state_size]


@holds_8_bits
def test_a_drafter_in_fp8_is_held_so(written: Any, tmp_path: Path) -> None:
    """But for its projection to the vocabulary, of which one of clusters is looked up in."""
    found = written("shared", "clusters")
    packed = Path(shutil.copytree(found.assistant, tmp_path / "packed"))
    expected = quantize_checkpoint(packed, QUANTIZED["float-quantized, outputs"], r"(_proj|_projection|embed_tokens)$")
    targets = load_assistant(load(ModelSource(model=str(found.target))), packed).weight_targets()
    held = {name: own.quantized.dense() for name, own in targets.items() if own.quantized is not None}
    assert {"pre_projection.weight", "post_projection.weight", "model.layers.0.mlp.down_proj.weight"} <= held.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in held.items())
    assert not {"model.embed_tokens.weight", "lm_head.weight"} & held.keys()


@EVERY_PAIR
def test_draft_steps_are_as_accurate_as_transformers(kind: str, head: str, written: Any) -> None:
    """Behind texts shorter and longer than the window; logits, and the states that go into the next steps."""
    found = written(kind, head)
    results: tuple[list[torch.Tensor], ...] = ([], [], [])  # ours, transformers', exact ones
    states: tuple[list[torch.Tensor], ...] = ([], [], [])
    for length in (2, 5, 8, 9, 10, 40, 60):
        token_ids = random_sequences(VOCAB_SIZE, ((length, 0),))[0].prompt
        theirs = found.in_float32.draft(token_ids, 4)
        with KeepFloat64():
            exact = found.in_float64.again(token_ids, theirs)
        ours, our_states = draft_steps(found, token_ids, theirs)
        logits = [ours, *(torch.stack([step.logits for step in steps]) for steps in (theirs, exact))]
        if HEADS[head]:
            is_chosen = logits[1] > logits[1].amin(dim=1, keepdim=True)
            assert torch.equal(ours > OUTSIDE, is_chosen) and is_chosen.sum() == len(theirs) * VOCAB_SIZE // 4
            logits = [own[is_chosen].view(len(theirs), -1) for own in logits]
        of_steps = [our_states, *(torch.stack([step.next_state for step in steps]) for steps in (theirs, exact))]
        for kept, found_now in zip((*results, *states), (*logits, *of_steps), strict=True):
            kept.append(found_now)
    assert_rows_are_as_accurate(*map(torch.cat, results))
    assert_rows_are_as_accurate(*map(torch.cat, states))


@EVERY_PAIR
def test_the_engine_drafts_what_transformers_does_and_says_what_the_target_says_alone(
    kind: str, head: str, written: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = written(kind, head)
    prompts = [{"prompt_token_ids": s.prompt} for s in random_sequences(VOCAB_SIZE, ((5, 0), (50, 0), (1, 0)))]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    plain = LLM(str(found.target), **OPTIONS).generate(prompts, params)
    method = {"method": "mtp", "model": str(found.assistant), "num_speculative_tokens": 4}
    llm = LLM(str(found.target), enforce_eager=True, speculative_config=method, **OPTIONS)
    seen = record_drafts(llm, monkeypatch)
    speculated = llm.generate(prompts, params)
    assert [out.outputs[0].token_ids for out in speculated] == [out.outputs[0].token_ids for out in plain]
    drafted = [(text, drafts) for text, drafts in seen if drafts]
    assert len(drafted) > 10
    for text, drafts in drafted:
        steps = found.in_float32.draft(list(text), len(drafts))
        assert drafts == [int(step.logits.argmax()) for step in steps], text


TREES: dict[str, dict[str, Any]] = {
    "dynamic": {"speculative_token_tree": "dynamic", "tree_depth": 3, "tree_top_k": 3, "num_speculative_tokens": 7},
    "static": {"speculative_token_tree": [[0], [1], [0, 0], [0, 1], [0, 0, 0]], "num_speculative_tokens": 5},
}


def method_of(found: Written, **keys: Any) -> dict[str, Any]:
    return {"method": "mtp", "model": str(found.assistant), **keys}


@pytest.mark.parametrize("rule", ["strict", "probabilistic"])
@pytest.mark.parametrize(
    ("kind", "head", "drafts"),
    [
        *((kind, head, 4) for kind in TARGETS for head in HEADS),
        *(("shared", "clusters", drafts) for drafts in (1, 2, 3, *TREES, "hybrid")),
    ],
)
def test_every_whole_step_drafts_and_accepts_what_it_does_in_parts(
    kind: str, head: str, drafts: Any, rule: str, written: Any
) -> None:
    draws = rule == "probabilistic" and drafts not in (*TREES, "hybrid")  # trees with probs are no whole steps
    method = method_of(
        written(kind, head),
        rejection_sample_method=rule,
        draft_sample_method="probabilistic" if draws else "greedy",
        **TREES.get(drafts, {"num_speculative_tokens": drafts}),
    )
    if drafts == "hybrid":
        method |= {"method": "hybrid", "drafter": "mtp", "num_speculative_tokens": 4}
    llm = LLM(str(written(kind, head).target), speculative_config=method, **OPTIONS)
    lengths = (60, 41, 1, 2, 1, 5, 2, 3)
    params = tuple(replace(GREEDY if length % 2 else SAMPLED, max_tokens=length) for length in lengths)
    arrivals = tuple((4 * index, 3 + index) for index in range(len(lengths)))
    traffic = Traffic(arrivals=arrivals, params=params, cancelled={}, max_num_seqs=3)
    _, in_parts, _ = play(llm, traffic, whole=False)
    _, whole, num_launched = play(llm, traffic, whole=True)
    assert num_launched > 10
    assert_same_steps(whole, in_parts)
    accepted = {count for record in whole for count in record.num_accepted_tokens}
    assert 0 in accepted and max(accepted) > 0


@pytest.mark.parametrize(
    ("drafts", "length", "num_blocks"),
    [({"num_speculative_tokens": 2}, 34, None), (TREES["dynamic"], 9, 64)],
    ids=["chain", "tree"],
)
def test_captured_steps_of_a_gpu_say_what_the_cpu_says(
    drafts: dict[str, Any],
    length: int,  # of a prompt; the longer one is computed in chunks, of which the first yields nothing
    num_blocks: int | None,  # None: as many as the largest steps leave room for, which are run to see
    written: Any,
    emulated_gpu: EmulatedDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It adds weights up, which a GPU does in no certain order.
    monkeypatch.setattr(weight_filling, "require_finite", lambda *_: None)
    found = written("shared", "clusters")
    prompts = [{"prompt_token_ids": s.prompt} for s in random_sequences(VOCAB_SIZE, ((5, 0), (length, 0)))]
    params = [replace(GREEDY, max_tokens=9), replace(SAMPLED, max_tokens=7)]
    options = {**OPTIONS, "batch_invariant": False, "max_num_seqs": 2, "num_gpu_blocks_override": num_blocks}
    options["speculative_config"] = method_of(found, **drafts)
    (expected, on_cpu), (requests, on_gpu) = (
        complete(LLM(str(found.target), **{**options, "device": device}), prompts, params) for device in ("cpu", "cuda")
    )
    assert [request.output_token_ids for request in requests] == [request.output_token_ids for request in expected]
    for count in ("num_draft_tokens", "num_accepted_tokens"):
        assert [getattr(r, count) for r in on_gpu.records] == [getattr(r, count) for r in on_cpu.records]
    assert emulated_gpu.graph_sizes and emulated_gpu.num_replays > 0


@pytest.mark.parametrize(
    ("keys", "options"),
    [({"quantization": "int8"}, {}), ({}, {"kv_cache_dtype": "fp8"})],
    ids=["a drafter", "the target's keys and values, which it reads,"],
)
def test_in_8_bits_no_token_changes(written: Any, keys: dict[str, Any], options: dict[str, Any]) -> None:
    prompts = [{"prompt_token_ids": s.prompt} for s in random_sequences(VOCAB_SIZE, ((5, 0), (30, 0)))]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for head in HEADS:
        found = written("not shared", head)
        method = method_of(found, num_speculative_tokens=3, **keys)
        plain, speculated = (
            LLM(str(found.target), speculative_config=own, **OPTIONS, **options).generate(prompts, params)
            for own in (None, method)
        )
        assert [out.outputs[0].token_ids for out in speculated] == [out.outputs[0].token_ids for out in plain]


def test_random_weights_stand_in_for_a_drafter_that_is_not_there(written: Any) -> None:
    """As models that are measured before a download have them."""
    target = load(ModelSource(model=str(written("shared", "clusters").target)))
    values = json.loads((written("shared", "clusters").assistant / "config.json").read_text())
    source = ModelSource(model="google/drafter", name="method.model", load_format="dummy", hf_config=values)
    head = load_mtp_assistant(source, read_head_config(source), context_of(target), None)
    assert head.logits(torch.zeros(1, 96), 1).isfinite().all()


def test_a_projection_of_its_own_is_read_where_it_is_no_copy_of_the_embedding(written: Any, tmp_path: Path) -> None:
    target = load(ModelSource(model=str(written("shared", "all tokens").target)))
    directory = changed(written("shared", "all tokens").assistant, tmp_path)
    tensors = load_file(directory / "model.safetensors")
    own = torch.randn(VOCAB_SIZE, 32)
    save_file({**tensors, "lm_head.weight": own}, directory / "model.safetensors")
    head = load_assistant(target, directory)
    assert isinstance(head.lm_head, torch.Tensor) and torch.equal(head.lm_head, own)


def changed(assistant: Path, tmp_path: Path, config: Any = None, tensors: Any = None) -> Path:
    """A copy of the drafter. config, tensors: functions that change what is read of them."""
    directory = tmp_path / "changed"
    directory.mkdir()
    values = json.loads((assistant / "config.json").read_text())
    held = load_file(assistant / "model.safetensors")
    for change, own in ((config, values), (tensors, held)):
        if change is not None:
            change(own)
    (directory / "config.json").write_text(json.dumps(values))
    save_file(held, directory / "model.safetensors")
    return directory


ORDER = "masked_embedding.token_ordering"
Q_PROJ = "model.layers.3.self_attn.q_proj.weight"
EXPERTS = {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 8}
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "a tensor too few": (None, lambda t: t.pop(Q_PROJ), f"missing: {Q_PROJ}; download it again"),
    "a tensor too many": (None, lambda t: t.update(more=torch.ones(1)), "unexpected: more; download it again"),
    "a tensor of another shape": (
        None,
        lambda t: t.update({Q_PROJ: torch.ones(64, 32)}),
        r"of another shape: .*q_proj.weight \[64, 32\] for \[128, 32\]",
    ),
    "a token twice": (None, lambda t: t[ORDER].__setitem__(5, t[ORDER][6]), r"once, got 95 different ids from 0 to 95"),
    "another hidden size": (lambda c: c.update(backbone_hidden_size=80), None, "got hidden_size 80 for 64; choose"),
    "another vocabulary": (
        lambda c: c["text_config"].update(vocab_size=108),
        None,
        "got vocabulary 108 for 96; choose",
    ),
    "heads of another size": (
        lambda c: c["text_config"].update(head_dim=8),
        None,
        r"got in layers of type sliding_attention 2 heads of 16 elements for 2 of 8; choose the drafter of this target",
    ),
    "other rotations": (
        lambda c: c["text_config"]["rope_parameters"]["full_attention"].update(rope_theta=10000.0),
        None,
        "got in layers of type full_attention other rope_parameters; choose",
    ),
    "clusters that do not add up": (lambda c: c.update(num_centroids=10), None, "vocabulary of 96 .* got 10; mend it"),
    "experts": (lambda c: c["text_config"].update(EXPERTS), None, "cannot be read as a gemma4_assistant config"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_one_message(case: str, written: Any, tmp_path: Path) -> None:
    config, tensors, message = REFUSED[case]
    found = written("shared", "clusters")
    with pytest.raises(UserError, match=message):
        load_assistant(load(ModelSource(model=str(found.target))), changed(found.assistant, tmp_path, config, tensors))


def test_a_target_of_another_family_is_refused(written: Any, tmp_path: Path) -> None:
    from transformers import Qwen3Config

    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
        "head_dim": 16,
    }
    model = random_model(Qwen3Config(**shape, num_attention_heads=2, num_key_value_heads=1))
    with pytest.raises(UserError, match=r"sees keys and values of a Gemma 4 target .* model_type 'qwen3'; choose such"):
        load_assistant(load(save(model, tmp_path / "qwen3")), written("shared", "clusters").assistant)
