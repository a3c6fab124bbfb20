"""What is Ling 3's alone: limits of what its last layers gate, as its makers' code in vLLM has them, and refusals."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from kernels.reference.act_and_mul import LimitedSilu
from runner.engine.architecture import read_architecture
from runner.engine.checkpoint import ModelSource
from runner.engine.decoder import Decoder
from runner.engine.errors import UserError
from tests.edit_json import edit_json
from tests.family_options import LENGTHS, SHAPE, VOCAB_SIZE, YARN
from tests.model_families import make_config
from tests.recurrent_families import LING
from tests.transformers_reference import (
    assert_as_accurate,
    engine_logits,
    float64_logits,
    load,
    random_model,
    random_sequences,
    reference_logits,
    save,
)

# Of layers; the first is dense.
OF_EXPERTS, OF_SHARED = "expert_swiglu_limit_list", "share_expert_swiglu_limit_list"
LIMITS: dict[str, list[float | None]] = {OF_EXPERTS: [0, 0.0, 0.04], OF_SHARED: [None, 0.03, 0.05]}


@dataclass
class Gated:
    """What is yet to be multiplied."""

    gate: torch.Tensor
    limit: float

    def __mul__(self, up: torch.Tensor) -> torch.Tensor:
        return self.gate.clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


class Limited(nn.Module):
    """In the place of silu."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, gate: torch.Tensor) -> Gated:
        return Gated(nn.functional.silu(gate), self.limit)


def limited_model(**limits: list[float | None]) -> Any:
    model = random_model(make_config("bailing_hybrid"))
    for key, of_layers in limits.items():
        setattr(model.config, key, of_layers)
        for layer, limit in zip(model.model.layers, of_layers, strict=True):
            if limit:
                own = layer.mlp.experts if key == OF_EXPERTS else layer.mlp.shared_experts
                own.act_fn = Limited(limit)
    return model


def test_what_is_gated_is_cut_off_layer_by_layer_of_experts_and_beside_them(tmp_path: Path) -> None:
    model, sequences = limited_model(**LIMITS), random_sequences(VOCAB_SIZE, LENGTHS)
    loaded = load(save(model, tmp_path))
    assert isinstance(loaded.model, Decoder)
    asked = {layer.mlp.activations for layer in loaded.model.sample_layers}
    assert asked == {("silu",), ("silu", LimitedSilu(0.03)), (LimitedSilu(0.04), LimitedSilu(0.05))}, "at the start"
    ours = engine_logits(loaded, sequences)
    assert_as_accurate(ours, reference_logits(model, sequences), float64_logits(model, sequences))
    for key in LIMITS:  # each has something to cut off
        edit_json(tmp_path / "config.json", **{**LIMITS, key: None})
        without = engine_logits(load(ModelSource(model=str(tmp_path))), sequences)
        assert (without - ours).abs().max() > 1e-3 * ours.abs().max()


def test_the_part_of_a_head_that_turns_is_what_is_stated_where_texts_are_extended_too(tmp_path: Path) -> None:
    """Its configs have the factor of larger heads, which transformers cannot extend by."""
    source = save(random_model(make_config("bailing_hybrid")), tmp_path)
    sequences, found = random_sequences(VOCAB_SIZE, LENGTHS), []
    for factor in (1.0, 0.5):
        edit_json(tmp_path / "config.json", rope_parameters={**YARN, "partial_rotary_factor": factor})
        found.append(engine_logits(load(source), sequences))
    assert torch.equal(*found)


@pytest.mark.parametrize("told", [[1.0, "2", 3.0], 4.0, [1.0, -1.0, 0.0], [1.0, 2.0]], ids=str)
def test_limits_that_are_none_are_refused(told: Any, tmp_path: Path) -> None:
    source = save(random_model(make_config("bailing_hybrid")), tmp_path)
    edit_json(tmp_path / "config.json", **{OF_EXPERTS: told})
    with pytest.raises(UserError, match=r"expert_swiglu_limit_list of a bailing_hybrid checkpoint must list a number"):
        load(source)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"kda_lower_bound": 1.0}, "kda_lower_bound of a bailing_hybrid checkpoint must be < 0, got 1.0; mend its"),
    ],
    ids=str,
)
def test_what_its_layers_cannot_be_is_refused(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        read_architecture(AutoConfig.for_model("bailing_hybrid", **{**SHAPE, **LING, **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["BailingMoeV2_5ForCausalLM"]},
        {"use_mla_nope": True},
        {"gated_attention_proj_granularity_type": "element_wise"},
        {"use_kda_lora": True},
        {"group_norm_size": 4},
        {"value_norm": True},
    ],
    ids=str,
)
def test_what_other_models_of_its_makers_do_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    source = save(random_model(make_config("bailing_hybrid")), tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(UserError, match=r"our own decoder runs this family as it is published, and its config.json is"):
        load(source)
