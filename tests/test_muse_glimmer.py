"""Muse Glimmer with the DFlash assistant that was published with it: drafts are those of transformers' own model.

tests/test_text_part.py has the target's logits, tests/test_other_families.py its steps.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from proposers.heads.target_features import require_plain_embeddings
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.llm import LLM
from tests.conftest import complete
from tests.edit_tensors import edit_tensors
from tests.emulated_device import EmulatedDevice
from tests.one_pass_reference import OPTIONS, SHAPE, Target, passes_of_a_run
from tests.test_whole_steps import GREEDY, SAMPLED, VOCAB_SIZE, Traffic, assert_same_steps, play
from tests.transformers_reference import (
    KeepFloat64,
    assert_as_accurate,
    in_float64,
    load,
    random_model,
    save_tokenizer,
)

MASK, BLOCK, WINDOW = 5, 6, 7
SMALL = {**SHAPE, "vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT: dict[str, Any] = {
    **SMALL,
    "model_type": "muse_glimmer_text",
    "num_hidden_layers": 4,
    "sliding_window": 8,
    "qk_scale_factor": 1.7,
    "output_multiplier": 0.3,
    "final_logit_softcapping": 6.0,
}
EYES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
ASSISTANT: dict[str, Any] = {
    **{key: value for key, value in SMALL.items() if key != "vocab_size"},
    "num_hidden_layers": 2,
    "sliding_window": WINDOW,
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "target_layer_ids": [0, 2],
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
CHAIN = {"num_speculative_tokens": 3}
TREE = {"num_speculative_tokens": 6, "speculative_token_tree": "dynamic"}


@dataclass(frozen=True, kw_only=True)
class Pair:
    target: Target
    assistant: Path
    drafter: Any  # transformers' model of it, float32

    def engine(self, head: Path | None, **keys: Any) -> LLM:
        method = None if head is None else {"model": str(head), **CHAIN, **keys}
        return LLM(str(self.target.directory), speculative_config=method, **OPTIONS)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """As they are published: the target takes images too, and the assistant has neither embeddings nor a head."""
    from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText

    directory, assistant = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("assistant")
    sizes = {"out_hidden_size": 128, "projector_hidden_size": 32}
    config = AutoConfig.for_model("muse_glimmer", text_config=dict(TEXT), vision_config=dict(EYES), **sizes)
    model = random_model(config, AutoModelForImageTextToText)
    model.lm_head.weight.data[12:] *= 0.3  # few tokens are likely, so that drafts are right now and then
    model.save_pretrained(directory)
    save_tokenizer(directory, VOCAB_SIZE)
    drafter = random_model(AutoConfig.for_model("muse_glimmer_assistant", **ASSISTANT), AutoModel)
    drafter.save_pretrained(assistant)
    # transformers' masks are of keys no further away than the window, flash attention's in transformers and vLLM, as
    # ours, of those that are nearer.
    drafter.config.sliding_window -= 1
    return Pair(target=Target(directory=directory, model=model), assistant=assistant, drafter=drafter)


@torch.inference_mode()
def block_logits(drafter: Any, target: Any, token_ids: list[int], num_tokens: int) -> torch.Tensor:
    """[num_tokens, vocab] behind token_ids, the last of which is pending."""
    from transformers.cache_utils import DFlashCache

    known = torch.tensor([token_ids[:-1]])
    text = target.model.language_model
    states = text(known, output_hidden_states=True, use_cache=False).hidden_states
    context = torch.cat([states[layer + 1] for layer in ASSISTANT["target_layer_ids"]], dim=-1)
    block = torch.tensor([[token_ids[-1], *[MASK] * num_tokens]])
    embedded = torch.nn.functional.embedding(block, text.embed_tokens.weight)  # not normed
    cache = DFlashCache(config=drafter.config)
    cache.set_previous_accepted_tokens(known.shape[1])
    rows = drafter(noise_embeds=embedded, context_hidden_states=context, past_key_values=cache).last_hidden_state[0, 1:]
    capped: torch.Tensor = torch.tanh(target.lm_head(rows) * (0.3 / 6.0)) * 6.0
    return capped


def test_every_pass_has_the_logits_of_transformers_model(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its own cache: the context in chunks, after every way to accept, after preemption, over blocks' scratch."""
    method = {"model": str(pair.assistant), "num_speculative_tokens": 5}
    passes, _ = passes_of_a_run(pair.target, monkeypatch, method)
    assert len(passes) > 20 and {1, 5} < {len(one.drafted) for one in passes}
    texts = [(one.token_ids, len(one.drafted)) for one in passes]
    theirs = [block_logits(pair.drafter, pair.target.model, *text) for text in texts]
    exact_drafter, exact_target = in_float64(pair.drafter), in_float64(pair.target.model)
    with KeepFloat64():
        exact = [block_logits(exact_drafter, exact_target, *text) for text in texts]
    assert_as_accurate(torch.cat([one.logits for one in passes]), torch.cat(theirs), torch.cat(exact))
    assert [one.drafted for one in passes] == [logits.argmax(dim=-1).tolist() for logits in exact]


