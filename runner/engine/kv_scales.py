"""Scales of keys and values that come with a checkpoint, for a cache in FP8: of ModelOpt, llm-compressor and Quark.

They are of whole layers. Of scales of heads the largest serves all: numbers are floats, so that a scale says what is
too large for them, and little else.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

from kernels.reference.fp8_rows import NO_SCALES, KVScales
from runner.engine.checkpoint import ModelSource, stated_quantization, stored_tensors
from runner.engine.errors import UserError

logger = logging.getLogger(__name__)

# self_attn.k_scale (llm-compressor), self_attn.k_proj.k_scale (ModelOpt), k_proj.output_scale (Quark), and the oldest.
_NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:\w+\.)*(?:([kv])_scale|(kv)_scale|([kv])_proj\.output_scale)")
SMALLEST, LARGEST = 2.0**-60, 2.0**60  # so that products with a scale and with its reciprocal are numbers


def read_kv_scales(source: ModelSource, num_layers: int, *, are_latents: bool) -> list[KVScales]:
    """Of each layer; 1 where the checkpoint has none, or has them for numbers of 4 bits.

    Args:
        are_latents: keys hold their values, so that one scale is of both: the keys', if there is one.

    Raises:
        UserError: one that cannot be a scale.
    """
    found: list[dict[str, float]] = [{} for _ in range(num_layers)]
    tensors = stored_tensors(source) if _are_of_8_bits(stated_quantization(source) or {}) else {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match and int(match[1]) < num_layers:
            scale = float(tensor[...].float().max()) if math.prod(tensor.get_shape()) else math.nan
            if not SMALLEST < scale < LARGEST:
                raise UserError(
                    f"{source.name}={source.model}: {name} must be a scale of keys and values, got {scale:.4g}; "
                    "choose hardware.kv_cache_dtype=auto, or mend the checkpoint"
                )
            own = found[int(match[1])]
            own |= {part: max(scale, own.get(part, 0.0)) for part in match[2] or match[3] or match[4]}
    num_scaled = sum(map(bool, found))
    logger.info("%s: scales of keys and values of %d of %d layers", source.model, num_scaled, num_layers)
    if are_latents:
        found = [dict.fromkeys("kv", own.get("k", own.get("v", 1.0))) for own in found]
    return [(own.get("k", NO_SCALES[0]), own.get("v", NO_SCALES[1])) for own in found]


def _are_of_8_bits(stated: Mapping[str, Any]) -> bool:
    inner = stated.get("quantization")
    stated = inner if isinstance(inner, Mapping) else stated
    scheme, algorithm = stated.get("kv_cache_scheme"), stated.get("kv_cache_quant_algo")
    num_bits = scheme.get("num_bits", 8) if isinstance(scheme, Mapping) else 8
    return num_bits == 8 and str(algorithm or "FP8").upper() in ("FP8", "INT8")
