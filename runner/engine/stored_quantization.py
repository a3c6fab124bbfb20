"""Which weights are held in the quantization that their checkpoint has them in, by what kernels multiply by here."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from runner.engine.architecture import Architecture
from runner.engine.backend import multiplies_quantized
from runner.engine.checkpoint import ModelSource, read_tensors, stated_quantization
from runner.engine.decoder import HEAD
from runner.engine.errors import UserError, first_of
from runner.engine.expert_stacks import split_stacks
from runner.engine.fused_tensors import split_fused
from runner.engine.layers import DecoderLayer
from runner.engine.linear import WeightTarget
from runner.engine.quantization import Quantization, held_weights, read_scheme
from runner.engine.quantized_tensors import QuantizedTensor
from runner.engine.shard import Shard
from runner.engine.unquantized_modules import UnquantizedModules

logger = logging.getLogger(__name__)


def can_hold_quantized(source: ModelSource, device: torch.device) -> bool:
    if multiplies_quantized(device):
        return True
    logger.warning("%s: no kernel here multiplies by quantized weights; they are expanded", source.model)
    return False


def tell_expanded(found: Iterable[str], targets: Mapping[str, WeightTarget], source: ModelSource) -> None:
    """Log which of a checkpoint's quantized weights, by their modules, went to dense ones."""
    places = {name: targets[f"{name}.weight"] for name in found if f"{name}.weight" in targets}
    expanded = [name for name, target in places.items() if target.quantized is None]
    if expanded:
        logger.info("%s: %s are expanded on loading", source.model, first_of(expanded))


def stored_quantization(product_names: Sequence[str], arch: Architecture, source: ModelSource) -> Quantization:
    """Which weights the checkpoint has in 8 or 4 bits, by their modules, those too that kernels do not multiply by.

    Raises:
        UserError: a quantization_config that is not read.
    """
    if source.is_dummy:
        return _quantization_of_dummy(source, product_names, arch)
    if stated_quantization(source) is None:
        return {}
    tensors = split_fused(split_stacks(read_tensors(source), arch.experts), arch.fused_tensors)
    found = {name: kept.storage for name, kept in tensors if isinstance(kept, QuantizedTensor)}
    return {name.removesuffix(".weight"): storage for name, storage in found.items()}


def held_quantization(
    found: Quantization, product_names: Sequence[str], arch: Architecture, source: ModelSource, device: torch.device
) -> Quantization:
    """Which of the weights that a decoder's layers multiply by are held in 8 or 4 bits.

    Raises:
        UserError: the checkpoint is quantized in another way than asked for.
    """
    with_head = [*product_names, HEAD]
    modules = product_names if arch.tie_word_embeddings else with_head  # a tied head is not read
    wanted = with_head if source.quantizes_head else product_names
    numbers, of = source.quantization, f"{source.name}={source.model}"
    asked = {} if numbers is None else dict.fromkeys(wanted, numbers)
    held = held_weights(modules, _without_reordered(found, arch), asked, of, source.quantization_option)
    return held if not held or can_hold_quantized(source, device) else {}


def quantization_of_head(
    tensors: Mapping[str, Any],  # of the head, by names of its own
    source: ModelSource,
    device: torch.device,
    *,
    arch: Architecture | None,  # of its layers; None: they are not ours
    layer: str,  # before the names of a layer's tensors
    repeated: Mapping[str, str] | None = None,  # as fill_head takes it
) -> Quantization:
    """Which of its weights a draft head holds quantized, by their modules; what it does not multiply by it expands."""
    found: Quantization = {}
    if not source.is_dummy:
        places = {**{name: name for name in tensors}, **(repeated or {})}
        stored = {place: tensors.get(name) for place, name in places.items()}
        found = {
            place.removesuffix(".weight"): tensor.storage
            for place, tensor in stored.items()
            if isinstance(tensor, QuantizedTensor)
        }
    elif arch is not None:
        found = _without_reordered(_quantization_of_dummy_head(source, _products(arch, layer), arch), arch)
    held = {name: storage for name, storage in found.items() if storage.is_multiplied}
    return held if not held or can_hold_quantized(source, device) else {}


def _products(arch: Architecture, layer: str) -> list[str]:
    """The modules of what layers multiply by."""
    with torch.device("meta"):
        layers = [DecoderLayer(arch, index, Shard(), torch.float32) for index in range(arch.num_layers)]
    return [layer.format(index) + name for index, own in enumerate(layers) for name in own.product_names]


def _quantization_of_dummy(source: ModelSource, products: Sequence[str], arch: Architecture) -> Quantization:
    """Of products of layers, by their modules, as its config says: of experts' alone, or of all but those it excludes.

    Raises:
        UserError: a quantization_config that is not read.
    """
    stated = stated_quantization(source)
    if stated is None:
        return {}
    of = f"{source.name}={source.model}"
    scheme = read_scheme(stated, of, source.quantization_option)
    if scheme.packing == "mxfp4":
        products = [] if arch.experts is None else [name for name in products if arch.experts.prefix in name]
    excluded = UnquantizedModules(stated, of)
    return dict.fromkeys((name for name in products if name not in excluded), scheme.storage)


def _quantization_of_dummy_head(source: ModelSource, products: Sequence[str], arch: Architecture) -> Quantization:
    try:
        return _quantization_of_dummy(source, products, arch)
    except UserError:  # a head of dense tensors may only repeat what its target says, and is read
        logger.info("%s: its quantization_config is not read; its weights are taken to be dense", source.model)
        return {}


def _without_reordered(found: Quantization, arch: Architecture) -> Quantization:
    """Without queries and keys whose heads are reordered, which takes dense rows, and what is multiplied with them."""
    if not arch.head_orders:
        return found
    reordered = tuple(f".{name}" for name in arch.beside_heads)
    return {name: storage for name, storage in found.items() if not name.endswith(reordered)}
