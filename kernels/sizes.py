"""Sizes of grids and tiles, as the host computes them for each launch.

Triton's functions of these names are for kernels too and look through their arguments, which takes longer than a tenth
of a launch.
"""

from __future__ import annotations


def cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The first that is not smaller; number > 0."""
    return 1 << (number - 1).bit_length()
