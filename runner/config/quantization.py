"""In which numbers of 8 bits weights are to be held: the key that target and draft share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

# What vLLM calls checkpoints that say of themselves how they are quantized.
OF_CHECKPOINTS = (
    *("compressed-tensors", "gptq", "gptq_marlin", "awq", "awq_marlin", "auto_awq", "auto_gptq", "modelopt"),
    "fbgemm_fp8",
)


def _check(value: Any) -> Any:
    if value in OF_CHECKPOINTS:
        raise ValueError(
            f"must be fp8, int8 or null, got {value!r}: how a checkpoint is quantized already is read from its "
            "config.json; leave it null"
        )
    return value


NumbersOfWeights = Annotated[Literal["fp8", "int8"] | None, BeforeValidator(_check)]
