"""Garbage is collected again when the last of those leaves whom it would have disturbed."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from kernels.garbage import uncollected


@pytest.fixture(params=[True, False], ids=["collects", "does not collect"])
def collects(request: pytest.FixtureRequest) -> Iterator[bool]:
    """What the process does otherwise."""
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_whoever_leaves_first_takes_nothing_from_those_who_stay(collects: bool) -> None:
    """A recording that another thread's end had garbage collected in might free what is torch's to finish."""
    first, second = uncollected(), uncollected()
    first.__enter__()
    second.__enter__()
    assert not gc.isenabled()
    first.__exit__(None, None, None)  # not in the order of their coming, as threads are
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled() == collects


def test_an_error_passes_and_collects_again(collects: bool) -> None:
    with pytest.raises(KeyError), uncollected():
        raise KeyError
    assert gc.isenabled() == collects
