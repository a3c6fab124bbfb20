"""Shapes of the inputs that layers have of their own, read from a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runner.engine.errors import UserError
from runner.engine.family import Family, named


@dataclass(frozen=True, kw_only=True)
class PerLayerShapes:
    vocab_size: int  # of the table
    size: int  # of a token's input of a layer


def read_per_layer_shapes(config: Any, family: Family) -> PerLayerShapes | None:
    """From a transformers config; None: layers have no inputs of their own.

    Raises:
        UserError: not every token has such an input.
    """
    size = config.hidden_size_per_layer_input if family.has_per_layer_inputs else 0
    if not size:
        return None
    vocab_size = config.vocab_size_per_layer_input
    if vocab_size < config.vocab_size:
        raise UserError(
            f"vocab_size_per_layer_input of a {config.model_type} checkpoint{named(config)} must be >= "
            f"{config.vocab_size}, its vocab_size, got {vocab_size}; mend its config"
        )
    return PerLayerShapes(vocab_size=vocab_size, size=size)
