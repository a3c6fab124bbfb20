"""Builds a model on a device and fills it: from safetensors, strictly, or with random weights.

Strict means that every parameter is filled exactly once and every tensor of the checkpoint has a place.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from runner.engine.architecture import Architecture, read_architecture
from runner.engine.checkpoint import ModelSource, load_config, read_tensors, require_finite
from runner.engine.decoder import Decoder
from runner.engine.errors import UserError, first_of
from runner.engine.linear import Shard, WeightTarget
from runner.engine.memory import require_memory
from runner.engine.mtp_layout import is_mtp_tensor
from runner.engine.rope import num_positions, require_static_rope, warn_of_unread_rope
from runner.engine.transformers_model import TransformersModel
from runner.engine.transformers_support import require_supported

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    source: ModelSource
    model: Decoder | TransformersModel
    hf_config: Any
    max_model_len: int
    num_weight_bytes: int


def load_model(
    source: ModelSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int | None,  # None: as many as the checkpoint's rotations are made for
    longest_useful_len: int | None = None,  # a draft sees no more than its target does
    shard: Shard | None = None,
) -> LoadedModel:
    """Load a target or draft.

    Raises:
        UserError: no such model, an unsupported architecture, a corrupt or incomplete checkpoint, too little memory.
    """
    config = load_config(source)
    warn_of_unread_rope(config, f"{source.name}={source.model}")
    limit = num_positions(config) or 2**20
    if max_model_len is not None and max_model_len > limit:
        extended = "" if limit == config.max_position_embeddings else " as its rope extends them"
        raise UserError(
            f"{source.name.replace('.model', '.max_model_len')} must be <= {limit}, the max_position_embeddings of "
            f"{source.model}{extended}, got {max_model_len}; lower it or leave it out"
        )
    length = max_model_len or min(limit, longest_useful_len or limit)
    arch = read_architecture(config)
    if arch is None:
        require_supported(config, source)
        logger.info("%s: %s runs through transformers' own modelling code", source.model, config.model_type)
        model = TransformersModel.load(source, config, device=device, dtype=dtype, max_model_len=length)
        num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        return LoadedModel(
            source=source, model=model, hf_config=config, max_model_len=length, num_weight_bytes=num_bytes
        )

    require_static_rope(config)
    logger.info("%s: %s runs on our own decoder", source.model, arch.family)
    num_bytes = _weight_bytes(arch, config, length, dtype, shard)
    remedy = "choose a smaller model, hardware.dtype=bfloat16, or a device with more memory"
    require_memory(num_bytes, device, f"{source.name}={source.model}", remedy)
    with torch.device(device):
        decoder = Decoder(arch, config, max_model_len=length, dtype=dtype, shard=shard)
    if source.is_dummy:
        fill_randomly(decoder)
    else:
        fill_from_checkpoint(decoder, arch, config, source, shard or Shard())
    return LoadedModel(source=source, model=decoder, hf_config=config, max_model_len=length, num_weight_bytes=num_bytes)


def fill_from_checkpoint(decoder: Decoder, arch: Architecture, config: Any, source: ModelSource, shard: Shard) -> None:
    targets = decoder.weight_targets()
    block_names = decoder.layers[0].weight_targets("")
    unknown = []
    for name, tensor in read_tensors(source):
        if name.endswith("rotary_emb.inv_freq") or (arch.tie_word_embeddings and name == "lm_head.weight"):
            continue  # derived from the config; a copy of the embedding
        target = targets.pop(name, None)
        if target is None and is_mtp_tensor(name, config, block_names):
            continue  # method=mtp reads them
        if target is None:
            unknown.append(name)
        else:
            _copy(target, tensor, name, source, shard)
    if unknown or targets:
        lines = [f"unexpected: {first_of(unknown)}"] if unknown else []
        lines += [f"missing: {first_of(list(targets))}"] if targets else []
        raise UserError(
            f"{source.name}={source.model}: the tensors do not match its config ({arch.family}, {arch.num_layers} "
            f"layers); {'; '.join(lines)}; download the checkpoint again or mend its config.json"
        )


def fill_randomly(decoder: Decoder) -> None:
    """Random weights of the scale that keeps activations finite, the same in every run."""
    generator = torch.Generator(device=decoder.embed_tokens.device).manual_seed(0)
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=0.02, generator=generator)


def _copy(target: WeightTarget, tensor: Any, name: str, source: ModelSource, shard: Shard) -> None:
    shape, dim = list(tensor.get_shape()), target.shard_dim
    expected = list(target.view.shape)
    if dim is not None:
        expected[dim] *= shard.size
    if shape != expected:
        raise UserError(
            f"{source.name}={source.model}: {name} must have shape {expected} by its config.json, got {shape}; "
            "the checkpoint and its config do not belong together"
        )
    if dim is None or shard.size == 1:
        target.view.copy_(tensor[:])
    else:
        rows = target.view.shape[dim]
        part = slice(shard.rank * rows, (shard.rank + 1) * rows)
        target.view.copy_(tensor[part] if dim == 0 else tensor[:, part])
    require_finite(target.view, name, source)


def _weight_bytes(arch: Architecture, config: Any, length: int, dtype: torch.dtype, shard: Shard | None) -> int:
    with torch.device("meta"):
        shape = Decoder(arch, config, max_model_len=length, dtype=dtype, shard=shard)
    return sum(parameter.numel() * parameter.element_size() for parameter in shape.parameters())
