"""Named tensors of a quantized checkpoint, whatever its layout, by the names that they would have dense."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runner.engine.nvfp4_tensors import INVERSE_OF_ALL, OF_ALL, nvfp4_tensor
from runner.engine.quantization import SCALED_FP8, Scheme
from runner.engine.quantized_tensors import LEFT_ALONE, QuantizedTensor, require_plain
from runner.engine.scaled_tensors import scaled_tensor
from runner.engine.word_tensors import awq_tensor, gptq_tensor, int32_tensor


def unpack_tensors(slices: Mapping[str, Any], scheme: Scheme, of: str) -> Iterator[tuple[str, Any]]:
    """(name, slice) of every tensor: a quantized weight under the name that it would have dense, the rest as it is."""
    make, main, beside = {
        "scaled": (scaled_tensor, "weight", ("weight_scale", "weight_scale_inv", "weight_zero_point")),
        "int32": (int32_tensor, "weight_packed", ("weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")),
        "gptq": (gptq_tensor, "qweight", ("scales", "qzeros", "g_idx")),
        "awq": (awq_tensor, "qweight", ("scales", "qzeros")),
        "nvfp4 of modelopt": (nvfp4_tensor, "weight", ("weight_scale", OF_ALL)),
        "mixed": (_mixed_tensor, "weight", ("weight_scale", OF_ALL)),
        "nvfp4 of compressed-tensors": (nvfp4_tensor, "weight_packed", ("weight_scale", INVERSE_OF_ALL)),
    }[scheme.packing]
    for name, tensor in slices.items():
        module, _, kind = name.rpartition(".")
        if kind in LEFT_ALONE:
            continue
        if kind in beside and f"{module}.{main}" in slices:
            continue  # read with the weight
        parts = {other: slices[f"{module}.{other}"] for other in beside if f"{module}.{other}" in slices}
        if kind == main and (parts or main != "weight"):
            yield f"{module}.weight", make(tensor, parts, scheme, f"{of}: {module}")
        else:
            yield name, require_plain(tensor, name, of)


def _mixed_tensor(weight: Any, parts: Mapping[str, Any], scheme: Scheme, of: str) -> QuantizedTensor:
    """Which of the two a module has its tensors say: the names that a config lists them by are of other loaders'."""
    if weight.get_dtype() == "F8_E4M3":
        return scaled_tensor(weight, parts, SCALED_FP8, of)
    return nvfp4_tensor(weight, parts, scheme, of)
