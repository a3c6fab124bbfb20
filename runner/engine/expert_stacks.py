"""Checkpoints that hold the weights of all experts of a layer in one tensor, as gpt-oss's and Qwen3.5's do.

In gpt-oss's gate and up take turns, and a dense weight has a row for each input. Qwen3-VL's have such rows, too, but up
behind gate, and Qwen3.5's a row for each output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from runner.engine.expert_shapes import ExpertShapes
from runner.engine.mxfp4_tensors import Mxfp4Stack
from runner.engine.scaled_stacks import ScaledStack

ALL = slice(None)


@dataclass(frozen=True, kw_only=True)
class WeightOfExpert:
    """Of a safetensors slice [num_experts, in_features, all outputs], as one of its own: read where it is indexed."""

    tensor: Any
    expert: int
    outputs: slice

    def get_shape(self) -> list[int]:
        _, in_features, num_outputs = self.tensor.get_shape()
        return [len(range(num_outputs)[self.outputs]), in_features]

    def __getitem__(self, index: Any) -> Any:
        own = self.tensor[self.expert : self.expert + 1][0]
        return own[:, self.outputs].contiguous().t()[index]  # twice as fast as every other row of the transpose


@dataclass(frozen=True, kw_only=True)
class RowsOfExpert:
    """Of a safetensors slice [num_experts, all outputs, in_features], as one of its own: read where it is indexed."""

    tensor: Any
    expert: int
    first: int
    num_rows: int

    def get_shape(self) -> list[int]:
        return [self.num_rows, self.tensor.get_shape()[2]]

    def __getitem__(self, index: Any) -> Any:
        own = self.tensor[self.expert : self.expert + 1, self.first : self.first + self.num_rows]
        return own[0][index]


@dataclass(frozen=True, kw_only=True)
class BiasesOfExperts:
    """Of a safetensors slice [num_experts, all outputs]."""

    tensor: Any
    outputs: slice

    def get_shape(self) -> list[int]:
        num_experts, num_outputs = self.tensor.get_shape()
        return [num_experts, len(range(num_outputs)[self.outputs])]

    def __getitem__(self, index: Any) -> Any:
        return self.tensor[...][:, self.outputs].contiguous()[index]


def split_stacks(tensors: Iterable[tuple[str, Any]], experts: ExpertShapes | None) -> Iterator[tuple[str, Any]]:
    """Named tensors, those of all experts as what each expert has, and biases as what each projection has.

    One of another kind comes as it is, under a name that nobody waits for.
    """
    if experts is None or experts.mixture.stacks == "none":
        yield from tensors
        return
    if experts.mixture.stacks in ("by_output", "by_input"):
        tensors = _split_by_output(tensors, experts)
    if experts.mixture.stacks == "by_output":
        yield from tensors
        return
    parts = _outputs_of_projections(experts)
    for name, tensor in tensors:
        is_bias = name.endswith("_bias")
        layer, stack = _layer_and_stack(name.removesuffix("_bias"), experts)
        if stack is None or len(tensor.get_shape()) != (2 if is_bias else 3):
            yield name, tensor
            continue
        for projection, outputs in parts[stack].items():
            if is_bias:
                yield f"{layer}{experts.prefix}{projection}.bias", BiasesOfExperts(tensor=tensor, outputs=outputs)
                continue
            for expert in range(tensor.get_shape()[0]):
                if isinstance(tensor, Mxfp4Stack):
                    own: Any = tensor.part(expert, outputs)
                elif isinstance(tensor, ScaledStack):
                    own = tensor.part(expert, outputs, is_by_input=True)
                else:
                    own = WeightOfExpert(tensor=tensor, expert=expert, outputs=outputs)
                yield f"{layer}{experts.prefix}{expert}.{projection}.weight", own


def _layer_and_stack(name: str, experts: ExpertShapes) -> tuple[str, str | None]:
    """The name of a stack within its layer, and what stands before it; None: the tensor is none."""
    stack = next((own for own in experts.stack_names if name.endswith(f".{own}")), None)
    return ("", None) if stack is None else (name.removesuffix(stack), stack)


def _outputs_of_projections(experts: ExpertShapes) -> dict[str, dict[str, slice]]:
    """Which outputs of each stack are those of a projection, where weights have a row for each input."""
    gate, up, down = experts.mixture.projections
    size, (both, last) = experts.intermediate_size, experts.stack_names
    if experts.mixture.stacks == "by_input_in_turns":
        return {both: {gate: slice(0, None, 2), up: slice(1, None, 2)}, last: {down: ALL}}
    return {both: {gate: slice(0, size), up: slice(size, 2 * size)}, last: {down: ALL}}


def _split_by_output(tensors: Iterable[tuple[str, Any]], experts: ExpertShapes) -> Iterator[tuple[str, Any]]:
    size = experts.intermediate_size
    gate, up, down = experts.mixture.projections
    for name, tensor in tensors:
        layer, stack = _layer_and_stack(name, experts)
        shape = tensor.get_shape()
        if stack is None or len(shape) != 3 or not _is_by_output(stack, shape, experts):
            yield name, tensor
            continue
        is_first = stack == experts.stack_names[0]
        parts = ((gate, 0, size), (up, size, size)) if is_first else ((down, 0, shape[1]),)
        for expert in range(shape[0]):
            for projection, first, num_rows in parts:
                rows: Any = RowsOfExpert(tensor=tensor, expert=expert, first=first, num_rows=num_rows)
                if isinstance(tensor, ScaledStack):
                    rows = tensor.part(expert, slice(first, first + num_rows), is_by_input=False)
                yield f"{layer}{experts.prefix}{expert}.{projection}.weight", rows


def _is_by_output(stack: str, shape: list[int], experts: ExpertShapes) -> bool:
    """By its sizes: transformers saves anew by output what was published by input."""
    size, (_, first, last) = experts.intermediate_size, shape
    is_gated = stack == experts.stack_names[0]
    fits, fits_by_input = (first == 2 * size, last == 2 * size) if is_gated else (last == size, first == size)
    return fits and (experts.mixture.stacks == "by_output" or not fits_by_input)
