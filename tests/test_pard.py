"""PARD: an ordinary model and mask tokens behind the text; logits and drafts those of transformers in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from proposers.heads.mask_token import mask_token_id
from proposers.pard import PardProposer
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from tests.one_pass_reference import MASK, SHAPE, VOCAB_SIZE, Target, context_of, passes_of_a_run, save_target
from tests.transformers_reference import KeepFloat64, assert_as_accurate, in_float64, random_model, save, save_tokenizer

NUM_TOKENS = 5


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return save_target(tmp_path_factory.mktemp("target"))


def save_draft(directory: Path, family: str, **keys: Any) -> Any:
    """A random model of a family with the keys of a PARD config."""
    from transformers import AutoConfig

    model = random_model(AutoConfig.for_model(family, **{**SHAPE, "num_hidden_layers": 2, **keys}))
    save(model, directory)
    save_tokenizer(directory, VOCAB_SIZE)
    return model


@torch.inference_mode()
def logits_behind(model: Any, token_ids: list[int], num_tokens: int) -> torch.Tensor:
    """[num_tokens, vocab]: one forward over the text and num_tokens - 1 masks, the last rows of it."""
    logits: torch.Tensor = model(torch.tensor([token_ids + [MASK] * (num_tokens - 1)]), use_cache=False).logits[0]
    return logits[-num_tokens:]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "granite"])  # the last in transformers' code
def test_every_pass_has_the_logits_of_the_text_and_masks_behind_it(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Masks' rows in the cache are overwritten: after every way to accept, in chunks, and after preemption."""
    model = save_draft(tmp_path / "draft", family, pard_token=MASK, spd_type="pard")
    method = {"method": "pard", "model": str(tmp_path / "draft"), "num_speculative_tokens": NUM_TOKENS}
    passes, _ = passes_of_a_run(target, monkeypatch, method)
    assert len(passes) > 20 and {1, NUM_TOKENS} < {len(one.drafted) for one in passes}
    exact_model = in_float64(model)
    theirs = [logits_behind(model, one.token_ids, len(one.drafted)) for one in passes]
    with KeepFloat64():
        exact = [logits_behind(exact_model, one.token_ids, len(one.drafted)) for one in passes]
    assert_as_accurate(torch.cat([one.logits for one in passes]), torch.cat(theirs), torch.cat(exact))
    assert [one.drafted for one in passes] == [logits.argmax(dim=-1).tolist() for logits in exact]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pard_token": 7, "ptd_token_id": 8}, 7),
        ({"ptd_token_id": 8}, 8),
        ({"dspark_noise_token_id": 6, "pard_token": 7}, 6),
        ({"mask_token_id": 4, "dspark_noise_token_id": 6}, 4),
        ({"mask_token_id": 4, "dflash_config": {"mask_token_id": 3}}, 3),
        ({"mask_token_id": 4, "dflash_config": {}}, 4),
        ({"mask_token_id": None, "pard_token": 0}, 0),
    ],
)
def test_the_mask_token_is_looked_up_in_vllms_order(config: dict[str, Any], expected: int) -> None:
    assert mask_token_id(config, ModelSource(model="draft"), VOCAB_SIZE) == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, r"must name the mask token .* \(dflash_config.mask_token_id, .*pard_token.*method=draft_model"),
        ({"pard_token": VOCAB_SIZE}, r"pard_token must be a token in \[0, 47\], .* got 48"),
        ({"pard_token": "<mask>"}, r"pard_token must be a token in \[0, 47\], .* got '<mask>'"),
        ({"pard_token": MASK, "vocab_size": VOCAB_SIZE + 1}, "must have the target's vocabulary"),
    ],
)
def test_a_draft_that_is_no_pard_of_this_target_is_one_message(
    target: Target, tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    save_draft(tmp_path / "draft", "llama", **{key: value for key, value in keys.items() if key == "vocab_size"})
    file = tmp_path / "draft" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    source = ModelSource(model=str(tmp_path / "draft"), name="method.model")
    with pytest.raises(UserError, match=message) as caught:
        PardProposer(num_speculative_tokens=2, context=context_of(target), source=source, draft_sample_method="greedy")
    assert str(caught.value).startswith("method.model=") and "; " in str(caught.value)
