"""What causal convolutions of a few taps add up, channel by channel: a bias, and each earlier token's part."""

from __future__ import annotations

from typing import Any

from kernels.cpu.compiled import vectorized
from kernels.cpu.elements import widen


@vectorized
def begin_with(sums: Any, bias: Any, channel: Any) -> None:
    """Of as many channels as there are sums, the first of which is `channel`."""
    size = len(sums)
    bias = bias[channel : channel + size]
    for index in range(size):
        sums[index] = widen(bias[index])


@vectorized
def add_tap(sums: Any, row: Any, column: Any, tap: Any, channel: Any) -> None:
    """A token's part in what another one gets; column: of the row, where the first channel's number stands."""
    size = len(sums)
    row, tap = row[column : column + size], tap[channel : channel + size]
    for index in range(size):
        sums[index] += widen(row[index]) * widen(tap[index])
