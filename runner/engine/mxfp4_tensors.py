"""Experts' weights in microscaling FP4 (OCP Microscaling Formats 1.0), as gpt-oss publishes them.

32 inputs of an output share a power of two, and each is one of 16 numbers, of which kernels take twice as much: whole
numbers, so that scales are half of those powers. An output's largest becomes its scale of 32 bits, and what that leaves
of the others its block scales: 4 bits hold what was published exactly, but that groups are 0 whose scale is less than
2**-24 times the largest of those that have other numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.quantized_weight import FP4_GROUP, codes_side_by_side
from runner.engine.errors import UserError
from runner.engine.quantization import FP4, MXFP4_GROUP
from runner.engine.quantized_tensors import AGAIN, Numbers, QuantizedTensor, require_plain, require_scales

EXPONENT_BIAS = 127
GROUPS = MXFP4_GROUP // FP4_GROUP  # of ours in one of theirs
BLOCKS, SCALES = "_blocks", "_scales"  # behind the name that a stack would have dense


@dataclass(frozen=True, kw_only=True)
class Mxfp4Stack:
    """The weights of all experts [num_experts, outputs, in_features]."""

    blocks: Any  # slice [num_experts, outputs, groups, 16] uint8, two numbers each, the one in the lower bits first
    scales: Any  # slice [num_experts, outputs, groups] uint8: exponents
    of: str  # for errors

    def get_shape(self) -> list[int]:
        num_experts, outputs, groups = self.scales.get_shape()
        return [num_experts, outputs, groups * MXFP4_GROUP]

    def __getitem__(self, index: Any) -> Tensor:
        raise UserError(
            f"{self.of} holds experts in MXFP4, which draft heads have not; choose a head made for the target"
        )

    def part(self, expert: int, outputs: slice) -> QuantizedTensor:
        """Some outputs of an expert's."""
        _, num_outputs, in_features = self.get_shape()

        def read() -> Numbers:
            codes = codes_side_by_side(self.blocks[expert : expert + 1][0][outputs])
            exponents = self.scales[expert : expert + 1][0][outputs].float()
            is_zero = codes.bitwise_and(7).view(*exponents.shape, MXFP4_GROUP).eq(0).all(dim=2)
            largest = exponents.masked_fill(is_zero, 0).amax(dim=1, keepdim=True)
            scales = require_scales(torch.exp2(largest - (EXPONENT_BIAS + 1)), self.of)
            block_scales = torch.exp2(exponents - largest).masked_fill(is_zero, 0)
            return Numbers.of_fp4(codes, block_scales.repeat_interleave(GROUPS, dim=1), scales)

        shape = (len(range(num_outputs)[outputs]), in_features)
        return QuantizedTensor(shape=shape, storage=FP4.of_inputs(in_features), read=read)


def stack_mxfp4(slices: Mapping[str, Any], of: str) -> Iterator[tuple[str, Any]]:
    """(name, slice) of every tensor, packed weights under the name that they would have dense.

    Raises:
        UserError: blocks without scales, or with scales of other blocks.
    """
    for name, tensor in slices.items():
        stack = name.removesuffix(BLOCKS)
        if name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in slices:
            continue  # read with the blocks
        if stack == name:
            yield name, require_plain(tensor, name, of)
            continue
        scales = slices.get(stack + SCALES)
        if scales is None:
            raise UserError(f"{of}: {name} lacks its {stack.rpartition('.')[2]}{SCALES}; {AGAIN}")
        expected = [*scales.get_shape(), MXFP4_GROUP // 2]
        if tensor.get_shape() != expected or len(expected) != 4:
            raise UserError(f"{of}: {name} must have shape {expected} by its scales, got {tensor.get_shape()}; {AGAIN}")
        for part, held in ((name, tensor), (stack + SCALES, scales)):
            if held.get_dtype() != "U8":
                raise UserError(f"{of}: {part} must hold bytes (U8), got {held.get_dtype()}; {AGAIN}")
        yield stack, Mxfp4Stack(blocks=tensor, scales=scales, of=f"{of}: {stack}")
