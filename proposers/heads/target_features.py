"""What PARD-2 adds to its embeddings: scaled projections of the target's hidden states (An et al., arXiv 2605.08632).

The draft model is an ordinary one that drafts over mask tokens, as PARD's. The row of a token takes the states of the
position before, those that the target drew the token from; the first token's takes zeros, as in training; and rows of
masks take what the last committed token's does, for nothing later is known. The projection is no tensor of the model:
it lies beside it, pickled. `pard2_target_layers` index transformers' hidden_states, of which the last is normed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kernels.cpu.panels import Change
from proposers.heads.head_sizes import head_size
from proposers.heads.quantized import quantize_head
from runner.engine.checkpoint import ModelSource
from runner.engine.decoder import Decoder
from runner.engine.errors import UserError
from runner.engine.head_checkpoint import fill_head, read_pickle_beside
from runner.engine.hidden_states import NORMED
from runner.engine.linear import ColumnParallelLinear, WeightTarget
from runner.engine.loader import LoadedModel
from runner.engine.shard import Shard

FILE = "warp_model.bin"
DEFAULT_SCALE = 0.02  # the reference's, where the config has none
# Names by which the reference also knows a key, in the order in which it looks for them.
OLDER_NAMES = {
    "pard2_scale": ("pard_scale", "feat_scale"),
    "pard2_target_dim": ("pard_target_dim",),
    "pard2_proj_bias": ("proj_bias",),
}
ALONE = "have a copy draft without the target's states, as PARD does (spd_type=pard and pard2=false in its config.json)"


def is_pard2(config: Mapping[str, Any]) -> bool:
    """Whether a draft model's config says that it reads the target's hidden states."""
    return config.get("spd_type") == "pard2" or bool(config.get("pard2"))


@dataclass(frozen=True, kw_only=True)
class FeatureConfig:
    tap_layers: tuple[int, ...]
    width: int  # of the states side by side
    scale: float
    has_bias: bool


def read_feature_config(config: Mapping[str, Any], source: ModelSource, target: LoadedModel) -> FeatureConfig:
    """
    Raises:
        UserError: hidden states, or a width of them, that this target does not have; no scale.
    """
    config = _in_todays_names(config)
    layers, num_layers = config.get("pard2_target_layers"), target.model.num_layers
    if not isinstance(layers, list) or not layers or not all(type(layer) is int for layer in layers):
        raise UserError(
            f"{source.name}={source.model}: pard2_target_layers must be a list of whole numbers, got {layers!r}; mend "
            f"its config.json, or {ALONE}"
        )
    if not all(-num_layers - 1 <= layer <= num_layers for layer in layers):
        raise UserError(
            f"{source.name}={source.model} reads the target's hidden states {layers}, which must lie in "
            f"[{-num_layers - 1}, {num_layers}] (-1 = what the head of {target.source.model} reads); choose the draft "
            f"of this target, or {ALONE}"
        )
    width = target.model.hidden_size * len(layers)
    stated = head_size(config, "pard2_target_dim", width, source)
    if stated != width:
        raise UserError(
            f"{source.name}={source.model}: pard2_target_dim must be {width}, {len(layers)} hidden states of "
            f"{target.source.model}, got {stated}; choose the draft of this target, or {ALONE}"
        )
    scale = config.get("pard2_scale", DEFAULT_SCALE)
    if type(scale) not in (int, float) or not math.isfinite(scale):
        raise UserError(
            f"{source.name}={source.model}: pard2_scale must be a number, got {scale!r}; mend its config.json"
        )
    places = [layer % (num_layers + 1) for layer in layers]
    return FeatureConfig(
        tap_layers=tuple(NORMED if place == num_layers else place for place in places),
        width=width,
        scale=float(scale),
        has_bias=bool(config.get("pard2_proj_bias", False)),
    )


def _in_todays_names(config: Mapping[str, Any]) -> dict[str, Any]:
    older = {
        name: next((config[old] for old in names if config.get(old) is not None), None)
        for name, names in OLDER_NAMES.items()
        if config.get(name) is None
    }
    return {**config, **{name: value for name, value in older.items() if value is not None}}


def require_plain_embeddings(draft: LoadedModel) -> Decoder:
    """The model of a draft whose first layer starts from its embeddings, to which features can be added.

    Raises:
        UserError: it is of a family that scales or norms them, in one place or another, or of transformers' own code.
    """
    model, source = draft.model, draft.source
    if isinstance(model, Decoder):
        of_input = (model.embedding_scale, model.input_scale, model.input_norm, model.per_layer_inputs)
        if all(own is None for own in (*of_input, model.stream_scale)):
            return model
    raise UserError(
        f"{source.name}={source.model} must be of a family whose layers start from the embeddings as they are, as "
        f"Llama's and Qwen3's do, to add the target's states to them, got {draft.hf_config.model_type}; choose another "
        f"draft, or {ALONE}"
    )


class TargetFeatures:
    def __init__(self, config: FeatureConfig, hidden_size: int, dtype: torch.dtype) -> None:
        """hidden_size: of the draft."""
        self.tap_layers, self.scale, self.hidden_size = config.tap_layers, config.scale, hidden_size
        self.target_proj = ColumnParallelLinear(
            config.width, {"target_proj": hidden_size}, bias=config.has_bias, shard=Shard(), dtype=dtype
        )

    def __call__(self, states: torch.Tensor, tile: int | None) -> torch.Tensor:
        """[num_rows, num_taps * target's hidden], num_rows a multiple of tile -> [num_rows, hidden]."""
        return self.target_proj(states, tile) * self.scale

    def of_zeros(self) -> torch.Tensor | None:
        """[hidden], of states that are zeros; None: zeros."""
        return None if self.target_proj.bias is None else self.target_proj.bias * self.scale

    def convert(self, change: Change) -> None:
        """As Decoder.convert."""
        self.target_proj.convert(change)

    def weight_targets(self) -> dict[str, WeightTarget]:
        return self.target_proj.weight_targets("")


def load_target_features(
    config: FeatureConfig, source: ModelSource, *, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> TargetFeatures:
    """Read the projection that lies beside a draft of this hidden size.

    Raises:
        UserError: there is none, or another one than its config says.
    """
    with torch.device(device):
        features = TargetFeatures(config, hidden_size, dtype)
    tensors = read_pickle_beside(source, FILE, f"download the draft again, or {ALONE}")
    fill_head(features.weight_targets(), tensors, source, f"the {FILE} of a PARD-2 draft model")
    quantize_head(features, source, device)
    return features
