"""PARD-2: a PARD draft over embeddings and projected states of the target; logits and drafts transformers' in float64.

The reference computes the whole text anew: the target's hidden states of all tokens but the last, one place further
back, beside the embeddings of the text and the masks.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cpu.recording import Program
from proposers.contexts.feature_runner import FeatureRunner
from proposers.pard import PardProposer
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.sampling_params import SamplingParams
from runner.whole_steps import WholeSteps
from tests.conftest import Engines, complete
from tests.emulated_device import EmulatedDevice
from tests.heads_for_tests import PARD2
from tests.one_pass_reference import (
    HIDDEN_SIZE,
    MASK,
    PARAMS,
    PROMPTS,
    SHAPE,
    VOCAB_SIZE,
    Target,
    context_of,
    passes_of_a_run,
    save_target,
)
from tests.test_pickles import RunsCode
from tests.test_whole_steps import GREEDY, SAMPLED, Traffic, assert_same_steps, play
from tests.transformers_reference import KeepFloat64, assert_as_accurate, in_float64, random_model, save, save_tokenizer

NUM_TOKENS = 5
LAYERS = [-1, -2, 0]  # of hidden_states, in the order in which they are projected
KEYS: dict[str, Any] = {
    "pard2": True,
    "spd_type": "pard2",
    "pard_token": MASK,
    "pard2_scale": 0.5,
    "pard2_proj_bias": False,
    "pard2_target_dim": HIDDEN_SIZE * len(LAYERS),
    "pard2_target_layers": LAYERS,
}
DRAFT_SIZE = 48  # another hidden size than the target's
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return save_target(tmp_path_factory.mktemp("target"))


def save_draft(directory: Path, family: str = "llama", **keys: Any) -> tuple[Any, Tensors]:
    """A random model of a family with the keys of a PARD-2 config, and the projection beside it."""
    from transformers import AutoConfig

    shape = {**SHAPE, "num_hidden_layers": 2, "hidden_size": DRAFT_SIZE}
    model = random_model(AutoConfig.for_model(family, **{**shape, **KEYS, **keys}))
    save(model, directory)
    save_tokenizer(directory, VOCAB_SIZE)
    generator = torch.Generator().manual_seed(2)
    width = HIDDEN_SIZE * len(keys.get("pard2_target_layers", LAYERS))
    projection = {"target_proj.weight": 0.3 * torch.randn(DRAFT_SIZE, width, generator=generator)}
    if keys.get("pard2_proj_bias"):
        projection["target_proj.bias"] = torch.randn(DRAFT_SIZE, generator=generator)
    torch.save(projection, directory / "warp_model.bin")
    return model, projection


exact_copy = cache(in_float64)


@torch.inference_mode()
def logits_behind(target: Any, draft: Any, projection: Tensors, token_ids: list[int], num_tokens: int) -> torch.Tensor:
    """[num_tokens, vocab], in the models' dtype: one forward over the text and num_tokens - 1 masks."""
    states = target(torch.tensor([token_ids[:-1]]), output_hidden_states=True, use_cache=False).hidden_states
    before = torch.cat([states[layer][0] for layer in draft.config.pard2_target_layers], dim=1)
    before = torch.cat((torch.zeros_like(before[:1]), before, before[-1:].expand(num_tokens - 1, -1)))
    added = before @ projection["target_proj.weight"].to(before.dtype).T
    if "target_proj.bias" in projection:
        added = added + projection["target_proj.bias"].to(before.dtype)
    embeddings = draft.get_input_embeddings()(torch.tensor(token_ids + [MASK] * (num_tokens - 1)))
    inputs = embeddings + draft.config.pard2_scale * added
    logits: torch.Tensor = draft(inputs_embeds=inputs[None], use_cache=False).logits[0]
    return logits[-num_tokens:]


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("llama", {}),
        ("qwen3", {"pard2_proj_bias": True, "pard2_target_layers": [1, 3], "pard2_target_dim": 2 * HIDDEN_SIZE}),
    ],
)
def test_every_pass_has_the_logits_of_the_text_the_states_and_masks_behind_it(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, keys: dict[str, Any]
) -> None:
    """From its own cache: prompts in chunks, after every way to accept, after preemption, over masks' scratch."""
    model, projection = save_draft(tmp_path / "draft", family, **keys)
    method = {"method": "pard", "model": str(tmp_path / "draft"), "num_speculative_tokens": NUM_TOKENS}
    passes, _ = passes_of_a_run(target, monkeypatch, method)
    assert len(passes) > 20 and {1, NUM_TOKENS} < {len(one.drafted) for one in passes}
    theirs = [logits_behind(target.model, model, projection, one.token_ids, len(one.drafted)) for one in passes]
    with KeepFloat64():
        exact_models = exact_copy(target.model), exact_copy(model)
        exact = [logits_behind(*exact_models, projection, one.token_ids, len(one.drafted)) for one in passes]
    assert_as_accurate(torch.cat([one.logits for one in passes]), torch.cat(theirs), torch.cat(exact))
    assert [one.drafted for one in passes] == [logits.argmax(dim=-1).tolist() for logits in exact]


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"rejection_sample_method": "probabilistic", "draft_sample_method": "probabilistic"},
        {"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 64, 0]]},
        {"method": "hybrid", "drafter": "pard", "num_drafter_tokens": 2, "min_match_score": 0.4},
    ],
    ids=["strict", "probabilistic", "none in company", "hybrid"],
)
def test_every_step_drafts_and_accepts_what_it_does_in_parts(engines: Engines, keys: dict[str, Any]) -> None:
    """Also after steps that drafted nothing, and behind drafts that others made: the states of all are kept."""
    llm = engines({"method": "pard", "num_speculative_tokens": 3, **keys}, of_drafters=PARD2)
    lengths = (60, 23, 1, 25, 5)
    params = tuple(replace(SAMPLED if own == 23 else GREEDY, ignore_eos=True, max_tokens=own) for own in lengths)
    arrivals = tuple((12 * index, 3 + 8 * index) for index in range(len(lengths)))
    traffic = Traffic(arrivals=arrivals, params=params, cancelled={}, max_num_seqs=3)
    _, in_parts, _ = play(llm, traffic, whole=False)
    llm.reset_prefix_cache()
    proposer: Any = getattr(llm.engine.proposer, "drafter", llm.engine.proposer)
    proposer.runner.cache.layers[-1].fill_(3.0)  # the same texts were there before
    _, whole, num_launched = play(llm, traffic, whole=True)
    assert num_launched > 10
    assert_same_steps(whole, in_parts)
    accepted = {count for record in whole for count in record.num_accepted_tokens}
    assert {0, 1} <= accepted


