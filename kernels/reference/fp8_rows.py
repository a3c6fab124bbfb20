"""Keys and values in 8 bits: float8_e4m3fn numbers that the scales of their layer multiply, one of keys, one of values.

Numbers are rounded to the nearest, ties to even, and what is larger than 448 becomes 448.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
KVScales = tuple[float, float]  # of a layer's keys, and of its values
NO_SCALES: KVScales = (1.0, 1.0)


def are_kept_in(dtype: torch.dtype, kept: torch.dtype, scales: KVScales) -> bool:
    """Whether a cache of dtype `kept` takes rows of dtype, under these scales."""
    return kept == FP8 or (kept == dtype and scales == NO_SCALES)


def as_fp8(rows: torch.Tensor, scale: float) -> torch.Tensor:
    """[..] -> [..] FP8, as multiples of scale; infinity becomes the largest number, NaN stays what it is."""
    return (rows.float() * (1.0 / scale)).clamp(-LARGEST, LARGEST).to(FP8)


def in_dtype_of_cache(rows: torch.Tensor, dtype: torch.dtype, scales: KVScales, *, values_from: int) -> torch.Tensor:
    """Rows [num_rows, width] as a cache of dtype keeps them; values_from: the first column of values."""
    if dtype != FP8:
        return rows
    if scales[0] == scales[1]:
        return as_fp8(rows, scales[0])
    return torch.cat([as_fp8(rows[:, :values_from], scales[0]), as_fp8(rows[:, values_from:], scales[1])], dim=1)
