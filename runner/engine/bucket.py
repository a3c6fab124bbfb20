"""Sizes that launches are padded to: few, so that few graphs serve all."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass


def bucket(number: int) -> int:
    """The next size up, at most a quarter above: 0 to 8, then four sizes to each doubling."""
    if number <= 8:
        return number
    step = 1 << (number - 1).bit_length() - 3
    return -(-number // step) * step


def rows_of_prompts(num_rows: int) -> int:
    """The next size up: powers of two from 16 to 128, then multiples of it.

    These are the tokens of a product's tiles (kernels/linear_plan.py), so that padding costs hardly any time.
    """
    if num_rows <= 128:
        return max(16, 1 << (num_rows - 1).bit_length())
    return -(-num_rows // 128) * 128


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """How launches over segments of requests are padded."""

    rows: Callable[[int], int] = bucket
    most_rows: int = sys.maxsize  # a launch of more is not padded
    least_context: int = 1  # keys
    least_segments: int = 1  # of a launch with that context; longer tables would make a long upload

    def hold(self, num_rows: int) -> bool:
        """Whether a launch of so many rows is padded."""
        return self.rows(num_rows) <= self.most_rows


OF_GENERATED_TOKENS = Buckets()
# Prompts that come together as never before would be a graph of their own; an empty segment is a tile without rows.
OF_PROMPTS = Buckets(rows=rows_of_prompts, most_rows=1024, least_context=1024, least_segments=8)
