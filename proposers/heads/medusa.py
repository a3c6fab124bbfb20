"""Medusa's heads (Cai et al., arXiv 2401.10774): each guesses one of the next tokens from the same hidden state.

Head d reads the target's normed state at position p and guesses token p + 2 + d: residual blocks x + SiLU(W x + b),
then a projection to the vocabulary. Read from the layouts of FasterDecoding (medusa_lm_head.pt, also as safetensors;
its version 2 has no projections, the target's own serves) and of vLLM (blocks.*, lm_heads.*, a token_map of the
frequent tokens). How many heads there are is counted in the file: published configs say 2 where there are 5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from kernels.cpu.panels import Change, Weight, unpacked
from proposers.heads.head_sizes import head_number, head_size, require_target_sizes
from proposers.vocabularies.partial import KnownTokens
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.head_checkpoint import fill_head, read_head_config, read_head_tensors
from runner.engine.linear import WeightTarget
from runner.engine.loader import LoadedModel
from runner.engine.operations import head_logits, linear


@dataclass(frozen=True, kw_only=True)
class MedusaShape:
    """What a checkpoint holds."""

    is_vllm: bool
    num_heads: int
    num_layers: int  # residual blocks of a head
    has_bias: bool
    lm_head: Literal["each", "one", "target"]  # whose projections
    num_mapped_tokens: int | None  # entries of token_map; None: the heads know the whole vocabulary
    logit_scale: float

    def block(self, head: int, layer: int, part: str) -> str:
        """The name of a block's weight or bias in the checkpoint."""
        return f"blocks.{head}.layers.{layer}.{part}" if self.is_vllm else f"{head}.{layer}.linear.{part}"

    def projection(self, head: int) -> str:
        return f"lm_heads.{head}.weight" if self.is_vllm else f"{head}.{self.num_layers}.weight"


class MedusaHeads:
    """All heads of a checkpoint, on the target's device; nothing is computed that is not asked for."""

    def __init__(self, shape: MedusaShape, target: LoadedModel, dtype: torch.dtype) -> None:
        hidden, vocab = target.model.hidden_size, target.model.vocab_size
        self.shape, self.target, self.vocab_size = shape, target.model, vocab
        num_projections = {"each": shape.num_heads, "one": 1, "target": 0}[shape.lm_head]
        self.weights: list[list[Weight]] = [
            [torch.empty(hidden, hidden, dtype=dtype) for _ in range(shape.num_layers)] for _ in range(shape.num_heads)
        ]
        self.biases = torch.empty(shape.num_heads, shape.num_layers, hidden, dtype=dtype) if shape.has_bias else None
        num_tokens = shape.num_mapped_tokens or vocab
        self.projections: list[Weight] = [torch.empty(num_tokens, hidden, dtype=dtype) for _ in range(num_projections)]
        self.token_map = None
        if shape.num_mapped_tokens is not None:
            self.token_map = torch.empty(shape.num_mapped_tokens, dtype=torch.int64)

    def logits(self, states: torch.Tensor, head: int, tile: int | None) -> torch.Tensor:
        """States [num_rows, hidden] (num_rows a multiple of tile) -> [num_rows, vocab] float32 of one head."""
        for layer in range(self.shape.num_layers):
            bias = None if self.biases is None else self.biases[head, layer]
            states = states + F.silu(linear(states, self.weights[head][layer], bias, tile))
        if self.shape.lm_head == "target":
            logits = self.target.logits(states, tile)
        else:
            projection = self.projections[head if self.shape.lm_head == "each" else 0]
            logits = head_logits(states, projection, tile)
        logits = logits if self.shape.logit_scale == 1.0 else logits * self.shape.logit_scale
        if self.token_map is None:
            return logits
        return KnownTokens(self.token_map, self.vocab_size).over_target_vocabulary(logits)

    @property
    def product_weights(self) -> list[Weight]:
        return [*(weight for weights in self.weights for weight in weights), *self.projections]

    def convert(self, change: Change) -> None:
        self.weights = [[change(weight) for weight in weights] for weights in self.weights]
        self.projections = [change(weight) for weight in self.projections]

    def weight_targets(self) -> dict[str, WeightTarget]:
        shape, targets = self.shape, dict[str, WeightTarget]()
        for head in range(shape.num_heads):
            for layer in range(shape.num_layers):
                targets[shape.block(head, layer, "weight")] = WeightTarget(view=unpacked(self.weights[head][layer]))
                if self.biases is not None:
                    targets[shape.block(head, layer, "bias")] = WeightTarget(view=self.biases[head, layer])
        for head, projection in enumerate(self.projections):
            targets[shape.projection(head)] = WeightTarget(view=unpacked(projection))
        if self.token_map is not None:
            targets["token_map"] = WeightTarget(view=self.token_map)
        return targets


