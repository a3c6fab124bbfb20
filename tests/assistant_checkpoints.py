"""Small random Gemma 4 targets with the drafters that are published beside such, and transformers' own drafting."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.transformers_reference import INITIALIZER_RANGE, in_float64, random_model, save_tokenizer

VOCAB_SIZE = 96
NUM_LIKELY = 6  # tokens, the first ones, that random models say
NUM_LAYERS = 6
LAYER_TYPES = ["sliding_attention", "full_attention"] * 3
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
}
LAYERS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "rope_parameters": ROPES,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
# Targets: E2B's kind, whose last layers see others' keys and whose layers have inputs of their own, and the larger.
TARGETS: dict[str, dict[str, Any]] = {
    "shared": {
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    },
    "not shared": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
}
CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 3}


class Step(NamedTuple):
    """What goes into a step of the drafter, and what comes of it."""

    token: int
    state: torch.Tensor  # [64], before the token: the target's, or of the step before
    logits: torch.Tensor  # [vocab]
    next_state: torch.Tensor  # [64]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Of one dtype; as transformers' SinglePositionMultiTokenCandidateGenerator drafts."""

    target: Any
    assistant: Any

    @torch.inference_mode()
    def draft(self, token_ids: list[int], num_tokens: int) -> list[Step]:
        """Behind a text, over what the target has computed: all but the last token."""
        computed = self._computed(token_ids)
        state, token, steps = computed.hidden_states[-1][0, -1], token_ids[-1], list[Step]()
        for _ in range(num_tokens):
            steps.append(self._step(token_ids, computed, token, state))
            state, token = steps[-1].next_state, int(steps[-1].logits.argmax())
        return steps

    @torch.inference_mode()
    def again(self, token_ids: list[int], steps: Sequence[Step]) -> list[Step]:
        """From the same tokens and states."""
        computed, dtype = self._computed(token_ids), self.target.dtype
        return [self._step(token_ids, computed, step.token, step.state.to(dtype)) for step in steps]

    def _computed(self, token_ids: list[int]) -> Any:
        ids = torch.tensor([token_ids[:-1]])
        return self.target(ids, output_hidden_states=True, return_shared_kv_states=True, use_cache=False)

    def _step(self, token_ids: list[int], computed: Any, token: int, state: torch.Tensor) -> Step:
        embedding = self.target.get_input_embeddings()(torch.tensor(token))
        output = self.assistant(
            inputs_embeds=torch.cat((embedding, state)).view(1, 1, -1),
            position_ids=torch.tensor([[len(token_ids) - 1]]),
            shared_kv_states=computed.shared_kv_states,
        )
        return Step(token, state, output.logits[0, 0], output.last_hidden_state[0, 0])


@dataclass(frozen=True, kw_only=True)
class Written:
    target: Path
    assistant: Path
    in_float32: Reference

    @property
    def in_float64(self) -> Reference:
        return Reference(target=in_float64(self.in_float32.target), assistant=in_float64(self.in_float32.assistant))


def write(directory: Path, kind: str, head: dict[str, Any], **layers: Any) -> Written:
    """head: of the drafter's config, {} or CLUSTERS; layers: of the drafter's text_config."""
    from transformers import Gemma4AssistantConfig, Gemma4TextConfig

    shape: dict[str, Any] = {
        **LAYERS,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": NUM_LAYERS,
        "layer_types": LAYER_TYPES,
        **TARGETS[kind],
    }
    target = random_model(Gemma4TextConfig(**copy.deepcopy(shape)))
    kept = {key: shape[key] for key in ("attention_k_eq_v", "num_global_key_value_heads") if key in shape}
    text: dict[str, Any] = {
        **LAYERS,
        **kept,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "initializer_range": INITIALIZER_RANGE,
        **layers,
    }
    config = Gemma4AssistantConfig(text_config=Gemma4TextConfig(**copy.deepcopy(text)), backbone_hidden_size=64, **head)
    assistant = random_model(config)
    if assistant.masked_embedding is not None:
        assistant.masked_embedding.token_ordering.copy_(
            torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
        )
    for model in (target, assistant.model):  # both say few tokens, so that they agree now and then
        model.get_input_embeddings().weight.data[NUM_LIKELY:] *= 0.1
    target.save_pretrained(directory / "target")
    save_tokenizer(directory / "target", VOCAB_SIZE)
    assistant.save_pretrained(directory / "assistant")
    return Written(
        target=directory / "target",
        assistant=directory / "assistant",
        in_float32=Reference(target=target, assistant=assistant),
    )
