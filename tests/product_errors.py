"""How far off a product may be: as far as torch's own in the same dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_error_is_torchs(out: Tensor, by_torch: Tensor, exact: Tensor) -> None:
    """At most twice torch's in the same dtype, and a rounding of the largest value."""
    largest = exact.abs().max().to(out.dtype)
    ulp = float(torch.nextafter(largest, largest.new_tensor(float("inf"))) - largest)
    error, error_of_torch = ((values.double() - exact).abs().max().item() for values in (out.cpu(), by_torch))
    assert out.dtype == by_torch.dtype and out.shape == by_torch.shape
    assert error <= 2 * error_of_torch + ulp


def roundings_of(in_features: int) -> float:
    """By how much of the largest exact one sums of so many float32 products may be off."""
    return 2 * in_features**0.5 * torch.finfo(torch.float32).eps
