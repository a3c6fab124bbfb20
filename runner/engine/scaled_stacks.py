"""Checkpoints that hold the weights of all experts of a layer in one tensor of 8 bits beside their scales.

As Mistral Small 4's are published, and with a row for every input Qwen3-VL's: `<stack>_scale_inv` has a scale of each
expert, or one of each of its blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from runner.engine.errors import UserError
from runner.engine.quantization import Scheme
from runner.engine.quantized_tensors import EIGHT_BITS, LEFT_ALONE, QuantizedTensor
from runner.engine.scaled_tensors import scaled_tensor

SCALES = "_scale_inv"  # behind the name of a stack


@dataclass(frozen=True, kw_only=True)
class OfExpert:
    """Of a safetensors slice [num_experts, outputs, inputs], or the last two the other way round."""

    tensor: Any
    expert: int
    is_by_input: bool

    def get_shape(self) -> list[int]:
        shape = list(self.tensor.get_shape()[1:])
        return shape[::-1] if self.is_by_input else shape

    def __getitem__(self, index: Any) -> Any:
        own = self.tensor[self.expert : self.expert + 1][0]
        return (own.t().contiguous() if self.is_by_input else own)[index]


@dataclass(frozen=True, kw_only=True)
class ScaledStack:
    """The weights of all experts [num_experts, outputs, in_features], or with a row for every input."""

    numbers: Any
    scales: Any  # slice [num_experts, 1, 1], or of each expert's blocks
    scheme: Scheme
    of: str  # for errors

    def get_shape(self) -> list[int]:
        return list(self.numbers.get_shape())

    def __getitem__(self, index: Any) -> Any:
        raise UserError(
            f"{self.of} holds all experts in 8 bits beside their scales, which is read for models of our own decoder; "
            "use a checkpoint in bf16"
        )

    def part(self, expert: int, outputs: slice, *, is_by_input: bool) -> QuantizedTensor:
        """Some outputs of an expert's."""
        numbers, scales = (
            OfExpert(tensor=tensor, expert=expert, is_by_input=is_by_input) for tensor in (self.numbers, self.scales)
        )
        whole = scaled_tensor(numbers, {"weight_scale": scales}, self.scheme, self.of)
        return whole.rows(torch.arange(whole.shape[0])[outputs])


def take_scaled_stacks(
    slices: Mapping[str, Any], scheme: Scheme, of: str
) -> tuple[dict[str, ScaledStack], dict[str, Any]]:
    """(stacks of 8 bits, all other tensors), by name; what is said of a stack's activations is left alone."""
    stacks = {
        name: ScaledStack(numbers=tensor, scales=slices[name + SCALES], scheme=scheme, of=f"{of}: {name}")
        for name, tensor in slices.items()
        if name + SCALES in slices and tensor.get_dtype() in EIGHT_BITS and len(tensor.get_shape()) == 3
    }
    beside = {f"{name}{end}" for name in stacks for end in ("", SCALES, *(f"_{kind}" for kind in LEFT_ALONE))}
    return stacks, {name: tensor for name, tensor in slices.items() if name not in beside}
