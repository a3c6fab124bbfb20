"""Names of the tensors of a backbone (Nemotron-H), whose layers are one thing each, as other decoders name theirs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

Tensor = TypeVar("Tensor")

_BESIDE_LAYERS = {"embeddings": "embed_tokens", "norm_f": "norm"}
_MIXER = re.compile(r"^(layers\.\d+)\.mixer\.(\w+)")
_OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_OF_STATES = ("in_proj", "out_proj", "conv1d", "norm", "A_log", "D", "dt_bias")
_NORM = re.compile(r"^(layers\.\d+)\.norm\.")


def decoder_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Named tensors of a checkpoint; those of a backbone by the names of a decoder's."""
    return {_name(name): tensor for name, tensor in tensors.items()}


def _name(name: str) -> str:
    own = name.removeprefix("backbone.")
    if own == name:
        return name
    first, _, rest = own.partition(".")
    if first in _BESIDE_LAYERS:
        return f"model.{_BESIDE_LAYERS[first]}.{rest}"
    own = _NORM.sub(r"\1.input_layernorm.", own)
    found = _MIXER.match(own)
    if found is not None:
        part = found[2]
        kind = "self_attn" if part in _OF_ATTENTION else "mamba" if part in _OF_STATES else "mlp"
        own = f"{found[1]}.{kind}.{own.removeprefix(f'{found[1]}.mixer.')}"
    return f"model.{own}"
