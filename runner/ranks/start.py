"""The ranks that a configuration asks for, as the first of them has them."""

from __future__ import annotations

from runner.config import SpeculativeConfig
from runner.ranks.ranks import Ranks
from runner.target import resolve_device


def start_ranks(config: SpeculativeConfig) -> Ranks:
    """Raises UserError where there are not as many devices."""
    if config.hardware.tensor_parallel_size == 1:
        return Ranks()
    from runner.ranks.leader import Leader

    return Leader(config.hardware, resolve_device(config.hardware.device))
