"""The config of a drafter that sees its target's keys and values (Gemma 4's assistants), and what target fits it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from proposers.heads.head_sizes import head_size, require_target_sizes
from proposers.heads.vocabulary_clusters import ClusterShapes
from runner.engine.architecture import Architecture, read_architecture
from runner.engine.checkpoint import ModelSource
from runner.engine.decoder import Decoder
from runner.engine.errors import UserError
from runner.engine.families import FAMILIES
from runner.engine.head_checkpoint import read_own_config
from runner.engine.head_shapes import HeadShapes
from runner.engine.loader import LoadedModel


@dataclass(frozen=True, kw_only=True)
class AssistantConfig:
    arch: Architecture  # of its layers, with kv_layer of the target
    hf_config: Any  # of its layers, as transformers reads it
    clusters: ClusterShapes | None  # None: all tokens get logits


def read_assistant_config(source: ModelSource, values: Mapping[str, Any], target: LoadedModel) -> AssistantConfig:
    """values: of its config.json.

    Raises:
        UserError: layers that are not ours, or a target that it was not made for.
    """
    named = f"{source.name}={source.model}"
    config = read_own_config(str(values["model_type"]), values, source)
    layers = copy.copy(config.text_config)
    layers.num_kv_shared_layers = 0  # all are, with another model's, and so with none of these
    layers.architectures = None
    arch = read_architecture(layers)
    if arch is None or not FAMILIES[arch.family].heads_by_layer or arch.experts or arch.per_layer:
        raise UserError(
            f"{named}: text_config must be that of dense Gemma 4 layers without inputs of their own, got model_type "
            f"{layers.model_type!r}; choose a drafter that was published for Gemma 4"
        )
    require_target_sizes(source, target, hidden_size=int(config.backbone_hidden_size), vocab_size=int(arch.vocab_size))
    heads = _heads_over(target, arch, layers, named)
    # A row stands one place behind the last key, and transformers counts its window from there, both ends included.
    windows = tuple(None if window is None else window + 1 for window in arch.sliding_windows)
    return AssistantConfig(
        arch=replace(arch, heads=heads, sliding_windows=windows),
        hf_config=layers,
        clusters=_clusters(values, arch.vocab_size, source) if config.use_ordered_embeddings else None,
    )


def _heads_over(target: LoadedModel, arch: Architecture, layers: Any, named: str) -> tuple[HeadShapes, ...]:
    """The heads of each layer, over the last of the target's layers of the same kind that have keys of their own."""
    theirs = read_architecture(target.hf_config)
    if not isinstance(target.model, Decoder) or theirs is None or not FAMILIES[theirs.family].heads_by_layer:
        raise UserError(
            f"{named} sees keys and values of a Gemma 4 target on our own decoder, got {target.source.model} with "
            f"model_type {target.hf_config.model_type!r}; choose such a target, or another method"
        )
    if target.model.shard.size > 1:
        raise UserError(
            f"hardware.tensor_parallel_size must be 1 with {named}, which sees all of its target's keys and values, "
            f"got {target.model.shard.size}; set it to 1, or choose another method"
        )
    kinds = target.hf_config.layer_types
    last = {kind: layer for layer, kind in enumerate(kinds) if theirs.heads[layer].kv_layer is None}
    wrong = []
    for kind in dict.fromkeys(layers.layer_types):
        ours = arch.heads[layers.layer_types.index(kind)]
        if kind not in last:
            wrong.append(f"no layer of type {kind}")
            continue
        seen = theirs.heads[last[kind]]
        if (seen.num_kv_heads, seen.layout) != (ours.num_kv_heads, ours.layout):
            wrong.append(
                f"in layers of type {kind} {seen.num_kv_heads} heads of {seen.head_dim} elements for "
                f"{ours.num_kv_heads} of {ours.head_dim}"
            )
        elif target.hf_config.rope_parameters[kind] != layers.rope_parameters[kind]:
            wrong.append(f"in layers of type {kind} other rope_parameters")
    if wrong:
        raise UserError(
            f"{named} must see keys and values as {target.source.model} has them, got {' and '.join(wrong)}; choose "
            "the drafter of this target, or the target of this drafter"
        )
    pairs = zip(arch.heads, layers.layer_types, strict=True)
    return tuple(replace(own, kv_layer=last[kind]) for own, kind in pairs)


def _clusters(values: Mapping[str, Any], vocab_size: int, source: ModelSource) -> ClusterShapes:
    num_clusters = head_size(values, "num_centroids", 2048, source)
    num_chosen = head_size(values, "centroid_intermediate_top_k", 32, source)
    if vocab_size % num_clusters or num_chosen > num_clusters:
        raise UserError(
            f"{source.name}={source.model}: num_centroids in its config must divide its vocabulary of {vocab_size} and "
            f"be >= centroid_intermediate_top_k ({num_chosen}), got {num_clusters}; mend it or download the head again"
        )
    return ClusterShapes(num_clusters=num_clusters, num_chosen=num_chosen)