def load_medusa_heads(
    source: ModelSource, target: LoadedModel, *, device: torch.device, dtype: torch.dtype
) -> MedusaHeads:
    """Read the heads of a target.

    Raises:
        UserError: another target's heads, or tensors that are not those of Medusa.
    """
    config = read_head_config(source)
    tensors = _read(source)
    shape = _dummy_shape(config, source) if source.is_dummy else _shape(config, tensors, source)
    _require_sizes(shape, config, tensors, source, target)
    _cut_to_token_map(shape, tensors, target.model.vocab_size)
    with torch.device(device):
        heads = MedusaHeads(shape, target, dtype)
    fill_head(heads.weight_targets(), tensors, source, "Medusa heads")
    return heads


def _read(source: ModelSource) -> dict[str, torch.Tensor]:
    """The tensors by the shorter of the names that are about."""
    tensors = {re.sub(r"^medusa_heads?\.", "", name): own[...] for name, own in read_head_tensors(source).items()}
    if "lm_head.weight" in tensors and "lm_heads.0.weight" not in tensors:
        tensors["lm_heads.0.weight"] = tensors.pop("lm_head.weight")
    return tensors


def _dummy_shape(config: Mapping[str, Any], source: ModelSource) -> MedusaShape:
    return MedusaShape(
        is_vllm=False,
        num_heads=head_size(config, "medusa_num_heads", 5, source),
        num_layers=head_size(config, "medusa_num_layers", 1, source, minimum=0),
        has_bias=True,
        lm_head="target" if str(config.get("version")) == "2" else "each",
        num_mapped_tokens=None,
        logit_scale=1.0,
    )


def _shape(config: Mapping[str, Any], tensors: dict[str, torch.Tensor], source: ModelSource) -> MedusaShape:
    """The shape that the config and the tensors tell; what the config says of the number of heads is not asked."""
    is_vllm = any(name.startswith("blocks.") for name in tensors)
    block = re.compile(r"blocks\.(\d+)\." if is_vllm else r"(\d+)\.\d+\.")
    found = [int(match[1]) for match in map(block.match, tensors) if match]
    if not found:
        raise UserError(
            f"{source.name}={source.model} must hold Medusa heads ('0.0.linear.weight', or 'blocks.0.layers.0.weight' "
            f"in vLLM's layout), got {', '.join(sorted(tensors)[:4])}; name the method that it was made for"
        )
    layers_key = "medusa_num_layers" if "medusa_num_layers" in config else "num_hidden_layers"  # vLLM takes either
    num_layers = head_size(config, layers_key, 1, source, minimum=0)
    if not is_vllm:
        has_projections = any(re.fullmatch(r"\d+\.\d+\.weight", name) for name in tensors)
        return MedusaShape(
            is_vllm=False,
            num_heads=max(found) + 1,
            num_layers=num_layers,
            has_bias=True,
            lm_head="each" if has_projections else "target",
            num_mapped_tokens=None,
            logit_scale=1.0,
        )
    vocab_size = head_size(config, "vocab_size", 32001, source)
    is_cut = config.get("truncated_vocab_size") is not None
    num_tokens = head_size(config, "truncated_vocab_size", 0, source) if is_cut else vocab_size
    return MedusaShape(
        is_vllm=True,
        num_heads=max(found) + 1,
        num_layers=num_layers,
        has_bias=bool(config.get("medusa_fc_bias", False)),
        lm_head="one" if config.get("original_lm_head", False) else "each",
        num_mapped_tokens=num_tokens if num_tokens < vocab_size else None,
        logit_scale=head_number(config, "logit_scale", 1.0, source),
    )


def _require_sizes(
    shape: MedusaShape,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    source: ModelSource,
    target: LoadedModel,
) -> None:
    """Compare with the target; a token_map must lead to its tokens."""
    hidden_size = head_size(config, "hidden_size", target.model.hidden_size, source)
    vocab_size = head_size(config, "vocab_size", target.model.vocab_size, source)
    block, projection = tensors.get(shape.block(0, 0, "weight")), tensors.get(shape.projection(0))
    if block is not None:  # FasterDecoding's configs tell no size
        hidden_size = block.shape[-1]
    if projection is not None and shape.num_mapped_tokens is None:
        vocab_size = projection.shape[0]
    require_target_sizes(source, target, hidden_size=hidden_size, vocab_size=vocab_size)
    token_map = tensors.get("token_map")
    if token_map is None or shape.num_mapped_tokens is None:
        return
    if token_map.is_floating_point() or not 0 <= int(token_map.min()) <= int(token_map.max()) < vocab_size:
        raise UserError(
            f"{source.name}={source.model}: token_map must hold tokens in [0, {vocab_size - 1}], the vocabulary, got "
            f"{token_map.min()}..{token_map.max()}; download it again"
        )


def _cut_to_token_map(shape: MedusaShape, tensors: dict[str, torch.Tensor], vocab_size: int) -> None:
    """Leave projections that know all tokens the rows of those in token_map; take out a map of all of them."""
    if shape.num_mapped_tokens is None:  # all tokens in their order, or in one that vLLM does not look at
        tensors.pop("token_map", None)
    elif "token_map" in tensors:
        mapped = tensors["token_map"].long()
        for name, tensor in tensors.items():
            if name.startswith("lm_heads.") and len(tensor) == vocab_size:
                tensors[name] = tensor[mapped]