@pytest.mark.parametrize("keys", [CHAIN, TREE], ids=["chain", "tree"])
def test_every_whole_step_drafts_and_accepts_what_it_does_in_parts(pair: Pair, keys: dict[str, Any]) -> None:
    """And the text is plain decoding's."""
    lengths = (60, 23, 1, 25, 5)
    params = tuple(replace(SAMPLED if own == 23 else GREEDY, ignore_eos=True, max_tokens=own) for own in lengths)
    arrivals = tuple((12 * index, 3 + 8 * index) for index in range(len(lengths)))
    traffic = Traffic(arrivals=arrivals, params=params, cancelled={}, max_num_seqs=3)
    llm = pair.engine(pair.assistant, **keys)
    _, in_parts, _ = play(llm, traffic, whole=False)
    llm.reset_prefix_cache()
    requests, whole, num_launched = play(llm, traffic, whole=True)
    plain, _, _ = play(pair.engine(None), traffic, whole=False)
    assert num_launched > 10
    assert [request.output_token_ids for request in requests] == [request.output_token_ids for request in plain]
    assert_same_steps(whole, in_parts)
    assert {0, 1} <= {count for record in whole for count in record.num_accepted_tokens}


def test_captured_steps_of_a_gpu_say_what_the_cpu_says(
    pair: Pair, emulated_gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runner.engine import weight_filling

    # It adds weights up, which a GPU does in no certain order.
    monkeypatch.setattr(weight_filling, "require_finite", lambda *_: None)
    prompts = [{"prompt_token_ids": [(3 * i + j) % VOCAB_SIZE for i in range(5 + 30 * j)]} for j in range(2)]
    params = [replace(GREEDY, max_tokens=9), replace(SAMPLED, max_tokens=7)]
    found = []
    for device in ("cpu", "cuda"):
        method = {"model": str(pair.assistant), "num_speculative_tokens": 2}
        options = {**OPTIONS, "batch_invariant": False, "device": device}
        llm = LLM(str(pair.target.directory), speculative_config=method, **options)
        requests, metrics = complete(llm, prompts, params)
        counts = [(record.num_draft_tokens, record.num_accepted_tokens) for record in metrics.records]
        found.append(([request.output_token_ids for request in requests], counts))
    assert found[0] == found[1] and emulated_gpu.num_replays > 0


@pytest.mark.parametrize(
    ("keys", "missing", "message"),
    [
        ({"hidden_size": 64}, None, r"made for .*, got hidden_size 64 for 32; choose the head of this target"),
        ({"target_layer_ids": [1, 4]}, None, r"hidden states \[2, 5\], which must lie in \[0, 4\]"),
        ({"mask_token_id": VOCAB_SIZE}, None, rf"mask_token_id must be a token in \[0, {VOCAB_SIZE - 1}\]"),
        ({}, "encoder.fc.weight", r"missing: fc\.weight; download it again"),
    ],
)
def test_an_assistant_that_does_not_belong_is_refused_in_one_message(
    pair: Pair, tmp_path: Path, keys: Mapping[str, Any], missing: str | None, message: str
) -> None:
    shutil.copytree(pair.assistant, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    if missing is not None:
        edit_tensors(tmp_path, lambda tensors: tensors.pop(missing))
    with pytest.raises(UserError, match=message) as caught:
        pair.engine(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_features_cannot_be_added_to_embeddings_that_are_normed() -> None:
    """PARD-2 adds states of the target to those of its draft."""
    draft = load(ModelSource(model="a-draft", name="method.model", load_format="dummy", hf_config=dict(TEXT)))
    with pytest.raises(UserError, match=r"start from the embeddings as they are, .*, got muse_glimmer_text; choose"):
        require_plain_embeddings(draft)


@pytest.mark.parametrize("bases", [[5e5, 0, 1e4, 0], [5e5, 0, 5e5, 0], [5e5] * 4, [1e4, 0]])
def test_layers_turn_by_one_base_or_by_none(bases: list[float]) -> None:
    source = ModelSource(model="a-target", load_format="dummy", hf_config={**TEXT, "layer_rope_theta": bases})
    with pytest.raises(UserError, match=r"layer_rope_theta .* must be 0 or the rope_theta .* \(10000\.0\) .*; mend"):
        load(source)
