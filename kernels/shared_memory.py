"""How much shared memory a GPU gives a program."""

from __future__ import annotations

from functools import cache

import torch

HOPPERS = 227 * 1024


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have at most; Hopper's where kernels are interpreted."""
    if device.type != "cuda":
        return HOPPERS
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined, unused-ignore]
