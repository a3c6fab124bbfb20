"""EAGLE and EAGLE-3 heads: what each published layout means, against a rewrite in float64, through the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from proposers.contexts.head_keys import MAX_STEPS_BEHIND
from proposers.heads.eagle_layer import eagle_architecture, with_biases_of
from runner.engine import backend
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.head_runner import HeadRunner
from runner.engine.hidden_states import NORMED
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.engine.segment import Segment
from runner.llm import LLM
from tests.conftest import complete
from tests.eagle_reference import (
    Gemma4ReferenceHead,
    ReferenceHead,
    layer_shapes,
    random_weights,
    save_head,
    vocabulary_map,
)
from tests.gemma4_head_reference import EAGLE3, eagle3_shapes, save_target
from tests.transformers_reference import (
    KeepFloat64,
    assert_as_accurate,
    in_float64,
    random_model,
    save,
    save_tokenizer,
)

VOCAB_SIZE, SIZE, NUM_LAYERS, DRAFT_VOCAB_SIZE = 16, 32, 7, 11
LAYER: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 96,
}
SPECULATORS = {
    "speculators_model_type": "eagle3",
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": VOCAB_SIZE,
}
METHOD_KEYS = ("aux_hidden_state_layer_ids", "disable_by_batch_size", "max_model_len", "speculative_token_tree")
PROMPTS = [{"prompt_token_ids": [(5 * i + 3 * b * b) % VOCAB_SIZE for i in range(3 + 9 * b)]} for b in range(4)]
PARAMS = [
    SamplingParams(temperature=0.9 * (b % 2), seed=b, max_tokens=max_tokens, ignore_eos=True)
    for b, max_tokens in enumerate((24, 26, 30, 50))
]
SCHEDULES: dict[str, dict[str, Any]] = {
    "room for everything": {},
    "no drafts at first": {"disable_by_batch_size": 2},
    "chunks, few blocks": {"num_gpu_blocks_override": 6, "max_num_seqs": 3, "max_num_batched_tokens": 15},
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A published way to write a head down."""

    method: str
    config: dict[str, Any]  # what config.json holds
    shapes: dict[str, tuple[int, ...]]
    layer: dict[str, Any]  # the layers' part of the config
    options: dict[str, Any] | None = None  # of EAGLE-3
    taps: tuple[int, ...] = ()
    is_pickled: bool = False
    draft_vocab_size: int = VOCAB_SIZE
    target: str = "target"  # the fixture
    reference: type[ReferenceHead] = ReferenceHead


def _eagle(layer: dict[str, Any], *, is_wrapped: bool, own: Sequence[str], **keys: Any) -> Layout:
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (SIZE, 2 * SIZE)}
    if keys.get("bias", not is_wrapped):
        shapes["fc.bias"] = (SIZE,)
    for index in range(layer["num_hidden_layers"]):
        shapes |= layer_shapes(layer, prefix=f"layers.{index}.", is_first_of="eagle" if index == 0 else None)
    shapes |= {f"{name}.weight": (VOCAB_SIZE, SIZE) for name in own}
    config = {"model_type": "eagle", "model": layer} if is_wrapped else {**layer, **keys}
    return Layout(method="eagle", config=config, shapes=shapes, layer=layer, is_pickled=not is_wrapped)


