"""Shapes of short convolutions in place of layers' attention, read from a config (LFM2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.engine.errors import UserError
from runner.engine.fused_tensors import Fused

SHORT_CONV = "conv"  # in layer_types, and a layer's block in the checkpoint


@dataclass(frozen=True, kw_only=True)
class ConvShapes:
    width: int  # channels
    taps: int  # tokens that a row sees, itself included
    has_biases: bool  # of projections and convolution
    in_layers: tuple[bool, ...]  # of each layer; the others attend

    @property
    def projected_rows(self) -> dict[str, int]:
        """Rows of the matrices b, c and x, in the paper's letters: what gates values, what gates results, values."""
        return {f"{SHORT_CONV}.in_proj_{name}": self.width for name in "bcx"}

    @property
    def fused_tensors(self) -> Mapping[str, Fused]:
        return {f"{SHORT_CONV}.in_proj": Fused(parts=self.projected_rows)}


def read_conv_shapes(config: Any) -> ConvShapes | None:
    """From a transformers config; None: all layers attend. Raises UserError for a number of taps that cannot be."""
    in_layers = tuple(kind == SHORT_CONV for kind in config.layer_types)
    if not any(in_layers):
        return None
    if config.conv_L_cache < 1:
        raise UserError(
            f"conv_L_cache of a {config.model_type} checkpoint must be >= 1, got {config.conv_L_cache}; mend its config"
        )
    return ConvShapes(
        width=config.hidden_size, taps=config.conv_L_cache, has_biases=config.conv_bias, in_layers=in_layers
    )
