"""The decoder layer of an EAGLE or EAGLE-3 head: Llama's, unless the config names another family of ours.

SafeAILab, SpecForge and vLLM build Llama's layer whatever the target is, and write the target's `model_type` (qwen2,
phi3, mixtral, ...) into the head's config: there `architectures` says what the layer is. Gemma 4's are in heads of
DeepSpec alone, whose `architectures` name it. Nor is the config reliable on biases of queries, keys and values:
`qkv_bias` (SafeAILab) or the checkpoint's tensors say if there are any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runner.engine.architecture import Architecture
from runner.engine.checkpoint import ModelSource
from runner.engine.families import GEMMA4_FAMILIES, HEAD_FAMILIES
from runner.engine.head_checkpoint import HeadTensor, head_architecture

GEMMA4_HEAD = "Gemma4Eagle3Model"
QKV_BIASES = tuple(f"self_attn.{part}_proj.bias" for part in "qkv")


def eagle_architecture(values: Mapping[str, Any], source: ModelSource) -> tuple[Architecture, Any]:
    """The layer that a head's config describes, and the transformers config of it (for its rotations).

    Raises:
        UserError: a config that transformers cannot read.
    """
    listed = values.get("architectures")
    name = str(listed[0]) if isinstance(listed, list) and listed else ""
    if name == GEMMA4_HEAD:
        return head_architecture(values, source, GEMMA4_FAMILIES)
    if name.startswith("Llama") or values.get("model_type") not in HEAD_FAMILIES:
        values = {**values, "model_type": "llama"}
    arch, config = head_architecture(values, source)
    qkv_bias = values.get("qkv_bias")
    return (arch if qkv_bias is None else replace(arch, qkv_bias=bool(qkv_bias))), config


def with_biases_of(arch: Architecture, tensors: Mapping[str, HeadTensor]) -> Architecture:
    """The layer with the q, k and v biases that a checkpoint has; zeros, as AutoGPTQ writes, are none."""
    biases = (tensor for name, tensor in tensors.items() if name.endswith(QKV_BIASES))
    return replace(arch, qkv_bias=any(bool(bias[...].any()) for bias in biases))
