"""Biases that add nothing: AutoGPTQ gives one to every product, whether the model has a place for it or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def is_idle_bias(name: str, tensor: Any, is_weight: Callable[[str], bool]) -> bool:
    """Whether a tensor may be left out where nobody takes it: zeros that a known product would add.

    tensor: a safetensors slice or a tensor; is_weight: of a name, whether a known product multiplies by it.
    """
    return name.endswith(".bias") and is_weight(f"{name.removesuffix('bias')}weight") and not tensor[...].any()