def _eagle3(
    layer: dict[str, Any],
    config: dict[str, Any],
    *,
    taps: tuple[int, ...],
    first: str = "layers.0.",
    own: Sequence[str] = ("lm_head",),
    prefix: str = "",  # of all tensors
    is_pickled: bool = False,
) -> Layout:
    size, draft_vocab_size = layer["hidden_size"], config.get("draft_vocab_size", VOCAB_SIZE)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, len(taps) * SIZE), "norm.weight": (size,)}
    shapes |= layer_shapes(layer, prefix=first, is_first_of="eagle3")
    for index in range(1, layer["num_hidden_layers"]):
        shapes |= layer_shapes(layer, prefix=f"layers.{index}.")
    rows = {"embed_tokens": VOCAB_SIZE, "lm_head": draft_vocab_size}
    shapes |= {f"{name}.weight": (rows[name], size) for name in own}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (len(taps) * SIZE,)
    if "mask_token_id" in config:
        shapes["mask_hidden"] = (1, 1, len(taps) * SIZE)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{index}.weight": (SIZE,) for index in range(len(taps))}
    return Layout(
        method="eagle3",
        config=config,
        shapes={prefix + name: shape for name, shape in shapes.items()},
        layer=layer,
        options=config,
        taps=taps,
        is_pickled=is_pickled,
        draft_vocab_size=draft_vocab_size,
    )