def test_passes_and_steps_are_recorded(engines: Engines) -> None:
    """Nothing else would tell of something that the host has a part in: it would be computed as ever, and slower."""
    llm = engines({"method": "pard", "num_speculative_tokens": 3}, of_drafters=PARD2)
    complete(llm, PROMPTS, PARAMS)
    proposer: Any = llm.engine.proposer
    steps = llm.engine.whole_steps[proposer](3)
    assert isinstance(steps, WholeSteps) and steps._graphs._graphs, "steps run whole, and were recorded"
    graphs = [*steps._graphs._graphs.values(), *proposer.runner.graphs._graphs.values()]
    assert all(isinstance(graph.replay, Program) for graph in graphs)


def test_captured_steps_say_on_a_gpu_what_the_cpu_says(engines: Engines, emulated_gpu: EmulatedDevice) -> None:
    method = {"method": "pard", "num_speculative_tokens": 2}
    params = [
        SamplingParams(max_tokens=5, temperature=temperature, seed=3, ignore_eos=True) for temperature in (0, 0.8)
    ]
    found = []
    for build, where in ((engines, {}), (Engines(), {"device": "cuda", "dtype": "float32", "batch_invariant": False})):
        options = {"architecture": {"num_hidden_layers": 1}, "num_gpu_blocks_override": 64, **where}
        requests, metrics = complete(build(method, of_drafters=PARD2, **options), PROMPTS[:2], params)
        counts = [(record.num_draft_tokens, record.num_accepted_tokens) for record in metrics.records]
        found.append(([request.output_token_ids for request in requests], counts))
    assert found[0] == found[1] and emulated_gpu.num_replays > 0


def test_the_projection_is_held_in_8_bits_as_the_draft_is(engines: Engines) -> None:
    method = {"method": "pard", "num_speculative_tokens": 3}
    dense, held = (engines({**method, **own}, of_drafters=PARD2) for own in ({}, {"quantization": "int8"}))
    texts = [[own.output_token_ids for own in complete(llm, PROMPTS, PARAMS)[0]] for llm in (dense, held)]
    assert texts[0] == texts[1]
    runner = held.engine.proposer.runner  # type: ignore[attr-defined]
    for weight in (runner.features.target_proj.weight, runner.model.layers[0].attention.o_proj.weight):
        assert weight.kind == "int8"


def build(target: Target, directory: Path) -> PardProposer:
    source = ModelSource(model=str(directory), name="method.model")
    return PardProposer(
        num_speculative_tokens=2, context=context_of(target), source=source, draft_sample_method="greedy"
    )


