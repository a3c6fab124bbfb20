"""Garbage collection that does not stop a step: a full one takes a quarter of a second where torch is imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Only what is made while the block runs is looked at for cycles; what was there before comes afterwards again."""
    if gc.get_freeze_count() > 0:  # somebody has frozen what is theirs, and would find it thawed
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
