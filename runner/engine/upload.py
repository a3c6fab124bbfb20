"""Host values to the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.under_way import NotRecordableError, current


def to_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of host values on the device."""
    # By way of numpy, which reads lists three times as fast as torch: block tables are tens of thousands of numbers.
    return upload(torch.from_numpy(np.array(values, dtype=str(dtype).removeprefix("torch."))), device)


def upload(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's on the device; the upload waits for nothing (pageable memory would).

    Raises:
        NotRecordableError: a recording is under way: replays would have this one's values, from memory that is gone.
    """
    if device.type != "cuda":
        if current() is not None:
            raise NotRecordableError("the host uploads something")
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def index_or_all(indices: list[int], num_rows: int, device: torch.device) -> Tensor | None:
    return None if len(indices) == num_rows else to_device(indices, torch.int64, device)
