"""Garbage collection that does not stop a step: a full one takes a quarter of a second where torch is imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Objects that may have come before all are looked at again: so many, or a quarter of those that there were, which is
# CPython's own rule. With torch and transformers imported there are 220,000.
MOST_GROWTH = 50_000
SHARE_OF_HEAP = 4

_growth = 0  # since that was done last
_heap = 0  # objects that were left then


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Only what is made while the block runs is looked at for cycles; what was there before comes afterwards again.

    Freezing and thawing make everything old and count from nothing, so that a program of many short blocks would never
    be rid of its own cycles: young ones are looked for in front of a block, and all when enough has come.
    """
    if gc.get_freeze_count() > 0:  # somebody has frozen what is theirs, and would find it thawed
        yield
        return
    _collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()  # the counts stay as they are, for the next block


def _collect() -> None:
    global _growth, _heap
    _count()
    if not gc.isenabled():
        return
    if _growth > max(MOST_GROWTH, _heap // SHARE_OF_HEAP):
        gc.collect()
        _growth, _heap = 0, len(gc.get_objects())
    else:
        _growth -= gc.collect(1)


def _count() -> None:
    """What the interpreter has counted since its counters were set to nothing, at most."""
    global _growth
    young, older, oldest = gc.get_count()
    of_young, of_older, _ = gc.get_threshold()
    _growth += young + of_young * (older + of_older * oldest)