SAFE3 = "EAGLE-3 of SafeAILab"
QWEN3_OF_DEEPSPEC, GEMMA4_OF_DEEPSPEC = "EAGLE-3 of DeepSpec, Qwen3", "EAGLE-3 of DeepSpec, Gemma 4"
NARROW = {**LAYER, "hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "attention_bias": True}
QWEN3 = {**LAYER, "model_type": "qwen3", "num_hidden_layers": 2}
OF_DEEPSPEC = {**LAYER, "model_type": "qwen3", "sliding_window": None, "use_sliding_window": False}
# A Llama layer under the name of the target's family, as SafeAILab and SpecForge publish them.
OF_MIXTRAL = {**LAYER, "model_type": "mixtral", "architectures": ["LlamaForCausalLM"], "qkv_bias": True, "bias": True}
OF_QWEN2 = {**LAYER, "model_type": "qwen2", "architectures": ["LlamaForCausalLMEagle3"]}
LAYOUTS = {
    "EAGLE of SafeAILab": _eagle(OF_MIXTRAL, is_wrapped=False, own=["embed_tokens"]),
    "EAGLE of vLLM, two layers": _eagle(
        {**LAYER, "model_type": "eagle", "num_hidden_layers": 2}, is_wrapped=True, own=[]),
    SAFE3: _eagle3(
        OF_QWEN2, {**OF_QWEN2, "draft_vocab_size": DRAFT_VOCAB_SIZE}, taps=(2, 3, 4), first="midlayer.", is_pickled=True
    ),
    "EAGLE-3 of SpecForge, of another width, as NeMo names its tensors": _eagle3(
        NARROW,
        {
            **NARROW,
            "target_hidden_size": SIZE,
            "draft_vocab_size": DRAFT_VOCAB_SIZE,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]},
        },
        taps=(1, 4, 6),
        first="midlayer.",
        prefix="model.",
        own=["embed_tokens", "lm_head"],
    ),
    "speculators, norm_before_residual, norm_before_fc": _eagle3(
        LAYER,
        {
            **SPECULATORS,
            "draft_vocab_size": DRAFT_VOCAB_SIZE,
            "transformer_layer_config": LAYER,
            "norm_before_residual": True,
            "norm_before_fc": True,
        },
        taps=(2, 3, 4),
    ),
    "EAGLE-3.1 of speculators, Qwen3, two layers, the target's embedding and head": _eagle3(
        QWEN3,
        {
            **SPECULATORS,
            "transformer_layer_config": QWEN3,
            "fc_norm": True,
            "norm_output": True,
            "eagle_aux_hidden_state_layer_ids": [0, 2, 6],
        },
        taps=(0, 2, 6),
        own=[],
    ),
    "P-EAGLE of speculators": _eagle3(
        LAYER,
        {
            **SPECULATORS,
            "speculators_model_type": "peagle",
            "architectures": ["PEagleSpeculator"],
            "draft_vocab_size": DRAFT_VOCAB_SIZE,
            "mask_token_id": 9,
            "transformer_layer_config": LAYER,
            "norm_before_residual": True,
        },
        taps=(2, 3, 4),
        own=["embed_tokens", "lm_head"],
    ),
    "speculators, a sliding window": _eagle3(
        {**LAYER, "window": 5},
        {
            **SPECULATORS,
            "transformer_layer_config": {**LAYER, "layer_types": ["sliding_attention"], "sliding_window": 5},
        },
        taps=(2, 3, 4),
    ),
    QWEN3_OF_DEEPSPEC: _eagle3(
        OF_DEEPSPEC,
        {
            **OF_DEEPSPEC,
            "architectures": ["Qwen3Eagle3Model"],
            "layer_types": ["full_attention"],
            "num_target_layers": NUM_LAYERS,
            "target_layer_ids": [0, 1, 3, 4, 5],
            "ttt_length": 7,
            "step_loss_decay": 0.8,
            "draft_num_hidden_layers": 1,
            "tie_word_embeddings": False,
        },
        taps=(1, 2, 4, 5, 6),
        own=["embed_tokens", "lm_head"],
    ),
    GEMMA4_OF_DEEPSPEC: Layout(
        method="eagle3",
        config={**EAGLE3, "vocab_size": VOCAB_SIZE},
        shapes=eagle3_shapes(VOCAB_SIZE),
        layer=EAGLE3,
        options={},
        taps=(1, 2, 3),
        target="gemma4",
        reference=Gemma4ReferenceHead,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("gemma4")
    return directory, save_target(directory, VOCAB_SIZE)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    config = {**LAYER, "num_hidden_layers": NUM_LAYERS, "eos_token_id": 2, "tie_word_embeddings": False}
    model = random_model(LlamaConfig(**config))
    directory = tmp_path_factory.mktemp("target")
    save(model, directory)
    save_tokenizer(directory, VOCAB_SIZE)
    return directory, model


def make_head(layout: Layout, model: Any, directory: Path) -> ReferenceHead:
    """Write a random head down in a layout; what it is by the reference."""
    tensors = random_weights(layout.shapes)
    if layout.draft_vocab_size != VOCAB_SIZE:
        tensors |= vocabulary_map(VOCAB_SIZE, layout.draft_vocab_size)
    save_head(directory, layout.config, tensors, is_pickled=layout.is_pickled)
    return layout.reference(
        config=layout.layer,
        weights={
            name.removeprefix("model.").replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()
        },
        options=layout.options,
        target_embedding=model.get_input_embeddings().weight.detach(),
        target_lm_head=model.lm_head.weight.detach(),
    )


def engine(target: Path, head: Path, method: str, num_speculative_tokens: int = 4, **keys: Any) -> LLM:
    options = {key: keys.pop(key) for key in list(keys) if key in METHOD_KEYS}
    config = {"method": method, "model": str(head), "num_speculative_tokens": num_speculative_tokens, **options}
    return LLM(str(target), speculative_config=config, device="cpu", dtype="float32", **keys)


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """One request in one step: what was known, the logits of every draft, the drafts."""

    request: Request
    token_ids: list[int]
    logits: torch.Tensor  # [num_drafts, vocab]
    draft_token_ids: list[int]


def record(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[list[Drafted], list[Request]]]:
    """Runs PROMPTS with the proposer's logits and drafts written down."""
    proposer: Any = llm.engine.proposer
    drafted: list[Drafted] = []
    rows: dict[str, list[torch.Tensor]] = {}
    first_logits, next_logits, propose = proposer.first_logits, proposer.next_logits, proposer.propose

    def keep(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        for request, row in zip(requests, logits, strict=True):
            rows.setdefault(request.request_id, []).append(row.clone())
        return logits

    def propose_and_keep(schedule: Any) -> Any:
        rows.clear()
        drafts = propose(schedule)
        for item, ids in zip(schedule.decoding, drafts.token_ids.split(drafts.num_draft_tokens), strict=True):
            if len(ids):
                request = item.request
                token_ids = request.tokens_between(0, request.num_tokens)
                logits = torch.stack(rows[request.request_id])
                drafted.append(
                    Drafted(request=request, token_ids=token_ids, logits=logits, draft_token_ids=ids.tolist())
                )
        return drafts

    monkeypatch.setattr(proposer, "first_logits", lambda requests: keep(first_logits(requests), requests))
    monkeypatch.setattr(proposer, "next_logits", lambda requests, *args: keep(next_logits(requests, *args), requests))
    monkeypatch.setattr(proposer, "propose", propose_and_keep)

    def run() -> tuple[list[Drafted], list[Request]]:
        requests, _ = complete(llm, PROMPTS, PARAMS)
        return drafted, requests

    return run


@torch.inference_mode()
def target_states(model: Any, token_ids: list[int], layout: Layout) -> torch.Tensor:
    output = model.base_model(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False)
    if layout.method == "eagle":
        return output.last_hidden_state[0]
    return torch.cat([output.hidden_states[tap][0] for tap in layout.taps], dim=-1)


ROOMY, *CRAMPED = SCHEDULES
CASES = [
    *((name, ROOMY) for name in LAYOUTS),
    *((name, schedule) for name in ("EAGLE of SafeAILab", SAFE3, "P-EAGLE of speculators") for schedule in CRAMPED),
]


@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_every_draft_is_the_one_of_a_whole_recompute_in_float64(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, schedule: str
) -> None:
    """First and following steps: after accepted and rejected drafts, chunks, preemption, and a time without drafts."""
    layout = LAYOUTS[name]
    directory, model = request.getfixturevalue(layout.target)
    head = make_head(layout, model, tmp_path / "head")
    llm = engine(directory, tmp_path / "head", layout.method, enforce_eager=True, **SCHEDULES[schedule])
    drafted, requests = record(llm, monkeypatch)()
    check_drafts(layout, model, head, drafted, requests)
    if schedule == "no drafts at first":
        last = [len(step.token_ids) for step in drafted if step.request is requests[-1]]
        assert min(last) > requests[-1].num_prompt_tokens + MAX_STEPS_BEHIND + 1
    assert any(request.num_preemptions for request in requests) == ("few blocks" in schedule)


def check_drafts(
    layout: Layout, model: Any, head: ReferenceHead, drafted: Sequence[Drafted], requests: Sequence[Request]
) -> None:
    exact_model = in_float64(model)
    rows: dict[str, list[torch.Tensor]] = {"ours": [], "theirs": [], "exact": []}
    kept = {request.request_id: request.tokens_between(0, request.num_tokens) for request in requests}
    states = {}
    for request_id, token_ids in kept.items():
        with KeepFloat64():
            states[request_id, "exact"] = target_states(exact_model, token_ids, layout)
        states[request_id, "theirs"] = target_states(model, token_ids, layout)
    num_accepted = set()
    for index, step in enumerate(drafted):
        known, request_id = len(step.token_ids), step.request.request_id
        followed = [a == b for a, b in zip(step.draft_token_ids, kept[request_id][known:], strict=False)]
        num_accepted.add(([*followed, False]).index(False))
        if index % 3:  # a whole recompute takes its time
            continue
        rows["ours"].append(step.logits)
        for which, dtype in (("theirs", torch.float32), ("exact", torch.float64)):
            logits = head.to(dtype).draft_logits(
                step.token_ids, states[request_id, which][: known - 1], step.draft_token_ids[:-1]
            )
            rows[which].append(torch.stack(logits))
        if step.request.sampling_params.is_greedy:
            assert step.draft_token_ids == rows["exact"][-1].argmax(-1).tolist()
    assert len(num_accepted) > 1 and max(num_accepted) > 0, "drafts of every fate"
    ours, theirs, exact = (torch.cat(rows[which]) for which in ("ours", "theirs", "exact"))
    known_tokens = exact.isfinite()
    assert (ours[~known_tokens] < ours[known_tokens].min() - 500).all()
    assert_as_accurate(ours[known_tokens], theirs[known_tokens], exact[known_tokens])


NORMS_FIRST, NORMS_OUTPUT = (name for name in LAYOUTS if "norm_before_residual," in name or "EAGLE-3.1" in name)


@pytest.mark.parametrize("name", [SAFE3, NORMS_FIRST, NORMS_OUTPUT])
@pytest.mark.usefixtures("unpacked_weights")
def test_what_is_fed_back_gives_the_logits_by_kernels_that_it_gives_by_torch(
    target: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_device: torch.device, name: str
) -> None:
    """Two rows over states of the target, then one over the output of the last."""
    pytest.importorskip("triton")
    if kernel_device.type != "cpu":
        pytest.skip("kernels are compiled here")
    layout, (directory, model) = LAYOUTS[name], target
    make_head(layout, model, tmp_path / "head")
    proposer: Any = engine(directory, tmp_path / "head", layout.method).engine.proposer
    states = torch.randn(2, len(layout.taps) * SIZE, generator=torch.Generator().manual_seed(0))

    def logits() -> torch.Tensor:
        runner = HeadRunner(
            proposer.head, block_size=16, device=kernel_device, dtype=torch.float32, batch_invariant=False
        )
        runner.allocate_cache(2)
        segments = [Segment(start=start, num_tokens=num_rows, block_table=[1]) for start, num_rows in ((0, 2), (2, 1))]
        output = runner.run("decode", segments[:1], torch.tensor([3, 7]), proposer.head.project(states))
        output = runner.run("decode", segments[1:], torch.tensor([5]), output[-1:])
        rows, tile = runner.in_tiles(output)
        return proposer.head.logits(rows, tile)[:1]

    expected = logits()
    monkeypatch.setattr(backend, "interprets_kernels", True)
    torch.testing.assert_close(logits(), expected)


@pytest.mark.parametrize(
    ("keys", "named", "expected"),
    [
        ({}, {}, (2, 3, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, {}, (2, 4, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, {}, (2, 3, 4)),
        ({"eagle_config": {"layer_ids": [1, 3, 4]}}, {}, (1, 3, 4)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, {}, (1, 3, 4)),
        ({"aux_hidden_state_layer_ids": [0, 3, 7]}, {}, (0, 3, 7)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, {"aux_hidden_state_layer_ids": [5, 6, 7]}, (5, 6, 7)),
    ],
)
def test_ids_of_hidden_states_mean_what_their_key_means(
    target: tuple[Path, Any], tmp_path: Path, keys: dict[str, Any], named: dict[str, Any], expected: tuple[int, ...]
) -> None:
    """eagle_config's ids of hidden states number layers from 0: i is hidden state i + 1. The others are as they are."""
    layout = LAYOUTS[SAFE3]
    make_head(replace(layout, config=layout.config | keys), target[1], tmp_path)
    assert engine(target[0], tmp_path, "eagle3", **named).engine.proposer.tap_layers == expected


def test_a_head_that_reads_the_last_state_alone_has_no_fc(target: tuple[Path, Any], tmp_path: Path) -> None:
    layout = LAYOUTS[SAFE3]
    shapes = {name: shape for name, shape in layout.shapes.items() if name != "fc.weight"}
    config = layout.config | {"eagle_config": {"use_aux_hidden_state": False}}
    make_head(replace(layout, config=config, shapes=shapes), target[1], tmp_path)
    llm = engine(target[0], tmp_path, "eagle3")
    assert llm.engine.proposer.tap_layers == (NORMED,)
    _, metrics = complete(llm, PROMPTS, PARAMS)
    assert sum(point.num_draft_tokens for point in metrics.step_points) > 0


def test_a_head_follows_a_text_as_far_as_its_target_goes_unless_it_is_stopped(
    target: tuple[Path, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Published heads state 2048 positions for targets of 131072: they drafted nothing behind that, without a word."""
    layout = LAYOUTS["EAGLE of SafeAILab"]
    make_head(replace(layout, config=layout.config | {"max_position_embeddings": 20}), target[1], tmp_path)
    with caplog.at_level(logging.WARNING):
        assert engine(target[0], tmp_path, "eagle").engine.proposer.head.max_model_len == 96
    (note,) = [record.getMessage() for record in caplog.records]
    assert "has max_position_embeddings=20 and follows texts of up to 96 tokens" in note
    assert note.endswith("method.max_model_len=20 has it stop there")
    plain, _ = complete(LLM(str(target[0]), device="cpu", dtype="float32"), PROMPTS, PARAMS)
    requests, metrics = complete(engine(target[0], tmp_path, "eagle", max_model_len=30), PROMPTS, PARAMS)
    assert [r.output_token_ids for r in requests] == [r.output_token_ids for r in plain]
    reached = 0
    for told in metrics.records:
        for step, count in enumerate(told.num_draft_tokens):
            if count > 0:
                reached = max(reached, len(told.prompt_token_ids) + sum(told.tokens_per_step[:step]) + count)
    assert reached == 30, "behind the 20 that it states"


@pytest.mark.parametrize(
    ("keys", "tensors", "expected"),
    [
        ({"model_type": "phi3", "architectures": ["LlamaForCausalLMEagle3"]}, (), ("llama", False)),
        ({"model_type": "qwen2", "architectures": ["LlamaForCausalLM"]}, (), ("llama", False)),
        ({"model_type": "mixtral", "qkv_bias": True}, (), ("llama", True)),
        ({"model_type": "gemma4_text", "architectures": ["LlamaForCausalLMEagle3"]}, (), ("llama", False)),
        ({"model_type": "qwen2"}, (), ("qwen2", True)),
        ({"model_type": "qwen2"}, ("layers.0.self_attn.q_proj.weight",), ("qwen2", False)),
        ({"model_type": "mistral"}, ("layers.0.self_attn.v_proj.bias",), ("mistral", True)),
    ],
)
def test_a_layer_is_llamas_under_other_names_and_its_tensors_tell_its_biases(
    keys: dict[str, Any], tensors: Sequence[str], expected: tuple[str, bool]
) -> None:
    arch, _ = eagle_architecture({**LAYER, **keys}, ModelSource(model="a-head"))
    arch = with_biases_of(arch, {name: torch.ones(1) for name in tensors}) if tensors else arch
    assert (arch.family, arch.qkv_bias) == expected


def _change(name: str, keys: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> Any:
    return name, keys or {}, tensors


REFUSALS = {
    "another vocabulary": (
        _change("EAGLE of SafeAILab", {"vocab_size": 20}),
        r"made for .*target\d*, got vocabulary 20 for 16; choose the head",
    ),
    "another hidden size": (
        _change(SAFE3, {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1}),
        r"made for .*target\d*, got hidden_size 24 for 32; choose the head",
    ),
    "a missing tensor": (_change(SAFE3, **{"norm.weight": None}), r"those of an EAGLE-3 head.*missing: norm.weight"),
    "a surplus tensor": (
        _change("EAGLE of vLLM, two layers", **{"layers.0.input_layernorm.weight": torch.ones(SIZE)}),
        r"those of an EAGLE head.*unexpected: layers.0.input_layernorm.weight",
    ),
    "a tensor of another shape": (
        _change(SAFE3, **{"fc.weight": torch.ones(SIZE, 2 * SIZE)}),
        r"of another shape: fc.weight \[32, 64\] for \[32, 96\]",
    ),
    "a draft vocabulary without its map": (_change(SAFE3, d2t=None), r"missing: d2t"),
    "offsets that leave the vocabulary": (
        _change(SAFE3, d2t=torch.full((DRAFT_VOCAB_SIZE,), 6)), r"among the target's 16, got ids from 6 to 16"
    ),
    "offsets that meet": (_change(SAFE3, d2t=-torch.arange(DRAFT_VOCAB_SIZE)), r"1 of 11 different"),
    "a map that contradicts the other": (
        _change(SAFE3, t2d=torch.ones(VOCAB_SIZE, dtype=torch.bool)), r"t2d must mark .* got 16 marks for 11 tokens"
    ),
    "hidden states that the target has not": (
        _change(SAFE3, {"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}),
        r"numbered 0 to 7, .*got \[1, 4, 8\]; name them with speculative_config.aux_hidden_state_layer_ids",
    ),
    "EAGLE-3 taken for EAGLE": (_change("EAGLE of SafeAILab", {"draft_vocab_size": 8}), r"set method=eagle3"),
    "EAGLE-3 of DeepSpec taken for EAGLE": (
        _change("EAGLE of SafeAILab", {"ttt_length": 7}), r"config.json is an EAGLE-3 head's; set .*method='eagle3'"
    ),
    "another speculator": (
        _change(SAFE3, {"speculators_model_type": "dflash"}), r"got method=eagle3; set method=dflash"
    ),
    "another build": (
        _change(SAFE3, {"eagle_config": {"use_mtp_layernorm": True}}), r"eagle_config.use_mtp_layernorm must be False"
    ),
    "a layer of another family": (
        _change(SAFE3, {"model_type": "deepseek_v3"}, **{"midlayer.self_attn.q_b_proj.weight": torch.ones(SIZE, SIZE)}),
        r"those of an EAGLE-3 head.*unexpected: layers.0.self_attn.q_b_proj.weight",
    ),
    "a number that is none": (
        ("EAGLE-3 of SafeAILab", {}, {"norm.weight": torch.full((SIZE,), torch.inf)}),
        r"norm\.weight must hold finite numbers in float32, but some are NaN or infinite",
    ),
    "a sliding layer without a window": (
        _change(SAFE3, {"layer_types": ["sliding_attention"]}),
        r"sliding_window in its config must be a whole number >= 1 .*, got None; mend it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSALS)
def test_a_head_that_does_not_belong_is_refused_in_one_message(
    target: tuple[Path, Any], tmp_path: Path, what: str
) -> None:
    (name, keys, tensors), message = REFUSALS[what]
    layout = LAYOUTS[name]
    weights = random_weights(layout.shapes)
    if layout.draft_vocab_size != VOCAB_SIZE:
        weights |= vocabulary_map(VOCAB_SIZE, layout.draft_vocab_size)
    weights = {name: tensor for name, tensor in (weights | tensors).items() if tensor is not None}
    save_head(tmp_path, layout.config | keys, weights, is_pickled=layout.is_pickled)
    with pytest.raises(UserError, match=message) as caught:
        engine(target[0], tmp_path, layout.method)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_head_that_drafts_in_one_pass_is_run_once_a_step(
    target: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_head(LAYOUTS["P-EAGLE of speculators"], target[1], tmp_path)
    llm = engine(target[0], tmp_path, "eagle3", enforce_eager=True)
    proposer, num_runs = llm.engine.proposer, [0]
    run, propose = proposer.runner.run, proposer.propose

    def count(*args: Any, **keys: Any) -> torch.Tensor:
        num_runs[-1] += 1
        return run(*args, **keys)

    def propose_and_count(schedule: Any) -> Any:
        num_runs.append(0)
        drafts = propose(schedule)
        assert num_runs[-1] == (1 if drafts.cu_num_draft_tokens[-1] else 0)
        return drafts

    monkeypatch.setattr(proposer.runner, "run", count)
    monkeypatch.setattr(proposer, "propose", propose_and_count)
    complete(llm, PROMPTS, PARAMS)
    assert len(num_runs) > 10
    with pytest.raises(UserError, match="speculative_token_tree must be null for a head that drafts in one pass"):
        engine(target[0], tmp_path, "eagle3", speculative_token_tree="dynamic")
