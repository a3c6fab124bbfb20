"""Sizes that launches are padded to: few, so that few graphs serve all."""

from __future__ import annotations


def bucket(number: int) -> int:
    """The next size up, at most a quarter above: 0 to 8, then four sizes to each doubling."""
    if number <= 8:
        return number
    step = 1 << (number - 1).bit_length() - 3
    return -(-number // step) * step
