"""Builds a model on a device and has it filled: from safetensors, or with random weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from runner.engine.architecture import Architecture, read_architecture
from runner.engine.backend import multiplies_quantized, runs_kernels
from runner.engine.checkpoint import ModelSource, load_config, read_tensors
from runner.engine.decoder import HEAD, Decoder
from runner.engine.decoder_weights import fill_from_checkpoint, fill_randomly
from runner.engine.errors import UserError
from runner.engine.kv_scales import read_kv_scales
from runner.engine.memory import making_weights, model_remedy, require_memory
from runner.engine.quantization import Storage
from runner.engine.quantized_tensors import QuantizedTensor
from runner.engine.rope import num_positions, require_static_rope, warn_of_unread_rope
from runner.engine.shard import Shard
from runner.engine.stored_quantization import (
    can_hold_quantized,
    held_quantization,
    stored_quantization,
    tell_expanded,
)
from runner.engine.transformers_loader import load_with_transformers
from runner.engine.transformers_model import TransformersModel
from runner.engine.transformers_support import require_supported

logger = logging.getLogger(__name__)

COMPARED_ROWS = 8192  # at a time


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    source: ModelSource
    model: Decoder | TransformersModel
    hf_config: Any
    max_model_len: int
    num_weight_bytes: int
    held: str | None = None  # how weights are that are quantized; None: all are dense


def load_model(
    source: ModelSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int | None,  # None: as many as the checkpoint's rotations are made for
    longest_useful_len: int | None = None,  # a draft sees no more than its target does
    shard: Shard | None = None,
    reads_kv_scales: bool = False,  # for a cache in FP8
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
    if limit < 2:
        raise UserError(
            f"max_position_embeddings of {source.name}={source.model} must be >= 2, a token and one behind it, got "
            f"{limit}; mend its config"
        )
    arch = read_architecture(config)
    if arch is None:
        return _load_through_transformers(source, config, device=device, dtype=dtype, max_model_len=length, shard=shard)
    require_static_rope(config)
    arch = _with_head_of(source, _with_router_of(source, arch), dtype)
    logger.info("%s: %s runs on our own decoder", source.model, arch.family)
    shape = partial(Decoder, arch, config, max_model_len=length, dtype=dtype, shard=shard)
    with torch.device("meta"), _naming(source), making_weights(f"{source.name}={source.model}"):
        product_names = shape().product_names
    found = stored_quantization(product_names, arch, source)
    quantization = held_quantization(found, product_names, arch, source, device)
    with torch.device("meta"), _naming(source):
        num_bytes = sum(part.numel() * part.element_size() for part in shape(quantization=quantization).parameters())
    smaller = f"{source.quantization_option}=fp8, " if not quantization and multiplies_quantized(device) else ""
    shard = shard or Shard()
    needed = shard.num_beside(device) * num_bytes
    require_memory(needed, device, f"{source.name}={source.model}", model_remedy(dtype, smaller))
    with torch.device(device), making_weights(f"{source.name}={source.model}"):
        decoder = shape(quantization=quantization)
    if source.is_dummy:
        fill_randomly(decoder)
    else:
        if reads_kv_scales:
            decoder.kv_scales = read_kv_scales(source, arch.num_layers, are_latents=arch.latent is not None)
        fill_from_checkpoint(decoder, arch, config, source, shard)
    tell_expanded(found, decoder.weight_targets(), source)
    return LoadedModel(
        source=source,
        model=decoder,
        hf_config=config,
        max_model_len=length,
        num_weight_bytes=sum(part.nbytes for part in decoder.parameters()),
        held=_how_held(decoder),
    )


def _with_router_of(source: ModelSource, arch: Architecture) -> Architecture:
    """With a router in float32 where the family takes it as the checkpoint stores it, and it does so."""
    experts = arch.experts
    if experts is None or experts.mixture.router_digits != "of checkpoint" or source.is_dummy:
        return arch
    routers = (tensor for name, tensor in read_tensors(source) if name.endswith(f".{experts.router_name}.weight"))
    is_float32 = any(not isinstance(tensor, QuantizedTensor) and tensor.get_dtype() == "F32" for tensor in routers)
    return replace(arch, experts=replace(experts, is_router_float32=is_float32))


def _with_head_of(source: ModelSource, arch: Architecture, dtype: torch.dtype) -> Architecture:
    """Untied where the checkpoint has a dense head that is no copy of its embedding, whatever its config says.

    transformers reads it so since its version 5. A head may have been trained behind a config that nobody changed.
    """
    if source.is_dummy or not arch.tie_word_embeddings:
        return arch
    names = ("model.embed_tokens.weight", f"{HEAD}.weight")
    found = [tensor for name, tensor in read_tensors(source) if name in names]
    if len(found) < 2 or any(isinstance(tensor, QuantizedTensor) for tensor in found):
        return arch
    if _are_equal(found[0], found[1], dtype):
        return arch
    logger.warning(
        "%s: its %s.weight is no copy of its embedding, so that tie_word_embeddings=True of its config is not so; the "
        "head is taken as it is stored",
        source.model,
        HEAD,
    )
    return replace(arch, tie_word_embeddings=False)


def _are_equal(first: Any, second: Any, dtype: torch.dtype) -> bool:
    """Of two safetensors slices, as numbers of dtype."""
    if first.get_shape() != second.get_shape():
        return False
    pieces = [slice(begin, begin + COMPARED_ROWS) for begin in range(0, first.get_shape()[0], COMPARED_ROWS)]
    return all(torch.equal(first[piece].to(dtype), second[piece].to(dtype)) for piece in pieces)


def _how_held(decoder: Decoder) -> str | None:
    """Its quantized weights; None: it has none."""
    found = [target.quantized for target in decoder.weight_targets().values()]
    return ", ".join(sorted({str(Storage.of(weight)) for weight in found if weight is not None})) or None


def _load_through_transformers(
    source: ModelSource,
    config: Any,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
    shard: Shard | None,
) -> LoadedModel:
    require_supported(config, source)
    if source.quantization is not None and runs_kernels(device):
        raise UserError(
            f"{source.quantization_option} must be null on a GPU, got {source.quantization}: "
            f"{config.model_type} runs through transformers' own modelling code, whose products are dense there"
        )
    if shard is not None and shard.size > 1:
        raise UserError(
            f"hardware.tensor_parallel_size must be 1, got {shard.size}: {config.model_type} runs through "
            "transformers' own modelling code, which is not split; choose a model that runs on our own decoder"
        )
    logger.info("%s: %s runs through transformers' own modelling code", source.model, config.model_type)
    model = load_with_transformers(source, config, device=device, dtype=dtype, max_model_len=max_model_len)
    held = None
    if source.quantization is not None and can_hold_quantized(source, device):
        held = source.quantization
        model.hold_in_8_bits(held, with_head=source.quantizes_head)
    return LoadedModel(
        source=source,
        model=model,
        hf_config=config,
        max_model_len=max_model_len,
        num_weight_bytes=model.num_weight_bytes,
        held=held,
    )


@contextmanager
def _naming(source: ModelSource) -> Iterator[None]:
    """Parts of a decoder do not know whose they are."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{source.name}={source.model}: {error}") from error
