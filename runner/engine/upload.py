"""Host values to the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of host values on the device; the upload waits for nothing (pageable memory would)."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def index_or_all(indices: list[int], num_rows: int, device: torch.device) -> Tensor | None:
    return None if len(indices) == num_rows else to_device(indices, torch.int64, device)