def change_config(directory: Path, **keys: Any) -> None:
    file = directory / "config.json"
    values = json.loads(file.read_text()) | keys
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A draft of each family, saved once; a test takes a copy."""

    @cache
    def saved(family: str) -> Path:
        directory = tmp_path_factory.mktemp(family)
        save_draft(directory, family)
        return directory

    return saved


@pytest.mark.parametrize(
    ("family", "keys", "projection", "message"),
    [
        ("llama", {}, None, r"must hold a warp_model.bin, got .* has none; download .*spd_type=pard and pard2=false"),
        ("llama", {}, {"target_proj.weight": (48, 64)}, r"target_proj.weight \[48, 64\] for \[48, 96\]; download it"),
        ("llama", {}, {"proj.weight": (48, 96)}, r"unexpected: proj.weight; missing: target_proj.weight; download it"),
        ("llama", {"pard2_proj_bias": True}, {}, r"missing: target_proj.bias; download it"),
        ("llama", {"pard2_target_dim": 64}, {}, r"pard2_target_dim must be 96, 3 hidden states of .*, got 64; choose"),
        ("llama", {"pard2_target_layers": [-1, -5, 0]}, {}, r"\[-1, -5, 0\], which must lie in \[-4, 3\] .*; choose"),
        ("llama", {"pard2_target_layers": None}, {}, r"pard2_target_layers must be a list of whole .*, got None; mend"),
        ("llama", {"pard2_scale": "small"}, {}, r"pard2_scale must be a number, got 'small'; mend its config.json"),
        ("llama", {"pard_token": None}, {}, r"must name the mask token"),
        ("gemma", {}, {}, r"a family whose layers start from the embeddings as they are, .*, got gemma; choose"),
        ("granite", {"embedding_multiplier": 12.0}, {}, r"start from the embeddings as they are, .* granite; choose"),
        ("cohere", {}, {}, r"a family whose layers start from the embeddings as they are, .*, got cohere; choose"),
    ],
)  # fmt: skip
def test_a_draft_that_was_made_for_another_target_is_one_message(
    target: Target,
    drafts: Callable[[str], Path],
    tmp_path: Path,
    family: str,
    keys: dict[str, Any],
    projection: dict[str, tuple[int, ...]] | None,
    message: str,
) -> None:
    directory = Path(shutil.copytree(drafts(family), tmp_path / "draft"))
    change_config(directory, **keys)
    if projection is None:
        (directory / "warp_model.bin").unlink()
    elif projection:
        torch.save({name: torch.zeros(shape) for name, shape in projection.items()}, directory / "warp_model.bin")
    with pytest.raises(UserError, match=message) as caught:
        build(target, directory)
    assert str(caught.value).startswith("method.model=")


def test_keys_are_read_by_their_older_names_too(target: Target, drafts: Callable[[str], Path], tmp_path: Path) -> None:
    """As the reference reads them; without its scale a draft would guess worse, and say nothing."""
    directory = Path(shutil.copytree(drafts("llama"), tmp_path / "draft"))
    change_config(directory, pard2_scale=None, pard_scale=0.7, feat_scale=0.1)
    runner = build(target, directory).runner
    assert isinstance(runner, FeatureRunner) and runner.features.scale == 0.7


def test_another_vocabulary_is_one_message(target: Target, tmp_path: Path) -> None:
    save_draft(tmp_path, vocab_size=VOCAB_SIZE + 2)
    with pytest.raises(UserError, match=r"must have the target's vocabulary \(48 entries\), got 50; choose"):
        build(target, tmp_path)


def test_nothing_in_the_pickle_runs(target: Target, drafts: Callable[[str], Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(drafts("llama"), tmp_path / "draft"))
    torch.save({"target_proj.weight": RunsCode(tmp_path / "ran")}, directory / "warp_model.bin")
    with pytest.raises(UserError, match=r"warp_model.bin is corrupt or holds more than tensors"):
        build(target, directory)
    assert not (tmp_path / "ran").exists()


def test_a_draft_may_go_without_states_as_its_message_says(
    target: Target, drafts: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its paper has both modes in one model; such a draft serves targets of other sizes too."""
    directory = Path(shutil.copytree(drafts("llama"), tmp_path / "draft"))
    assert build(target, directory).tap_layers == (-1, 2, 0)
    change_config(directory, spd_type="pard", pard2=False, pard2_target_dim=4096)
    (directory / "warp_model.bin").unlink()
    alone = build(target, directory)
    assert alone.tap_layers == () and not isinstance(alone.runner, FeatureRunner)
